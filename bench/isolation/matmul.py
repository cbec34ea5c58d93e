"""What libfgpu costs a program that computes: PyTorch's matrix products on a real GPU, with it and without, in turns.

matmul.py [--rounds 7] [--size 4096] [--out FILE]

Needs a GPU, and a Python with PyTorch. `large` is bound by the GPU, `small` by the starting of kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "isolation")]

from slices import NoGpu, Nvml, Slice, build  # noqa: E402

PRODUCTS = """
import json, sys, time, torch
def rate(size, count):
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(10):
        a @ a
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        a @ a
    torch.cuda.synchronize()
    return count / (time.perf_counter() - began)
print(json.dumps({"large": rate(int(sys.argv[1]), 200), "small": rate(64, 20000)}))
"""


def main() -> int:
    """Measure, print the table, write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default 7)")
    parser.add_argument("--size", type=int, default=4096, help="rows of the large matrix (default 4096)")
    parser.add_argument("--out", type=Path, help="results file (JSON)")
    args = parser.parse_args()
    try:
        gpu = Nvml().gpus()[0]
    except (NoGpu, IndexError) as e:
        print(f"not run: no NVIDIA GPU ({e})", file=sys.stderr)
        return 1
    rates: dict[str, list[dict[str, float]]] = {"direct": [], "libfgpu": []}
    with tempfile.TemporaryDirectory() as scratch:
        built = build(Path(scratch) / "built")
        session = Slice(Path(scratch) / "session", built, gpu, memory_mib=gpu.memory_mib // 2)
        ours = session.environment()
        direct = {k: v for k, v in ours.items() if k != "LD_PRELOAD"}
        for turn in range(args.rounds):
            for which in ("direct", "libfgpu") if turn % 2 else ("libfgpu", "direct"):
                done = subprocess.run(
                    [sys.executable, "-c", PRODUCTS, str(args.size)],
                    env=ours if which == "libfgpu" else direct,
                    capture_output=True,
                    text=True,
                    check=True,
                )
                rates[which].append(json.loads(done.stdout))
    results = {
        "machine": {"gpu": gpu.name, "driver": gpu.driver},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "unit": "products/s",
        "figures": {
            name: {which: statistics.median(r[name] for r in rates[which]) for which in rates}
            for name in ("large", "small")
        },
        "values": rates,
    }
    for name, both in results["figures"].items():
        ratio = both["libfgpu"] / both["direct"]
        print(
            f"{name}: direct {both['direct']:.1f}/s, libfgpu {both['libfgpu']:.1f}/s, ratio {ratio:.4f} (target 0.99)"
        )
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
