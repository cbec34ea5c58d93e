"""The command ``fgpu replay``. It reads, and writes nothing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fgpu_scheduler import Node, Outcome, Policy, least_milli, replay
from fgpuspawner.cli.command import JsonReport, add_command, add_config_or_db, named, read_only
from fgpuspawner.cli.usage import UsageError
from fgpuspawner.replay.history import History, read_history
from fgpuspawner.replay.report import HAPPENED, Report, Run, as_json, as_lines
from fgpuspawner.replay.trace import read_trace
from fgpuspawner.replay.words import NO_QUOTA, QUOTA_FORM, gpus_of, policy_of, quota_of

DAY_S = 86400


def add_to(commands: Any) -> None:
    parser = add_command(
        commands,
        run,
        "replay",
        "what another policy or quota would have done",
        "Run this installation's requests, or those of a trace file, again under other policies and quotas, and "
        "compare waits, use and fairness with what happened. Nothing is changed.",
    )
    for name, what in (
        (
            "policy",
            "an order, or order=...,placement=...,backfill=...; may be given again; default: the configured one",
        ),
        (
            "quota",
            f"{QUOTA_FORM}, in place of the installation's; may be given again; {NO_QUOTA}: without any",
        ),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="WORDS", help=what)
    parser.add_argument("--trace", metavar="FILE.csv", help="requests from a file instead of the database")
    parser.add_argument(
        "--gpus", metavar="NUMBER[xFGPU]", help="so many GPUs of so much fGPU, instead of the installation's"
    )
    parser.add_argument("--days", type=int, metavar="N", help="figures of the last N days only")
    add_config_or_db(parser)


def run(given: argparse.Namespace) -> list[str]:
    """Replay, and return the report as lines or as JSON."""
    if given.days is not None and given.days < 1:
        raise UsageError(f"argument --days: {given.days} is not 1 or more")
    chosen = [(words, policy_of(words)) for words in given.policy]
    if NO_QUOTA in given.quota and len(given.quota) > 1:
        raise UsageError(f"argument --quota: {NO_QUOTA} goes with no other")
    tried = tuple(words for words in given.quota if words != NO_QUOTA)
    quotas = tuple(quota_of(words) for words in tried)
    policy, installation = Policy(), None
    if not given.trace or given.db or given.config:
        url, policy, _ = named(given)
        with read_only(url) as store:
            installation = read_history(store, now_s=int(time.time()))
    history = read_trace(given.trace) if given.trace else installation
    assert history is not None
    if not history.jobs:
        raise UsageError("no session was ever submitted here; --trace FILE.csv replays a file")
    nodes = _nodes(given, history, installation)
    if not given.quota:
        quotas = installation.quotas if installation else ()
    if not chosen:
        chosen = [("as configured" if installation else "default", policy)]
    runs = [Run(words, replay(history.jobs, nodes, policy, quotas=quotas)) for words, policy in chosen]
    if history.happened is not None:
        runs.insert(0, Run(HAPPENED, tuple(_worth(o, nodes) for o in history.happened)))
    report = _report(runs, nodes, given.days, tried if given.quota else None)
    return JsonReport(as_json(report)) if given.json else as_lines(report)


def _nodes(given: argparse.Namespace, history: History, installation: History | None) -> tuple[Node, ...]:
    groups = sorted({job.request.resource_group for job in history.jobs})
    if given.gpus:
        if len(groups) > 1:
            raise UsageError(
                f"argument --gpus: the sessions are of several resource groups ({', '.join(groups)}); "
                "--config or --db says which GPUs are whose"
            )
        return (gpus_of(given.gpus, groups[0]),)
    if installation is None:
        raise UsageError("a trace tells no GPUs: give --gpus 8, or --config or --db of an installation")
    return installation.nodes


def _worth(outcome: Outcome, nodes: Sequence[Node]) -> Outcome:
    """Return the outcome with what explicit GPU memory and compute are worth in fGPU, where nothing tells it."""
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
