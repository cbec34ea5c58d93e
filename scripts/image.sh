#!/usr/bin/env bash
# Builds a session image with the Lab extension of this checkout in it, or the image `hub`.   image.sh NAME [BASE]
# BASE is an image reference, or `host`: from this Debian machine's own packages, where no registry is reachable.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?the name of an image, such as base}
base=${2:-}
export PATH="$PWD/.node/bin:$PWD/.venv/bin:$PATH"
command -v uv >/dev/null || .venv/bin/pip install --quiet 'uv>=0.8'
if [[ $name == hub ]]; then
    rm -rf dist
    # Without a registry there may be no package index either: then everything goes in with it.
    if [[ $base == host ]]; then what='.[kubernetes,postgresql]'; else what='--no-deps .'; fi
    # shellcheck disable=SC2086  # two words
    .venv/bin/pip wheel --quiet --wheel-dir dist $what
    exec images/build.sh hub ${base:+--base "$base"}
fi
rm -rf labextension/dist
.venv/bin/pip wheel --quiet --no-deps --wheel-dir labextension/dist ./labextension
exec images/build.sh "$name" ${base:+--base "$base"} --smoke
