"""A simulated week of a real Hub: 500 sessions with faults beside them, what grows, and what is left behind.

.venv/bin/python bench/soak.py [--sessions 500] [--minutes 12] [--kind local] [--out bench/results/soak-DATE.json]
.venv/bin/python bench/soak.py --sessions 60 --postgres | --kind docker --warm 4
.venv/bin/python bench/soak.py --standing [--out bench/results/standing-DATE.json]

The third has a Hub at its own pace, and says what it needs while no session, 20 and 60 run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from machine import ROOT, load, machine, source

sys.path[:0] = [str(ROOT / "tests" / "hub"), str(ROOT / "tests" / "faults")]

from hubprocess import HubProcess, running, until  # noqa: E402
from outages import Locked, Stopped  # noqa: E402
from servers import MINI, QUICK, server_lines  # noqa: E402
from soaking import ASKED, Of, Soak, figures, growth, service_of, size_kib, soaked, wrong  # noqa: E402

WEEK_S = 7 * 24 * 3600
ROOMY = {"name": "local", "cpu": 64, "memory_mib": 64 * 1024, "gpus": {"simulated": 30}}
STANDING = (0, 20, 60)
LOOKED_AT_FOR_S = 60
QUIET = 'c.JupyterHub.log_level = "INFO"\n'


def standing(folder: Path) -> list[dict[str, Any]]:
    """Return what Hub, service and proxy need while this number of sessions run, at their own pace."""
    found = []
    after = QUIET + QUICK + server_lines("local", MINI)
    with running(folder, after=after, outer_proxy=True, nodes=[ROOMY]) as hub:
        for count in STANDING:
            users = [f"user{n:02}" for n in range(count)]
            for user in users:
                hub.add_user(user)
                if not hub.servers(user):
                    hub.spawn(user, options=ASKED)
            until(lambda users=users: all(map(hub.ready, users)), within_s=300, what=f"{count} sessions run")
            before = each(hub)
            time.sleep(LOOKED_AT_FOR_S)
            after_it = each(hub)
            found.append({"sessions": count} | {name: needs(before[name], after_it[name]) for name in before})
            say(f"{count} sessions run: {found[-1]}")
        found[-1]["database_kib"] = {
            p.name: size_kib(f"sqlite:///{p}") for p in sorted(hub.data.glob("*.sqlite"))
        }
    return found


def each(hub: HubProcess) -> dict[str, Of]:
    """Return what each process has now."""
    assert hub.process is not None
    assert hub.proxy is not None
    service = until(lambda: service_of(hub), what="the service runs")
    pids = {"hub": hub.process.pid, "service": service.pid, "proxy": hub.proxy.pid}
    return {name: figures(psutil.Process(pid)) for name, pid in pids.items()}


def needs(before: Of, after: Of) -> dict[str, float]:
    """Return what a process needs: memory, and of a core in percent."""
    cpu_percent = round(100 * (after.cpu_s - before.cpu_s) / LOOKED_AT_FOR_S, 1)
    return {"memory_mib": after.rss_mib, "cpu_percent": cpu_percent, "descriptors": after.descriptors}


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def week(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what a week was like."""
    outages = Stopped if given.postgres else Locked
    factor = WEEK_S / (60 * given.minutes)
    with Soak(folder, factor=factor, kind=given.kind, outages=outages, warm=given.warm) as soak:
        rules_at_first = soak.rules()
        samples = soaked(soak, sessions=given.sessions, batch=given.batch, say=say)
        until(lambda: soak.simulated_s() >= WEEK_S, within_s=60 * given.minutes, what="the week is over")
        samples.append(soak.sample())
        return {
            "simulated_h": samples[-1].simulated_h,
            "growth": growth(samples),
            "faults": soak.faults,
            "ends": soak.ends,
            "rules": {"at_first": rules_at_first, "at_last": soak.rules()},
            "wrong": wrong(samples),
            "samples": [dataclasses.asdict(sample) for sample in samples],
        }


def main() -> int:
    """Run, print, write; 1 if something grew or was left behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--batch", type=int, default=20, help="sessions between two looks (default 20)")
    parser.add_argument("--minutes", type=float, default=12, help="what a week is to take at least")
    parser.add_argument("--kind", choices=("local", "docker"), default="local")
    parser.add_argument("--postgres", action="store_true", help="a PostgreSQL of its own, which is stopped")
    parser.add_argument(
        "--warm", type=int, default=0, help="containers that wait for a session, with --kind docker"
    )
    parser.add_argument(
        "--standing", action="store_true", help="look at sessions that run, at their own pace"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    name = time.strftime(f"{'standing' if given.standing else 'soak'}-%Y-%m-%d.json")
    out = given.out or ROOT / "bench" / "results" / name
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    folder = Path(tempfile.mkdtemp(prefix="fgpu-soak-"))
    begun, of, before = time.strftime("%Y-%m-%dT%H:%M:%S%z"), source(), load()
    found = {"standing": standing(folder)} if given.standing else week(given, folder)
    results = {
        "begun": begun,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "source": of,
        "machine": machine(),
        "load_before": before,
        "load_after": load(),
        "arguments": {k: v.name if isinstance(v, Path) else v for k, v in vars(given).items()},
        **found,
    }
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {out}")
    if found.get("wrong"):
        print("\n".join(found["wrong"]), f"its log and databases stay: {folder}", sep="\n")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
