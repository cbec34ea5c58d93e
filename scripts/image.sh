#!/usr/bin/env bash
# Builds a session image with the Lab extension of this checkout in it.   image.sh NAME [BASE]
# BASE is an image reference, or `host`: from this Debian machine's own packages, where no registry is reachable.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?the name of an image, such as base}
base=${2:-}
export PATH="$PWD/.node/bin:$PWD/.venv/bin:$PATH"
rm -rf labextension/dist
.venv/bin/pip wheel --quiet --no-deps --wheel-dir labextension/dist ./labextension
command -v uv >/dev/null || .venv/bin/pip install --quiet 'uv>=0.8'
exec images/build.sh "$name" ${base:+--base "$base"} --smoke
