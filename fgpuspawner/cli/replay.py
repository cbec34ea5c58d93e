"""The command ``fgpu replay``. It reads, and writes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import click

from fgpu_scheduler import Node, Outcome, Policy, group_policy, least_milli, replay
from fgpuspawner.cli.command import FILE, UsageError, command, config_or_db_options, read_only
from fgpuspawner.cli.command import Report as Answer
from fgpuspawner.cli.hub_config import named
from fgpuspawner.replay.history import History, read_history
from fgpuspawner.replay.report import HAPPENED, Report, Run, as_json, as_lines
from fgpuspawner.replay.trace import read_trace
from fgpuspawner.replay.words import NO_QUOTA, QUOTA_FORM, gpus_of, policy_of, quota_of

DAY_S = 86400


@command("replay", exclusive=("config", "db"))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="WORDS",
    help="an order, or order=...,placement=...,longest_wait_s=...; may be given again; default: the configured one",
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
    return Answer(as_lines(report), as_json(report))


def _nodes(gpus: str | None, history: History, installation: History | None) -> tuple[Node, ...]:
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
    """Return the outcome with explicit GPU memory and compute converted to fGPU where the amount is unknown."""
    if outcome.taken_milli or outcome.placed_at_s is None:
        return outcome
    return replace(outcome, taken_milli=least_milli(outcome.job.request, nodes))


def _report(
    runs: Sequence[Run], nodes: Sequence[Node], days: int | None, quotas: tuple[str, ...] | None
) -> Report:
    jobs = [o.job for o in runs[0].outcomes]
    first_s, until_s = jobs[0].submitted_at_s, jobs[-1].submitted_at_s
    if first_s == until_s:
        until_s = max(o.left_at_s for o in runs[0].outcomes)
    from_s = first_s if days is None else max(first_s, until_s - days * DAY_S)
    capacity_milli = sum(device.capacity_milli for node in nodes for device in node.devices)
    return Report(tuple(runs), capacity_milli, from_s, until_s, quotas)
