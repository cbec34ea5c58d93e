"""Compare order policies on the days of a lab: 8 GPUs, 60 users, two weeks with bursts, by seed.

Everything runs through the product's planner in virtual time (`fgpu_scheduler.core.replay`). Each run draws new seeds and
writes them into its results; `--seed` repeats some. Constants of the default order were set on `SET_SEEDS`. A request
is cancelled after `PATIENCE_S` in the queue and counts as unserved, having waited for all of that time. The generator is
older than the policies that it judges: what it makes of seed 1 is pinned by its hash (`--hash`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scheduler"), str(ROOT / "bench")]

from machine import machine, source  # noqa: E402

from fgpu_scheduler import (  # noqa: E402  # noqa: E402  # noqa: E402
    Device,
    GroupPolicy,
    Job,
    Node,
    Outcome,
    Policy,
    Request,
    group_policy,
    replay,
    summary,
)

SET_SEEDS = range(1, 13)
DRAWN_FROM = range(1000, 1_000_000)
SEEDS = 20

HOUR_S = 3600
DAY_S = 24 * HOUR_S
DAYS = 14
GPUS = 8
WHOLE = 1000
BIG_MILLI = 4 * WHOLE
"""A big job: half of the lab."""

USERS = 60
LOADS = (0.8, 0.9)
"""fGPU-time asked for, as part of what the lab has in these days."""
PATIENCE_S = DAY_S
"""The usual `queue_timeout_s`."""
LIMITS_H = (1, 2, 4, 8, 12, 24, 48)
"""What a form offers as time limits."""

HOURS = (1, 1, 1, 1, 1, 1, 2, 4, 9, 14, 16, 14, 11, 13, 15, 15, 13, 11, 8, 6, 5, 4, 3, 2)
"""How much is asked for in each hour of a day, in proportion."""

SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "light": ((100, 18), (200, 26), (300, 16), (500, 26), (1000, 14)),
    "heavy": ((200, 6), (500, 22), (1000, 52), (2000, 16), (4000, 4)),
    "huge": ((500, 8), (1000, 34), (2000, 34), (4000, 24)),
}
"""What users of each kind ask for: fGPU x 1000, and how often."""

POLICIES: dict[str, GroupPolicy] = {
    "fifo-skip": group_policy(order="fifo-skip"),
    "fifo": group_policy(order="fifo"),
    "lifo": group_policy(order="lifo"),
    "fair-share": group_policy(order="fair-share"),
    "drf": group_policy(order="drf"),
    "default": group_policy(),
}

WORLDS: dict[str, tuple[bool, float]] = {
    "time limits": (True, 0.0),
    "no time limits": (False, 0.0),
    "no time limits, users differ": (False, 1.0),
}
"""Whether requests have time limits, and by how much users differ in how long their sessions run."""

BY_SIZE: dict[str, tuple[int, int]] = {
    "fraction": (1, WHOLE - 1),
    "1_gpu": (WHOLE, WHOLE),
    "2_gpus": (2 * WHOLE, 2 * WHOLE),
    "4_gpus": (BIG_MILLI, BIG_MILLI),
}


@dataclass(frozen=True)
class User:
    """A person of the lab, with their habits."""

    name: str
    kind: str
    weight: float
    pace: float = 1.0
    """How many times as long as others' their sessions run."""


