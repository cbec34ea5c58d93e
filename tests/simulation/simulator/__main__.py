"""Run one simulation, ``python -m simulator --seed 7 --events 300``, or many, ``--seeds 0 999``.

``--seeds 1 100000 --record FILE --for-s 3600`` runs a part of very many, and the next call continues there.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import fgpu_scheduler
from simulator.checks import Violation
from simulator.simulator import Simulation

EVERY = 10
"""Seeds between two lines of progress."""
PASSED, BROKEN = "passed", "broken"


def main() -> int:
    """Run what the arguments say; return 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="one history")
    which.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), help="one history of each")
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument(
        "--file", action="store_true", help="keep the store in a file, which others write too"
    )
    parser.add_argument("--log", action="store_true", help="print the whole history of the one seed")
    parser.add_argument("--for-s", type=float, default=None, help="begin no other seed after so many seconds")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="note each seed there, and run none that this very source has passed",
    )
    asked = parser.parse_args()
    if asked.seeds is not None:
        record = Record(asked.record, asked.events, file=asked.file) if asked.record else None
        return _many(asked.seeds[0], asked.seeds[1], asked.events, asked.for_s, record, file=asked.file)
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


def _many(
    first: int, last: int, events: int, for_s: float | None, record: Record | None, *, file: bool
) -> int:
    began_s = time.monotonic()
    broken: list[int] = []
    done = newest = 0
    known = record.passed() if record is not None else frozenset()
    if known:
        print(f"{sum(first <= seed <= last for seed in known)} of them have passed before: {record}")
    for seed in range(first, last + 1):
        if for_s is not None and time.monotonic() - began_s > for_s:
            break
        if seed in known:
            continue
        _, failed = _one(seed, events, file=file, quiet=True)
        done, newest = done + 1, seed
        if failed is not None:
            broken.append(seed)
            print(failed, file=sys.stderr, flush=True)
        if record is not None:
            record.note(seed, passed=failed is None)
        if done % EVERY == 0:
            print(_progress(seed, done, events, broken, time.monotonic() - began_s), flush=True)
    print(_progress(newest, done, events, broken, time.monotonic() - began_s))
    return 1 if broken else 0


class Record:
    """A file with a line for each seed that was run: the source, the store, the events, the seed, and the result.

    Several processes may write one file at the same time. Results of another source do not count.
    """

    def __init__(self, path: Path, events: int, *, file: bool) -> None:
        self._path = path
        self._about = f"{source()} {'file' if file else 'memory'} {events}"

    def passed(self) -> frozenset[int]:
        """Return the seeds that this source has passed, ignoring a line that was cut off."""
        if not self._path.exists():
            return frozenset()
        lines = (line.rsplit(" ", 2) for line in self._path.read_text().splitlines())
        own = (line[1:] for line in lines if len(line) == 3 and line[0] == self._about)
        return frozenset(int(seed) for seed, said in own if said == PASSED and seed.isdecimal())

    def note(self, seed: int, *, passed: bool) -> None:
        """Write a seed's result."""
        with self._path.open("a") as record:
            record.write(f"{self._about} {seed} {PASSED if passed else BROKEN}\n")

    def __str__(self) -> str:
        return f"{self._path} of {self._about} events"


def source() -> str:
    """Return a hash of the source of the scheduler and its simulator."""
    known = hashlib.sha256()
    for root in (Path(fgpu_scheduler.__file__).parent, Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            known.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return known.hexdigest()[:12]


def _progress(seed: int, done: int, events: int, broken: list[int], took_s: float) -> str:
    said = f"{done} seeds, to {seed}, x {events} events in {took_s:.0f} s: {len(broken)} broken"
    return f"{said} {broken[:20]}" if broken else said


if __name__ == "__main__":
    sys.exit(main())
