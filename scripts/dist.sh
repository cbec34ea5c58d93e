#!/usr/bin/env bash
# Makes what a release consists of, in dist/: an sdist and a wheel of fgpuspawner and of jupyterlab-fgpu, SHA256SUMS, and
# a bill of materials. Wheels are made from the sdists, so that these are complete.
#   dist.sh [FOLDER]
# For 64-bit Arm too where its compiler is: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.node/bin:$PWD/.venv/bin:$PATH"
out=${1:-dist}
readonly POLICY=manylinux_2_17 ARM=aarch64-linux-gnu-gcc

say() { printf 'dist: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

mkdir -p "$out"
out=$(realpath "$out")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/made" "$scratch/tree"

# The same files from the same commit.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) || die "this is no checkout"
export SOURCE_DATE_EPOCH
# What git does not ignore and nothing else; and nothing here changes while others use it.
git ls-files -z --cached --others --exclude-standard | xargs -0 tar -c | tar -x -C "$scratch/tree"
cd "$scratch/tree"

# Apart from what the project runs with: its versions are its own.
python -m venv "$scratch/venv"
tools=$scratch/venv/bin
python - >"$scratch/tools.txt" <<'PY'
import tomllib

print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dist"], sep="\n")
PY
"$tools/pip" install --quiet --requirement "$scratch/tools.txt"
export PATH="$tools:$PATH"

made() { find "$scratch/made" -maxdepth 1 -name "$1" -print -quit; }

say "jupyterlab-fgpu"
"$tools/python" -m build --outdir "$scratch/made" labextension >"$scratch/log" 2>&1 || { tail -n 30 "$scratch/log" >&2; exit 1; }

wheel_for() { # COMPILER MACHINE: libfgpu runs in old images too, which auditwheel makes sure of
    local from=$scratch/$2
    rm -rf "$from"
    CC=$1 FGPU_MACHINE=$2 "$tools/python" -m pip wheel --quiet --no-deps --no-cache-dir --wheel-dir "$from" \
        "$(made 'fgpuspawner-*.tar.gz')" >"$scratch/log" 2>&1 || { tail -n 30 "$scratch/log" >&2; exit 1; }
    [[ $(echo "$from"/*.whl) != *-any.whl ]] || { cat "$scratch/log" >&2; die "the wheel would be without libfgpu"; }
    "$tools/auditwheel" repair --plat auto --wheel-dir "$scratch/made" "$from"/*.whl >"$scratch/log" 2>&1 ||
        { tail -n 30 "$scratch/log" >&2; exit 1; }
    [[ -n $(made "fgpuspawner-*${POLICY}_$2.whl") ]] || { cat "$scratch/log" >&2; die "the wheel is not $POLICY"; }
}

say "fgpuspawner"
"$tools/python" -m build --sdist --outdir "$scratch/made" . >"$scratch/log" 2>&1 || { tail -n 30 "$scratch/log" >&2; exit 1; }
wheel_for "${CC:-gcc}" "$(uname -m)"
if [[ $(uname -m) != aarch64 ]] && command -v "$ARM" >/dev/null; then
    wheel_for "$ARM" aarch64
else
    say "no wheel for another machine: $ARM is not here"
fi

say "bill of materials"
python -m venv --without-pip "$scratch/bare"
"$tools/pip" --python "$scratch/bare/bin/python" install --quiet "$(made "fgpuspawner-*$(uname -m).whl")" "$(made 'jupyterlab_fgpu-*.whl')"
"$tools/cyclonedx-py" environment --output-reproducible --output-format JSON \
    --output-file "$scratch/made/fgpuspawner.cdx.json" "$scratch/bare/bin/python" 2>"$scratch/log" || { cat "$scratch/log" >&2; exit 1; }

(cd "$scratch/made" && sha256sum -- * >SHA256SUMS)
rm -f "$out"/{fgpuspawner,jupyterlab_fgpu}-* "$out"/fgpuspawner.cdx.json "$out"/SHA256SUMS
mv "$scratch"/made/* "$out/"
ls -1sh "$out" >&2