def nodes(seed: int) -> tuple[Node, ...]:
    """Return the lab: one node of 8 GPUs, or two of 4 where the seed is odd."""
    each = GPUS // (1 + seed % 2)
    return tuple(
        Node(
            node_id,
            "default",
            16000 * each,
            131072 * each,
            tuple(Device(f"GPU-{node_id}-{i}", node_id, i, "Lab GPU", 81920, WHOLE) for i in range(each)),
        )
        for node_id in ("n1", "n2")[: GPUS // each]
    )


def jobs(seed: int, *, spread: float = 0.0, load: float = LOADS[0]) -> tuple[Job, ...]:
    """Return two weeks of requests, in order, each with a time limit that it keeps.

    With a ``spread`` users differ: each one's sessions run longer or shorter by a factor of their own, log-normal with
    this deviation.
    """
    rng, own = random.Random(seed), random.Random(seed)
    users = [
        User(
            f"u{n:02}",
            rng.choices(("light", "heavy", "huge"), (60, 30, 10))[0],
            1 / (1 + n) ** 0.7,
            own.lognormvariate(0, spread),
        )
        for n in range(USERS)
    ]
    days = [_busy(rng, day) for day in range(DAYS)]
    found: list[Job] = []
    asked = 0.0
    while asked < load * GPUS * WHOLE * DAYS * DAY_S:
        user = rng.choices(users, [u.weight for u in users])[0]
        at_s = DAY_S * rng.choices(range(DAYS), days)[0]
        at_s += HOUR_S * rng.choices(range(24), HOURS)[0] + rng.randrange(HOUR_S)
        for job in _submission(rng, user, at_s):
            found.append(job)
            asked += job.request.fgpu_milli * job.length_s
    return tuple(sorted(found, key=lambda job: job.submitted_at_s))


def _busy(rng: random.Random, day: int) -> float:
    """Return how busy a day is: weekends are quiet, and now and then a deadline is near."""
    weekday = day % 7 < 5
    return (1.0 if weekday else 0.3) * rng.lognormvariate(0, 0.4) * (2.0 if rng.random() < 0.15 else 1.0)


def _submission(rng: random.Random, user: User, at_s: int) -> Iterator[Job]:
    """Yield what a user asks for at a time: mostly one session, now and then a sweep of alike ones."""
    amounts, often = zip(*SIZES[user.kind], strict=True)
    fgpu = rng.choices(amounts, often)[0]
    count = 1 if rng.random() < 0.8 or fgpu > WHOLE else rng.randint(2, 8)
    training = fgpu >= WHOLE or count > 1
    for n in range(count):
        hours = rng.lognormvariate(0.9, 1.0) if training else rng.lognormvariate(0.3, 0.9)
        length_s = int(HOUR_S * min(max(hours * user.pace, 0.1), 36 if training else 12))
        yield Job(
            Request(
                user=user.name,
                server_name=f"{at_s}-{n}",
                image="image",
                resource_group="default",
                fgpu_milli=fgpu,
                cpu_milli=max(1000, 8 * fgpu),
                memory_mib=max(4096, 64 * fgpu),
                time_limit_s=HOUR_S * _limit_h(rng, length_s),
            ),
            at_s,
            length_s,
        )


def _limit_h(rng: random.Random, length_s: int) -> int:
    """Return the limit that a user chooses: mostly some times too long, now and then just a long one."""
    needed = length_s / HOUR_S * rng.uniform(1.0, 3.0)
    if rng.random() < 0.2:
        needed = max(needed, 12)
    return next((limit for limit in LIMITS_H if limit >= needed), LIMITS_H[-1])


def without_limits(asked: Sequence[Job]) -> tuple[Job, ...]:
    """Return the same jobs of users who give no time limits."""
    return tuple(replace(job, request=replace(job.request, time_limit_s=None)) for job in asked)


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the figures of one run. Waits are in hours."""
    found = summary(outcomes, capacity_milli=GPUS * WHOLE, from_s=0, until_s=DAYS * DAY_S)
    by_size = {
        f"{name}_mean_wait_h": (mean(waits) if waits else 0) / HOUR_S
        for name, (least, most) in BY_SIZE.items()
        for waits in [[o.waited_s for o in outcomes if least <= o.job.request.fgpu_milli <= most]]
    }
    asked, unserved = {}, {}
    for name, (least, most) in BY_SIZE.items():
        own = [o for o in outcomes if least <= o.job.request.fgpu_milli <= most]
        asked[f"{name}_sessions"] = len(own)
        unserved[f"{name}_unserved"] = sum(o.placed_at_s is None for o in own)
    big = [o.waited_s for o in outcomes if o.job.request.fgpu_milli >= BIG_MILLI]
    return {
        "mean_wait_h": found.mean_wait_s / HOUR_S,
        "median_wait_h": found.median_wait_s / HOUR_S,
        "p95_wait_h": found.p95_wait_s / HOUR_S,
        "longest_wait_h": found.longest_wait_s / HOUR_S,
        "big_longest_wait_h": max(big, default=0) / HOUR_S,
        **by_size,
        **asked,
        **unserved,
        "utilisation": found.utilisation,
        "fairness": found.fairness,
        "sessions": found.sessions,
        "never_started": found.never_started,
    }


def run(name: str, seeds: Sequence[int], *, limits: bool, spread: float, load: float) -> dict[str, float]:
    """Return the means over the seeds of a policy's figures; the unserved are a part of the requests of all seeds."""
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(partial(_run_one, name, limits=limits, spread=spread, load=load), seeds))
    means = {key: mean(f[key] for f in found) for key in found[0]}
    for name in BY_SIZE:
        means[f"{name}_unserved"] /= max(1, means[f"{name}_sessions"])
    return {key: round(value, 4) for key, value in means.items()}


