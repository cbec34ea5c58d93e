"""Run simulations: one again, ``python -m fgpu_scheduler.testing --seed 7 --events 300``, or many, ``--seeds 0 999``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from fgpu_scheduler.testing.checks import Violation
from fgpu_scheduler.testing.simulator import Simulation

EVERY = 10
"""Seeds between two lines on how far it is."""


def main() -> int:
    """Run what the arguments say; return 1 if a check fired."""
    parser = argparse.ArgumentParser(prog="python -m fgpu_scheduler.testing", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one history")
    which.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), help="one history of each")
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument(
        "--file", action="store_true", help="keep the store in a file, which others write too"
    )
    parser.add_argument("--log", action="store_true", help="print the whole history of the one seed")
    parser.add_argument("--for-s", type=float, default=None, help="begin no other seed after so many seconds")
    asked = parser.parse_args()
    if asked.seeds is not None:
        return _many(asked.seeds[0], asked.seeds[1], asked.events, asked.for_s, file=asked.file)
    simulation, failed = _one(asked.seed, asked.events, file=asked.file)
    if asked.log:
        print("\n".join(simulation.lines))
    if failed is not None:
        print(failed, file=sys.stderr)
    return 1 if failed else 0


def _one(seed: int, events: int, *, file: bool, quiet: bool = False) -> tuple[Simulation, Violation | None]:
    with TemporaryDirectory() as folder:
        simulation = Simulation(seed, Path(folder) if file else None)
        try:
            report = simulation.run(events)
        except Violation as e:
            return simulation, e
    if not quiet:
        print(report)
    return simulation, None


def _many(first: int, last: int, events: int, for_s: float | None, *, file: bool) -> int:
    began_s = time.monotonic()
    broken: list[int] = []
    done = 0
    for seed in range(first, last + 1):
        if for_s is not None and time.monotonic() - began_s > for_s:
            break
        _, failed = _one(seed, events, file=file, quiet=True)
        done += 1
        if failed is not None:
            broken.append(seed)
            print(failed, file=sys.stderr, flush=True)
        if done % EVERY == 0 or seed == last:
            print(_progress(first, done, events, broken, time.monotonic() - began_s), flush=True)
    print(_progress(first, done, events, broken, time.monotonic() - began_s))
    return 1 if broken else 0


def _progress(first: int, done: int, events: int, broken: list[int], took_s: float) -> str:
    said = f"seeds {first}..{first + done - 1} x {events} events in {took_s:.0f} s: {len(broken)} broken"
    return f"{said} {broken[:20]}" if broken else said


if __name__ == "__main__":
    sys.exit(main())
