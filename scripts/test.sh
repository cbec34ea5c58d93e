#!/usr/bin/env bash
# Runs the checks and tests; `make test` has installed what they need. The slow parts of tests/parts.toml run with
# --slow, or where they are named (PARTS="docker browser"), or, with CI=true, where their sources have changed since
# they last passed.
#   test.sh [--lint | --quick | --slow | --kube] [pytest arguments]
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

lint() {
  echo "== lint"
  ruff check .
  ruff format --check .
  mypy
  lint-imports
  python scripts/docs.py --check
  proselint check docs/*.md README.md CHANGELOG.md CONTRIBUTING.md labextension/README.md
}
if [ "$what" = --lint ]; then
  lint
  exit
fi

work=$(mktemp -d)
declare -A jobs
finish() {
  # What still runs, with all that it has started.
  for job in "${jobs[@]}"; do kill -- "-$job" 2>/dev/null || true; done
  # shellcheck disable=SC1091
  if [ -s "$work/kube.env" ]; then (. "$work/kube.env" && tests/kube/cluster.sh down "$FGPU_TEST_KUBE"); fi
  tests/services.sh stop --dir "$work"
  rm -rf "$work"
}
trap finish EXIT
# NAME COMMAND...: runs it beside all else, in a session of its own; what it says goes to a file
begin() {
  setsid "${@:2}" >"$work/$1.log" 2>&1 &
  jobs[$1]=$!
}
# NAME: waits until it has ended; if it failed, says all that it said, and so ends this
end() {
  local pid=${jobs[$1]}
  unset "jobs[$1]"
  if ! wait "$pid"; then
    cat "$work/$1.log"
    exit 1
  fi
}

# NAME: the same, and says what it said
shown() {
  end "$1"
  cat "$work/$1.log"
}

tests/parts.py hash >"$work/parts.before"
slow_parts=${PARTS:-}
[ "${CI:-}" != true ] || slow_parts=${PARTS-$(tests/parts.py changed)}
[ "$what" != --slow ] || slow_parts=$(tests/parts.py names)
[ "$what" != --kube ] || slow_parts=kubernetes
if [ "$(id -u)" != 0 ] && [ "${CI:-}" != true ]; then slow_parts=${slow_parts/kubernetes/}; fi # its cluster needs root
wants() { [[ " $slow_parts " == *" $1 "* ]]; }

echo "== services, session image, JupyterLab extension; lint beside them"
only=()
[ "$what" = --kube ] && only=(--only docker)
begin services tests/services.sh start --dir "$work" --env "$work/services.env" "${only[@]}"
# What pytest makes of each file before it runs it, is made here once, and not by each worker.
begin collect python -m pytest --collect-only -q
if [ "$what" != --kube ]; then
  begin lint scripts/test.sh --lint
  begin lab bash -c 'cd labextension && python -m pytest -q && jlpm test'
fi
shown services
set -a
# shellcheck disable=SC1091
. "$work/services.env"
set +a
[ -z "${FGPU_TEST_DOCKER:-}" ] || begin image scripts/image.sh base host
# The first time on a machine Kubernetes is built, in a few minutes.
with_kube=
if wants kubernetes; then
  with_kube=1
  begin kube tests/kube/build.sh
fi
# Before what takes longer: who has to mend a line waits for no image.
[ "$what" = --kube ] || shown lint
[ -z "${FGPU_TEST_DOCKER:-}" ] || end image
if [ -n "$with_kube" ]; then
  end kube
  begin cluster tests/kube/cluster.sh up --env "$work/kube.env"
fi
[ "$what" = --kube ] || shown lab
if [ -n "$with_kube" ]; then
  end cluster
  set -a
  # shellcheck disable=SC1091
  . "$work/kube.env"
  set +a
fi

echo "== tests"
echo "Slow parts that run: ${slow_parts:-none}. Left out: $(comm -23 <(tests/parts.py names | tr ' ' '\n' | sort) \
  <(tr ' ' '\n' <<<"$slow_parts" | sort) | xargs) (PARTS=\"NAME ...\" or make test-all runs them)"
end collect
# Most of them wait for a Hub or an engine: two more at a time than there are cores keep these busy.
# The longest first, as tests/conftest.py has put them.
workers=(-n "${FGPU_TEST_WORKERS:-$(($(nproc) + 2))}" --dist loadgroup --no-loadscope-reorder)
which="not slow"
[ "$what" = --slow ] && which="slow or not slow"
chosen=()
[ "$what" = --kube ] || chosen=(--part fast)
for part in $slow_parts; do chosen+=(--part "$part"); done
SECONDS=0
status=0
python -m pytest "${workers[@]}" --durations 20 -m "$which" "${chosen[@]}" "$@" || status=$?
# With arguments it may be that none of the tests is one of these.
if [ $status = 5 ] && [ $# -gt 0 ]; then status=0; fi
[ $status = 0 ] || exit $status
# Without CI=true a test that lacks what it needs is skipped: then the part was not shown.
if [ $# = 0 ] && [ "${CI:-}" = true ]; then
  # shellcheck disable=SC2086
  tests/parts.py passed "$work/parts.before" "$SECONDS" $slow_parts
fi
