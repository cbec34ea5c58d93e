"""How long the page of installation takes on a bare Debian 12, line by line, up to a student's first cell.

.venv/bin/python bench/install.py [--dist dist] [--out bench/results/install-DATE.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from machine import ROOT, load, machine, source

sys.path.insert(0, str(ROOT / "tests" / "docker"))

from baredebian import BareDebian, installed, make_base, make_image, python_of


def main() -> int:
    """Install, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="what `make dist` has made")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = given.out or ROOT / "bench" / "results" / time.strftime("install-%Y-%m-%d.json")
    reference = tomllib.loads((ROOT / "images/base/image.toml").read_text())["base"]
    bare = BareDebian(f"fgpu-bare-{secrets.token_hex(3)}")
    before, of = load(), source()
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_image(Path(folder))
            bare.start(given.dist, make_base(Path(folder), python_of(reference)), reference)
            steps = installed(bare)
        began = time.monotonic()
        assert bare.a_cell_of("ann", "6 * 7") == "42"
        first_cell_s = round(time.monotonic() - began, 1)
    finally:
        bare.stop()
    results = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "source": of,
        "machine": machine(),
        "load_before": before,
        "load_after": load(),
        "lines": len(steps),
        "minutes": round(sum(step.seconds for step in steps) / 60, 1),
        "first_cell_s": first_cell_s,
        "steps": [dataclasses.asdict(step) for step in steps],
    }
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
