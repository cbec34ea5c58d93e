"""The command ``fgpu replay``: simulates past requests under other policies and quotas. It only reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from fgpu_scheduler import (
    BadAmount,
    BadSettings,
    Device,
    Node,
    Outcome,
    Policy,
    Quota,
    QuotaScope,
    Summary,
    format_milli,
    group_policy,
    least_milli,
    parse_milli,
    replay,
    summary,
)
from fgpuspawner.cli.command import FILE, Report, UsageError, command, config_or_db_options, read_only
from fgpuspawner.cli.hub_config import named
from fgpuspawner.replay import JobHistory, read_history, read_trace
from fgpuspawner.settings.queue import POLICY
from fgpuspawner.text.tables import table
from fgpuspawner.text.times import instant

NO_QUOTA = "none"
QUOTA_FORM = "SCOPE:NAME[@GROUP]:LIMIT=AMOUNT[,...]"
LIMITS = {
    "fgpu": "max_fgpu_milli",
    "sessions": "max_sessions",
    "pending": "max_pending",
    "lifetime": "max_lifetime_s",
    "guaranteed": "guaranteed_milli",
}
MOST_GPUS = 10_000
PLENTY = 10**9
"""CPU and memory of an imagined node: never a limit."""
GPU_MEMORY_MIB = 81920
DAY_S = 86400
HAPPENED = "what happened"
HEADING = [
    "policy",
    "started",
    "never",
    "refused",
    "mean wait",
    "median",
    "p95",
    "longest",
    "in use",
    "fairness",
]


@command("replay", exclusive=("config", "db"))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="WORDS",
    help="an order, or order=...,longest_wait_s=...; may be given again; default: the configured one",
)
@click.option(
    "--quota",
    "limits",
    multiple=True,
    metavar="WORDS",
    help=f"{QUOTA_FORM}, in place of the installation's; may be given again; {NO_QUOTA}: without any",
)
@click.option("--trace", metavar="FILE.csv", type=FILE, help="requests from a file instead of the database")
@click.option("--gpus", metavar="NUMBER[xFGPU]", help="GPUs, each of FGPU, instead of the installation's")
@click.option("--days", type=click.IntRange(1), metavar="N", help="figures of the last N days only")
@config_or_db_options
def replay_command(
    policies: tuple[str, ...],
    limits: tuple[str, ...],
    trace: str | None,
    gpus: str | None,
    days: int | None,
    config: str | None,
    db: str | None,
) -> list[str]:
    """Run this installation's requests, or those of a trace file, again under other policies and quotas.

    It compares waits, use and fairness with what happened. Nothing is changed.
    """
    chosen = [(words, policy_of(words)) for words in policies]
    if NO_QUOTA in limits and len(limits) > 1:
        raise UsageError(f"argument --quota: {NO_QUOTA} goes with no other")
    tried = tuple(words for words in limits if words != NO_QUOTA)
    quotas = tuple(quota_of(words) for words in tried)
    policy, installation = Policy(group_policy()), None
    if not trace or db or config:
        url, policy, _ = named(config, db)
        with read_only(url) as store:
            installation = read_history(store, now_s=int(time.time()))
    history = read_trace(trace) if trace else installation
    assert history is not None
    if not history.jobs:
        raise UsageError("no session was ever submitted here; --trace FILE.csv replays a file")
    nodes = _nodes(gpus, history, installation)
    if not limits:
        quotas = installation.quotas if installation else ()
    if not chosen:
        chosen = [("as configured" if installation else "default", policy)]
    runs = [Run(words, replay(history.jobs, nodes, policy, quotas=quotas)) for words, policy in chosen]
    if history.happened is not None:
        runs.insert(0, Run(HAPPENED, tuple(_worth(o, nodes) for o in history.happened)))
    report = _report(runs, nodes, days, tried if limits else None)
    return Report(as_lines(report), as_json(report))


def _nodes(gpus: str | None, history: JobHistory, installation: JobHistory | None) -> tuple[Node, ...]:
    groups = sorted({job.request.resource_group for job in history.jobs})
    if gpus:
        if len(groups) > 1:
            raise UsageError(
                f"argument --gpus: the sessions are of several resource groups ({', '.join(groups)}); "
                "--config or --db says which GPUs are whose"
            )
        return (gpus_of(gpus, groups[0]),)
    if installation is None:
        raise UsageError("a trace tells no GPUs: give --gpus 8, or --config or --db of an installation")
    return installation.nodes


def _worth(outcome: Outcome, nodes: Sequence[Node]) -> Outcome:
    if outcome.taken_milli or outcome.placed_at_s is None:
        return outcome
    return replace(outcome, taken_milli=least_milli(outcome.job.request, nodes))


def _report(
    runs: Sequence[Run], nodes: Sequence[Node], days: int | None, quotas: tuple[str, ...] | None
) -> Comparison:
    jobs = [o.job for o in runs[0].outcomes]
    first_s, until_s = jobs[0].submitted_at_s, jobs[-1].submitted_at_s
    if first_s == until_s:
        until_s = max(o.left_at_s for o in runs[0].outcomes)
    from_s = first_s if days is None else max(first_s, until_s - days * DAY_S)
    capacity_milli = sum(device.capacity_milli for node in nodes for device in node.devices)
    return Comparison(tuple(runs), capacity_milli, from_s, until_s, quotas)


# --- The words of options ---


def policy_of(words: str) -> Policy:
    """Parse a policy for every resource group: ``fair-share``, or ``order=drf,longest_wait_s=3600``."""
    found: dict[str, Any] = {}
    for part in words.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            key, value = "order", part
        if key in found:
            raise BadSettings(f"policy: {words!r}: {key} is there twice")
        if key not in POLICY:
            raise BadSettings(f"policy: {words!r}: there is no {key!r}; there are {', '.join(POLICY)}")
        found[key] = value if POLICY[key] is str else _count(value, f"policy: {key}")
    try:
        return Policy(group_policy(**found))
    except BadSettings as e:
        raise BadSettings(f"policy: {e}") from None


def quota_of(words: str) -> Quota:
    """Parse a quota such as ``user:*:fgpu=2,sessions=3``; the lifetime is in seconds."""
    scope, _, rest = words.partition(":")
    who, _, limits = rest.rpartition(":")
    name, _, group = who.partition("@")
    scopes = [one.value for one in QuotaScope]
    if scope not in scopes or not name:
        raise BadSettings(
            f"quota: {words!r} is not {QUOTA_FORM} with a scope of {', '.join(scopes)}, as in user:*:fgpu=2"
        )
    found: dict[str, int] = {}
    for limit in limits.split(","):
        key, _, amount = limit.partition("=")
        if key not in LIMITS:
            raise BadSettings(
                f"quota: {words!r}: there is no limit {key!r}; the limits are {', '.join(LIMITS)}"
            )
        found[LIMITS[key]] = (_fgpu if key in ("fgpu", "guaranteed") else _count)(amount, f"quota: {key}")
    return Quota(QuotaScope(scope), name, group or None, **found)


def gpus_of(words: str, resource_group: str) -> Node:
    """Parse ``8`` or ``8x2``: a node with that many GPUs of 1 or the given fGPU each."""
    number, times, unit = words.partition("x")
    count, capacity = _count(number, "gpus"), _fgpu(unit if times else "1", "gpus")
    if not 1 <= count <= MOST_GPUS or capacity < 1:
        raise BadSettings(f"gpus: {words!r} is not 1 to {MOST_GPUS} GPUs of some fGPU each, such as 8 or 8x2")
    devices = tuple(
        Device(f"GPU-{i:05d}", "replay", i, "any", GPU_MEMORY_MIB, capacity, True) for i in range(count)
    )
    return Node("replay", resource_group, PLENTY, PLENTY, devices)


def _fgpu(amount: str, field: str) -> int:
    try:
        return parse_milli(amount, field=field)
    except BadAmount as e:
        raise BadSettings(str(e)) from None


def _count(amount: str, field: str) -> int:
    if not (amount.isascii() and amount.isdigit() and len(amount) < 10):
        raise BadSettings(f"{field}: {amount!r} is not a whole number such as 3")
    return int(amount)


# --- The report ---


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of every job under one policy, or in reality."""

    policy: str
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of the same jobs, with figures for those submitted in the window.

    ``quotas`` are the words of the quotas tried; None if the installation's own apply.
    """

    runs: tuple[Run, ...]
    capacity_milli: int
    from_s: int
    until_s: int
    quotas: tuple[str, ...] | None = None

    @property
    def summaries(self) -> tuple[Summary, ...]:
        of = {"capacity_milli": self.capacity_milli, "from_s": self.from_s, "until_s": self.until_s}
        return tuple(summary(run.outcomes, **of) for run in self.runs)

    @property
    def users(self) -> int:
        jobs = (o.job for o in self.runs[0].outcomes)
        return len({job.request.user for job in jobs if job.submitted_at_s >= self.from_s})


def as_json(found: Comparison) -> dict[str, Any]:
    """Return the report as JSON; durations in seconds, shares between 0 and 1."""
    return {
        "version": 1,
        "from_s": found.from_s,
        "until_s": found.until_s,
        "users": found.users,
        "fgpu_total": format_milli(found.capacity_milli),
        "quotas": None if found.quotas is None else list(found.quotas),
        "runs": [
            {"policy": run.policy, **asdict(figures)}
            for run, figures in zip(found.runs, found.summaries, strict=True)
        ],
    }


def as_lines(found: Comparison) -> list[str]:
    summaries = found.summaries
    rows = [_row(run.policy, figures) for run, figures in zip(found.runs, summaries, strict=True)]
    tried = []
    if found.quotas is not None:
        said = f"the quotas {' '.join(found.quotas)}" if found.quotas else "no quota"
        unlike = ", unlike what happened" if found.runs[0].policy == HAPPENED else ""
        tried.append(f"each policy with {said}{unlike}")
    first, last = (instant(at_s, seconds=False) for at_s in (found.from_s, found.until_s))
    return [
        f"{summaries[0].sessions} sessions of {found.users} users, submitted {first} to {last}, on "
        f"{format_milli(found.capacity_milli)} fGPU",
        *tried,
        "",
        *table(HEADING, rows, right_from=1),
    ]


def _row(policy: str, own: Summary) -> tuple[object, ...]:
    waits = own.mean_wait_s, own.median_wait_s, own.p95_wait_s, own.longest_wait_s
    shares = f"{100 * own.utilisation:.1f} %", f"{own.fairness:.3f}"
    return (policy, own.started, own.never_started, own.refused, *map(duration, waits), *shares)


def duration(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds: ``1:05:00``."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
