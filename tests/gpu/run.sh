#!/usr/bin/env bash
# The checks on a real GPU, in one command: run.sh [RESULTS_FOLDER] [pytest arguments]
# Plain processes, no Docker. Needs gcc, make, and a Python with pytest (PYTHON, default python3); of PyTorch, JAX,
# CuPy, numba-cuda, cuda-bindings and nvidia-ml-py it tries those that this Python has.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-bench/results}
[ $# -gt 0 ] && shift
mkdir -p "$out"
export FGPU_GPU_RESULTS="$out/gpu-$(date -u +%F).json"
exec "${PYTHON:-python3}" -m pytest -c tests/gpu/pytest.ini --rootdir tests/gpu --confcutdir tests/gpu \
  -p no:cacheprovider -ra -q tests/gpu "$@"
