#!/usr/bin/env bash
# Runs the checks and tests; `make test` has installed what they need.   test.sh [--lint | --slow] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.node/bin:$PWD/.venv/bin:$PATH"
# Tests start hundreds of programs: each would compile all that it imports.
unset PYTHONDONTWRITEBYTECODE
what=${1:-}
[ $# -gt 0 ] && shift

echo "== lint"
ruff check .
ruff format --check .
mypy
lint-imports
[ "$what" = --lint ] && exit 0

echo "== services"
work=$(mktemp -d)
trap 'tests/services.sh stop --dir "$work"; rm -rf "$work"' EXIT
tests/services.sh start --dir "$work" --env "$work/services.env"
set -a
# shellcheck disable=SC1091
. "$work/services.env"
set +a
if [ -n "${FGPU_TEST_DOCKER:-}" ]; then
  scripts/image.sh base host
fi

echo "== JupyterLab extension"
(cd labextension && python -m pytest -q && jlpm test)

echo "== tests"
# Most of them wait for a Hub or an engine: three at a time keep two cores busy.
workers=(-n "${FGPU_TEST_WORKERS:-3}" --dist loadgroup)
if [ "$what" = --slow ]; then
  python -m pytest "${workers[@]}" "$@"
else
  python -m pytest "${workers[@]}" -m "not slow" "$@"
fi
