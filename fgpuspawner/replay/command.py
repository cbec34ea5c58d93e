"""The command ``fgpu replay``. It reads, and writes nothing but the picture that it is asked for."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fgpu_scheduler import Node, Policy
from fgpu_scheduler.core.model import Quota
from fgpu_scheduler.core.quota import least_milli
from fgpu_scheduler.replay import Outcome, replay
from fgpu_scheduler.store import Store
from fgpuspawner.hubfile import CONFIG, UsageError, load_config
from fgpuspawner.replay.history import History, read_history
from fgpuspawner.replay.plot import check_plot, draw
from fgpuspawner.replay.report import HAPPENED, Report, Run, as_json, as_lines
from fgpuspawner.replay.trace import read_trace
from fgpuspawner.replay.words import NO_QUOTA, QUOTA_FORM, gpus_of, policy_of, quota_of
from fgpuspawner.settings import FGPU

DAY_S = 86400


def add_to(commands: Any) -> None:
    """Add the command to the parser of ``fgpu``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="what another policy or quota would have done",
        description=(
            "Run this installation's requests, or those of a trace file, again under other policies and quotas, and "
            "compare waits, use and fairness with what happened. Nothing is changed."
        ),
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="WORDS",
        help="an order, or order=...,placement=...,backfill=...; may be given again; default: the configured one",
    )
    parser.add_argument(
        "--quota",
        action="append",
        default=[],
        metavar="WORDS",
        help=f"{QUOTA_FORM}, in place of the installation's; may be given again; {NO_QUOTA}: without any",
    )
    parser.add_argument("--trace", metavar="FILE.csv", help="requests from a file instead of the database")
    parser.add_argument(
        "--gpus", metavar="NUMBER[xFGPU]", help="so many GPUs of so much fGPU, instead of the installation's"
    )
    parser.add_argument("--days", type=int, metavar="N", help="figures of the last N days only")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--config", metavar="FILE", help=f"the Hub's configuration; default: {CONFIG}")
    where.add_argument("--db", metavar="URL", help="the scheduler's database, instead of a configuration")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="OUT.png", help="draw waits and use into this file")
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class _Installation:
    policy: Policy
    history: History


def run(given: argparse.Namespace) -> list[str]:
    """Replay, draw what is to be drawn, and return the report as lines or as JSON."""
    if given.days is not None and given.days < 1:
        raise UsageError(f"argument --days: {given.days} is not 1 or more")
    if given.plot:
        check_plot(given.plot)
    chosen = [(words, policy_of(words)) for words in given.policy]
    quotas = _quotas(given.quota)
    installation = _installation(given)
    if given.trace:
        history = read_trace(given.trace)
    else:
        assert installation is not None
        history = installation.history
    if not history.jobs:
        raise UsageError("no session was ever submitted here; --trace FILE.csv replays a file")
    nodes = _nodes(given, history, installation)
    if quotas is None:
        quotas = installation.history.quotas if installation else ()
    if not chosen:
        chosen = [
            (
                "as configured" if installation else "default",
                installation.policy if installation else Policy(),
            )
        ]
    runs = [Run(words, replay(history.jobs, nodes, policy, quotas=quotas)) for words, policy in chosen]
    if history.happened is not None:
        runs.insert(0, Run(HAPPENED, tuple(_worth(o, nodes) for o in history.happened)))
    report = _report(runs, nodes, given.days, None if not given.quota else _words(given.quota))
    if given.plot:
        draw(report, given.plot)
    return [json.dumps(as_json(report), indent=2)] if given.json else as_lines(report)


def _quotas(words: Sequence[str]) -> tuple[Quota, ...] | None:
    """Return the quotas of the command line, or None where those of the installation hold."""
    if not words:
        return None
    if NO_QUOTA in words:
        if len(words) > 1:
            raise UsageError(f"argument --quota: {NO_QUOTA} goes with no other")
        return ()
    return tuple(quota_of(one) for one in words)


def _installation(given: argparse.Namespace) -> _Installation | None:
    if given.trace and not (given.db or given.config):
        return None
    if given.db:
        url, policy = given.db, Policy()
    else:
        settings = FGPU.from_config(load_config(given.config or CONFIG)).checked()
        url, policy = settings.database_url(), settings.policy()
    with contextlib.closing(Store(url)) as store:
        store.connect_readonly()
        return _Installation(policy, read_history(store, now_s=int(time.time())))


def _nodes(
    given: argparse.Namespace, history: History, installation: _Installation | None
) -> tuple[Node, ...]:
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
    return installation.history.nodes


def _worth(outcome: Outcome, nodes: Sequence[Node]) -> Outcome:
    """Return the outcome with what explicit GPU memory and compute are worth in fGPU, where nothing tells it."""
    if outcome.held_milli or outcome.placed_at_s is None:
        return outcome
    return replace(outcome, held_milli=least_milli(outcome.job.request, nodes))


def _words(quotas: Sequence[str]) -> tuple[str, ...]:
    return () if NO_QUOTA in quotas else tuple(quotas)


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
