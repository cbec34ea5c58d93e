"""Run one simulation again: ``python -m fgpu_scheduler.testing --seed 7 --events 300``."""

from __future__ import annotations

import argparse
import sys

from fgpu_scheduler.store import Store
from fgpu_scheduler.testing.checks import Violation
from fgpu_scheduler.testing.memory import MemoryStore, SessionStore
from fgpu_scheduler.testing.simulator import Simulation


def main() -> int:
    """Run what the arguments say; return 1 if a check fired."""
    parser = argparse.ArgumentParser(prog="python -m fgpu_scheduler.testing", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument(
        "--store", choices=("memory", "sql"), default="memory", help="sql is SQLite in memory"
    )
    parser.add_argument("--log", action="store_true", help="print the whole history")
    asked = parser.parse_args()
    store: SessionStore = MemoryStore()
    if asked.store == "sql":
        store = Store("sqlite://")
        store.open()
    simulation = Simulation(asked.seed, store)
    failed = None
    try:
        print(simulation.run(asked.events))
    except Violation as e:
        failed = e
    if asked.log:
        print("\n".join(simulation.lines))
    if failed is not None:
        print(failed, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