def _run_one(name: str, seed: int, *, limits: bool, spread: float, load: float) -> dict[str, float]:
    asked = tuple(replace(job, patience_s=PATIENCE_S) for job in jobs(seed, spread=spread, load=load))
    if not limits:
        asked = without_limits(asked)
    return figures(replay(asked, nodes(seed), Policy(POLICIES[name])))


def fingerprint(seed: int) -> str:
    """Return the hash of what the generator makes of a seed."""
    return hashlib.sha256(repr((jobs(seed), nodes(seed))).encode()).hexdigest()[:16]


def main() -> int:
    """Run the policies and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", action="append", choices=list(POLICIES), help="only these")
    parser.add_argument("--world", action="append", choices=list(WORLDS), help="only these")
    parser.add_argument("--load", action="append", type=float, choices=LOADS, help="only these")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many are drawn; default: %(default)s")
    parser.add_argument("--seed", type=int, action="append", help="this one, and none is drawn")
    parser.add_argument("--setting", action="store_true", help="the seeds that constants are set on")
    parser.add_argument("--hash", action="store_true", help="print the hash of seed 1 and end")
    parser.add_argument("--out", type=Path, help="write a results file here")
    options = parser.parse_args()
    if options.hash:
        print(fingerprint(1))
        return 0
    drawn = sorted(random.SystemRandom().sample(DRAWN_FROM, options.seeds))
    seeds = list(SET_SEEDS)[: options.seeds] if options.setting else options.seed or drawn
    print(f"seeds: {' '.join(map(str, seeds))}", flush=True)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for world, load in product(options.world or WORLDS, options.load or LOADS):
        limits, spread = WORLDS[world]
        words = f"{world}, load {load}"
        own = found[words] = {}
        for name in options.policy or POLICIES:
            began = time.perf_counter()
            own[name] = row = run(name, seeds, limits=limits, spread=spread, load=load)
            took_s = time.perf_counter() - began
            base = own.get("fifo-skip", row)
            unserved = ", ".join(f"{size} {100 * row[f'{size}_unserved']:.1f} %" for size in BY_SIZE)
            print(
                f"{words:39} {name:10} mean {row['mean_wait_h']:6.2f} h ({_ratio(row, base, 'mean_wait_h')})"
                f"  unserved: {unserved}  fairness {row['fairness']:.3f}  utilisation {row['utilisation']:.3f}"
                f"  [{took_s:.0f} s]",
                flush=True,
            )
    if options.out:
        what = {
            "date": date.today().isoformat(),
            "machine": machine(),
            "source": source(),
            "seeds": seeds,
            "generator": fingerprint(1),
            "figures": found,
        }
        options.out.write_text(json.dumps(what, indent=2) + "\n")
    return 0


def _ratio(row: dict[str, float], base: dict[str, float], key: str) -> str:
    return f"x{row[key] / base[key]:.2f}" if base[key] else "-"


if __name__ == "__main__":
    raise SystemExit(main())
