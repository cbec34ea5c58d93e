"""The command ``fgpu``: what the scheduler's database says, and whether a Hub's configuration can work.

Every error is one line on standard error: status 1 where something is wrong, 2 where the command was used
wrongly. Only ``fgpu node`` and ``fgpu images`` write to the database, and no password is ever shown.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from fgpu_scheduler import (
    HOLDING,
    BadSettings,
    FGPUError,
    Forecast,
    Free,
    Node,
    Policy,
    Session,
    SessionState,
    StoreUnavailable,
    forecast,
    format_milli,
    free,
    of_group,
)
from fgpu_scheduler.store import Store
from fgpuspawner import __version__
from fgpuspawner.hubfile import CONFIG, UsageError, checked_like_the_hub, load_config, quiet
from fgpuspawner.images import command as images
from fgpuspawner.images import private_command as private_images
from fgpuspawner.images.catalogue import load_catalogue
from fgpuspawner.isolation.choice import read_choices
from fgpuspawner.isolation.hub import choices_for
from fgpuspawner.node_actions import NodeAction, act
from fgpuspawner.replay import command as replay
from fgpuspawner.settings import FGPU
from fgpuspawner.words import amount_words, fgpu_of

if TYPE_CHECKING:
    from fgpuspawner.queued import QueuedSpawner

NOT_YET = ("the Hub makes it when it starts", "the Hub does it when it starts")
"""How the store ends its words on a database that no Hub has used so far."""

Json = dict[str, Any]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command; the docs are checked against it."""
    parser = Parser(prog="fgpu", description="Look at an fgpuspawner installation.")
    parser.add_argument("--version", action="version", version=f"fgpu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    status = commands.add_parser(
        "status", help="capacity, sessions and queue", description="Print capacity, sessions and the queue."
    )
    where = status.add_mutually_exclusive_group()
    where.add_argument("--config", metavar="FILE", help=f"the Hub's configuration; default: {CONFIG}")
    where.add_argument("--db", metavar="URL", help="the scheduler's database, instead of a configuration")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=run_status)
    check = commands.add_parser(
        "check",
        help="try a Hub's configuration",
        description="Load a Hub's configuration without starting the Hub, and say whether it can work.",
    )
    check.add_argument("--config", metavar="FILE", default=CONFIG, help=f"default: {CONFIG}")
    check.set_defaults(run=run_check)
    wall = commands.add_parser(
        "firewall",
        help="close this machine to sessions in containers",
        description=(
            "Print the script that closes a machine to an installation's sessions, but for the Hub, the service and "
            "what c.FGPU allows. It is for root, at every boot, where the Hub does not run as root."
        ),
    )
    wall.add_argument("--config", metavar="FILE", default=CONFIG, help=f"default: {CONFIG}")
    what = wall.add_mutually_exclusive_group()
    what.add_argument(
        "--apply", action="store_true", help="apply the rules now, instead of printing the script"
    )
    what.add_argument("--remove", action="store_true", help="remove the rules from this machine")
    wall.set_defaults(run=run_firewall)
    node = commands.add_parser(
        "node",
        help="take a machine out of use, or say that it is gone",
        description=(
            "Set what is to become of a node. cordon: it takes no more sessions, and keeps those that it has. uncordon: "
            "it takes sessions again. gone: of a node that does not answer, and of which you know that nothing runs on "
            "it any more; its sessions are ended, and their shares are free."
        ),
    )
    node.add_argument("node", metavar="NODE", help="the node's name")
    node.add_argument("action", choices=sorted(NodeAction), help="what becomes of it")
    node.add_argument("--config", metavar="FILE", default=CONFIG, help=f"default: {CONFIG}")
    node.set_defaults(run=run_node)
    private_images.add_to(images.add_to(commands))
    replay.add_to(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        given = make_parser().parse_args(arguments)
        lines = given.run(given)
    except UsageError as e:
        return _fail(str(e), 2)
    except SQLAlchemyError as e:
        # What the store does not tell apart, such as a damaged file. Only the driver's words: the rest
        # of the text can hold the statement and the URL.
        return _fail(
            f"the scheduler's database cannot be read: {getattr(e, 'orig', None) or 'see the Hub'}", 1
        )
    except (FGPUError, OSError) as e:
        return _fail(str(e), 1)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:
        # Its reader (``| head``) has seen enough. Python would complain once more while it ends.
        sys.stdout = None
    return 0


def _fail(message: str, status: int) -> int:
    # Whatever the words are and wherever they are from: a URL is shown without its user's password.
    line = re.sub(r"://[^\s/]*@", "://***@", " ".join(message.split()))
    print(f"fgpu: {line}", file=sys.stderr)
    return status


def shown_url(url: str) -> str:
    """Return a database's URL without its password. The query stays out: it may hold one too."""
    return make_url(url).set(query={}).render_as_string(hide_password=True)


# --- fgpu node ---


def run_node(given: argparse.Namespace) -> list[str]:
    """Set a node's state, and return what follows."""
    settings = FGPU.from_config(load_config(given.config)).checked()
    with contextlib.closing(Store(settings.database_url())) as store:
        store.open()
        action = NodeAction(given.action)
        follows = act(store, given.node, action, by=f"{getpass.getuser()} (fgpu)", now_s=int(time.time()))
    return [f"node {given.node}: {follows}"]


# --- fgpu check ---


def run_check(given: argparse.Namespace) -> list[str]:
    """Return what a configuration gives, as lines, the first of them "OK"."""
    config = load_config(given.config)
    with quiet():
        settings, app = checked_like_the_hub(config, given.config)
    spawner_class: type[QueuedSpawner] = app.spawner_class
    containers = spawner_class.containers
    kind = "containers" if containers else "local processes, all of one system user"
    catalogue = load_catalogue(settings.catalogue_path())
    nodes = settings.discover_nodes()
    chosen = {c.node_id: c for c in choices_for(settings, nodes, containers=containers)}
    lines = [f"OK: {given.config}", f"  sessions: {kind} ({spawner_class.__name__})"]
    for node in nodes:
        lines.append(f"  {_node_line(node)}")
        lines.extend(
            f"    {d.index}: {d.model}, {d.memory_mib} MiB = {format_milli(d.capacity_milli)} fGPU, {d.uuid}"
            + (" (simulated)" if d.simulated else "")
            for d in node.devices
        )
        lines.append(f"    isolation: {chosen[node.id].backend.name}: {chosen[node.id].reason}")
    offered = [image.slug for image in catalogue.images if image.enabled]
    others = len(catalogue.images) - len(offered)
    lines.append(
        f"  images: {len(offered)} ({', '.join(offered)})" + (f", {others} not enabled" if others else "")
    )
    lines.append(f"  database: {_database(settings.database_url())}")
    return lines


def _node_line(node: Node) -> str:
    count = len(node.devices)
    return (
        f"node {node.id} (group {node.resource_group}): {format_milli(node.cpu_milli)} CPU, {node.memory_mib} MiB, "
        f"{count} GPU{'' if count == 1 else 's'}"
    )


def _database(url: str) -> str:
    """Return what became of connecting, in words.

    Raises:
        StoreUnavailable: it cannot be used.
    """
    store = Store(url)
    try:
        store.connect_readonly()
    except StoreUnavailable as e:
        # Not there yet, or empty: that is how it is before the first start.
        if not str(e).endswith(NOT_YET):
            raise
        return f"{shown_url(url)}, made ready when the Hub starts"
    finally:
        store.close()
    return f"{shown_url(url)}, answers"


# --- fgpu firewall ---


def run_firewall(given: argparse.Namespace) -> list[str]:
    """Print, apply or remove the rules of the installation that a configuration is of."""
    config = load_config(given.config)
    with quiet():
        settings, app = checked_like_the_hub(config, given.config)
        if not app.spawner_class.containers:
            raise BadSettings(f"{given.config}: sessions are local processes; no firewall holds these")
        app.init_hub()
    # Imported here, like the Hub's own classes.
    from fgpuspawner import firewall
    from fgpuspawner.tenants import rules_for

    installation = _installation(settings.database_url())
    if given.remove:
        firewall.run(firewall.removal(installation))
        return [f"removed the rules of installation {installation}"]
    rules = rules_for(settings, app, installation)
    if not given.apply:
        return [firewall.script(rules).rstrip()]
    firewall.Firewall(rules).apply()
    return [f"OK: the rules of installation {installation} are in force"]


def _installation(url: str) -> str:
    """Return the installation's id, by which its networks and rules are named.

    Raises:
        StoreUnavailable: the database cannot be read; the Hub must have started once.
    """
    store = Store(url)
    try:
        store.connect_readonly()
        return store.installation_id
    finally:
        store.close()


# --- fgpu status ---


def run_status(given: argparse.Namespace) -> list[str]:
    """Return capacity, sessions and queue, as lines or as JSON."""
    policy, settings = Policy(), None
    if given.db:
        url = given.db
    else:
        settings = FGPU.from_config(load_config(given.config or CONFIG)).checked()
        url, policy = settings.database_url(), settings.policy()
    found = read_status(url, policy, now_s=int(time.time()))
    if settings is not None:
        found["isolation"] = {c.node_id: c.backend for c in read_choices(settings.data_path())}
    return [json.dumps(found, indent=2)] if given.json else status_lines(found)


def read_status(url: str, policy: Policy, *, now_s: int) -> Json:
    """Return the state of the installation whose scheduler uses this database.

    Raises:
        BadSettings: the URL cannot be read.
        StoreUnavailable: the database cannot be.
    """
    store = Store(url, half_life_s=lambda group: policy.of(group).half_life_s)
    try:
        store.connect_readonly()
        snapshot = store.snapshot(now_s)
        groups = sorted({node.resource_group for node in snapshot.nodes})
        found: dict[int, Forecast] = {}
        for group in groups:
            own = of_group(snapshot, group)
            typical = store.typical_length_s(group)
            found |= {f.session_id: f for f in forecast(own, policy, typical_length_s=typical)}
    finally:
        store.close()
    left = free(snapshot)
    simulated = {d.uuid for node in snapshot.nodes for d in node.devices if d.simulated}
    return {
        "version": 1,
        "read_at_s": now_s,
        "simulated": bool(simulated),
        "groups": [_group(group, left) for group in groups],
        "sessions": [
            _session(s, simulated) for s in snapshot.sessions if s.state is not SessionState.PENDING
        ],
        "queue": [
            _waiting(f, s) for f in found.values() if (s := snapshot.session(f.session_id)) is not None
        ],
    }


def _group(group: str, left: Free) -> Json:
    own = [n for n in left if n.node.resource_group == group]
    total = sum(d.device.capacity_milli for n in own for d in n.devices)
    return {
        "name": group,
        "fgpu_total": format_milli(total),
        "fgpu_used": _signed(total - sum(d.fgpu_milli for n in own for d in n.devices)),
        "nodes": [
            {
                "name": n.node.id,
                "state": n.node.state.value,
                "cpu_total": format_milli(n.node.cpu_milli),
                "cpu_used": _signed(n.node.cpu_milli - n.cpu_milli),
                "memory_mib_total": n.node.memory_mib,
                "memory_mib_used": n.node.memory_mib - n.memory_mib,
                "devices": [
                    {
                        "uuid": d.device.uuid,
                        "index": d.device.index,
                        "model": d.device.model,
                        "memory_mib": d.device.memory_mib,
                        "fgpu_total": format_milli(d.device.capacity_milli),
                        "fgpu_used": _signed(d.device.capacity_milli - d.fgpu_milli),
                        "simulated": d.device.simulated,
                    }
                    for d in n.devices
                ],
            }
            for n in own
        ],
    }


def _signed(milli: int) -> str:
    return f"-{format_milli(-milli)}" if milli < 0 else format_milli(milli)


def _session(session: Session, simulated: set[str]) -> Json:
    asked, where = session.request, session.placement
    since = session.started_at_s or session.scheduled_at_s or session.submitted_at_s
    uuids = [s.device_uuid for s in where.shares] if where and session.state in HOLDING else []
    return {
        "id": session.id,
        "user": asked.user,
        "server_name": asked.server_name,
        "state": session.state.value,
        "amount": amount_words(asked),
        "fgpu": fgpu_of(session),
        "resource_group": asked.resource_group,
        "node": where.node_id if where else None,
        "gpus": uuids,
        "since_s": since,
        "simulated": any(uuid in simulated for uuid in uuids),
    }


def _waiting(found: Forecast, session: Session) -> Json:
    asked = session.request
    return {
        "position": found.position,
        "id": session.id,
        "user": asked.user,
        "server_name": asked.server_name,
        "amount": amount_words(asked),
        "fgpu": fgpu_of(session),
        "resource_group": asked.resource_group,
        "wait_reason": found.reason.value,
        "wait_text": found.text,
        "expected_start_at_s": found.expected_start_at_s,
        "since_s": session.submitted_at_s,
    }


def status_lines(found: Json) -> list[str]:
    """Return the status for reading."""
    lines = ["SIMULATED GPUs: no real GPU is behind the amounts marked so", ""] if found["simulated"] else []
    lines.append("Capacity")
    for group in found["groups"]:
        lines.append(f"  group {group['name']}: {group['fgpu_used']} of {group['fgpu_total']} fGPU in use")
        for node in group["nodes"]:
            state = "" if node["state"] == "READY" else f" {node['state']}"
            backend = found.get("isolation", {}).get(node["name"])
            lines.append(
                f"    node {node['name']}{state}: {node['cpu_used']} of {node['cpu_total']} CPU, "
                f"{node['memory_mib_used']} of {node['memory_mib_total']} MiB"
                + (f", isolation {backend}" if backend else "")
            )
            lines.extend(
                f"      {d['index']}: {d['fgpu_used']} of {d['fgpu_total']} fGPU, {d['model']}, {d['uuid']}"
                + (" (simulated)" if d["simulated"] else "")
                for d in node["devices"]
            )
    if not found["groups"]:
        lines.append("  no node")
    lines += ["", "Sessions"]
    rows = [
        (
            str(s["id"]),
            _server(s),
            s["state"],
            s["amount"] + (" (simulated)" if s["simulated"] else ""),
            s["node"] or "",
            _instant(s["since_s"]),
        )
        for s in found["sessions"]
    ]
    lines += _table(("id", "user/server", "state", "amount", "node", "since"), rows)
    lines += ["", "Queue"]
    waiting = [
        (
            "now" if w["position"] == 0 else str(w["position"]),
            str(w["id"]),
            _server(w),
            w["amount"],
            w["resource_group"],
            _instant(w["since_s"]),
            w["wait_text"],
        )
        for w in found["queue"]
    ]
    lines += _table(("position", "id", "user/server", "amount", "group", "since", "why"), waiting)
    return lines


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return ["  none"]
    widths = [max(len(row[n]) for row in (heading, *rows)) for n in range(len(heading))]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in (heading, *rows)
    ]


def _server(session: Json) -> str:
    # A name may hold anything; a terminal must not be told what to do by it.
    name = f"{session['user']}/{session['server_name']}"
    return "".join(c if c.isprintable() else "?" for c in name)


def _instant(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


if __name__ == "__main__":
    sys.exit(main())
