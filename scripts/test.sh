#!/usr/bin/env bash
# Runs the checks and tests; `make test` has installed what they need.
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

if [ "$what" != --kube ]; then
  echo "== lint"
  ruff check .
  ruff format --check .
  mypy
  lint-imports
  proselint check docs/*.md README.md CHANGELOG.md CONTRIBUTING.md labextension/README.md
fi
[ "$what" = --lint ] && exit 0

echo "== services"
work=$(mktemp -d)
kube=
finish() {
  # The build, with all that it has started.
  [ -z "$kube" ] || kill -- "-$kube" 2>/dev/null || true
  # shellcheck disable=SC1091
  if [ -s "$work/kube.env" ]; then (. "$work/kube.env" && tests/kube/cluster.sh down "$FGPU_TEST_KUBE"); fi
  tests/services.sh stop --dir "$work"
  rm -rf "$work"
}
trap finish EXIT
only=()
[ "$what" = --kube ] && only=(--only docker)
tests/services.sh start --dir "$work" --env "$work/services.env" "${only[@]}"
set -a
# shellcheck disable=SC1091
. "$work/services.env"
set +a

# The first time on a machine Kubernetes is built, in 6 to 15 minutes, while other tests run; its own are the last then.
if [ "$what" = --kube ] || [ "${CI:-}" = true ] || { [ "$(id -u)" = 0 ] && tests/kube/build.sh --check >/dev/null; }; then
  setsid nice tests/kube/build.sh >"$work/kube.log" 2>&1 &
  kube=$!
fi

echo "== session image, JupyterLab extension"
# Side by side: each keeps one core busy.
image=
if [ -n "${FGPU_TEST_DOCKER:-}" ]; then
  scripts/image.sh base host >"$work/image.log" 2>&1 &
  image=$!
fi
[ "$what" = --kube ] || (cd labextension && python -m pytest -q && jlpm test)
if [ -n "$image" ] && ! wait "$image"; then
  cat "$work/image.log"
  exit 1
fi

echo "== tests"
# Most of them wait for a Hub or an engine: one more at a time than there are cores keeps these busy.
workers=(-n "${FGPU_TEST_WORKERS:-$(($(nproc) + 1))}" --dist loadgroup)
slow=" and not slow"
[ "$what" = --slow ] && slow=
# With arguments it may be that none of the tests is one of these.
run() { python -m pytest "${workers[@]}" -m "$@" || { [ $? = 5 ] && [ $# -gt 1 ]; }; }
cluster() {
  if ! wait "$kube"; then
    cat "$work/kube.log"
    exit 1
  fi
  kube=
  tests/kube/cluster.sh up --env "$work/kube.env"
  set -a
  # shellcheck disable=SC1091
  . "$work/kube.env"
  set +a
}
if [ -z "$kube" ]; then
  run "not kubernetes$slow" "$@"
  echo "== Kubernetes: its tests are left out; make test-kube builds it"
elif [ "$what" = --kube ]; then
  cluster
  run "kubernetes$slow" "$@"
elif tests/kube/build.sh --check >/dev/null; then
  # Its tests wait for pods most of the time.
  cluster
  run "${slow:+not slow}" "$@"
else
  run "not kubernetes$slow" "$@"
  cluster
  run "kubernetes$slow" "$@"
fi
