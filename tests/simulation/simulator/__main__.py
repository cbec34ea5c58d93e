"""Run one simulation, ``python -m simulator --seed 7 --events 300``, or many, ``--seeds 0 999 --for-s 3600``.

With ``--record FILE`` many can be run in parts: a later call continues where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from simulator.checks import Violation
from simulator.simulator import Simulation


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
    parser.add_argument("--log", action="store_true", help="print each whole history")
    parser.add_argument(
        "--record", type=Path, help="go on where this file says, and write there what has run"
    )
    parser.add_argument("--for-s", type=float, default=float("inf"), help="begin no seed after these seconds")
    asked = parser.parse_args()
    first, last = asked.seeds or (asked.seed, asked.seed)
    began_s = time.monotonic()
    record: dict[str, Any] = {"events": asked.events, "first": first, "next": first, "broken": []}
    if asked.record and asked.record.exists():
        record = json.loads(asked.record.read_text())
        if (record["events"], record["first"]) != (asked.events, first):
            parser.error(
                f"{asked.record} has {record['events']} events of the seeds from {record['first']} on"
            )
    broken: list[int] = record["broken"]
    for seed in range(record["next"], last + 1):
        if time.monotonic() - began_s > asked.for_s:
            break
        with TemporaryDirectory() as folder:
            simulation = Simulation(seed, Path(folder) if asked.file else None)
            try:
                print(simulation.run(asked.events), flush=True)
            except Violation as e:
                broken.append(seed)
                print(e, file=sys.stderr, flush=True)
        if asked.log:
            print("\n".join(simulation.lines))
        if asked.record:
            asked.record.write_text(json.dumps(record | {"next": seed + 1, "broken": broken}) + "\n")
    print(f"{len(broken)} broken: {broken[:20]}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
