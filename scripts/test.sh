#!/usr/bin/env bash
# Runs the checks and tests; `make test` has installed what they need.
#   test.sh [--lint | --quick | --slow] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.node/bin:$PWD/.venv/bin:$PATH"
# Tests start hundreds of programs: each would compile all that it imports.
unset PYTHONDONTWRITEBYTECODE
what=${1:-}
[ $# -gt 0 ] && shift

if [ "$what" = --quick ]; then
  # What needs no service, without the few that start Hubs, compile, or make networks.
  exec python -m pytest -q -n "$(nproc)" --dist worksteal -m "not slow" --ignore-glob '*/test_build.py' --ignore-glob '*/test_firewall.py' \
    -k "not hub_that_cannot_work and not does_not_answer_is_refused_with_one_line" \
    tests/unit tests/property "$@"
fi

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

echo "== session image, JupyterLab extension"
# Side by side: each keeps one core busy.
image=
if [ -n "${FGPU_TEST_DOCKER:-}" ]; then
  scripts/image.sh base host >"$work/image.log" 2>&1 &
  image=$!
fi
(cd labextension && python -m pytest -q && jlpm test)
if [ -n "$image" ] && ! wait "$image"; then
  cat "$work/image.log"
  exit 1
fi

echo "== tests"
# Most of them wait for a Hub or an engine: one more at a time than there are cores keeps these busy.
workers=(-n "${FGPU_TEST_WORKERS:-$(($(nproc) + 1))}" --dist loadgroup)
if [ "$what" = --slow ]; then
  python -m pytest "${workers[@]}" "$@"
else
  python -m pytest "${workers[@]}" -m "not slow" "$@"
fi
