"""The command ``fgpu status``: how Hub and proxy are, and what the scheduler's database says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fgpu_scheduler import (
    FGPUError,
    Forecast,
    Free,
    Policy,
    Session,
    SessionState,
    format_milli,
    free,
    holds_shares,
    outlook,
)
from fgpuspawner.cli.command import Report, command, config_or_db_options, one_line, read_only
from fgpuspawner.cli.hub_config import named
from fgpuspawner.cli.units import unit_states
from fgpuspawner.isolation.choice import CHOICES
from fgpuspawner.text.sessions import amount_words, fgpu_of
from fgpuspawner.text.tables import printable, table
from fgpuspawner.text.times import instant

Json = dict[str, Any]


@command("status", exclusive=("config", "db"))
@config_or_db_options
def status_command(config: str | None, db: str | None) -> list[str]:
    """Print whether Hub and proxy run under systemd, capacity, sessions and the queue.

    The status is 1 where the unit of Hub or proxy fails or is stopped.
    """
    units = [] if db else unit_states()
    well = all(u.state in ("running", "starting") for u in units)
    try:
        url, policy, settings = named(config, db)
        found = read_status(url, policy, now_s=int(time.time()))
        if settings is not None:
            found["isolation"] = {c.node_id: c.backend for c in CHOICES.read(settings.data_path())}
        lines = status_lines(found)
    except FGPUError as e:
        # A setting that ends the Hub ends this command too. How the units are is then still told.
        if well:
            raise
        found, lines = {"version": 1, "error": one_line(str(e))}, [f"Not known: {one_line(str(e))}"]
    if units:
        found["services"] = [asdict(unit) for unit in units]
        lines = ["Services", *(f"  {unit.words()}" for unit in units), "", *lines]
    return Report(lines, found, status=not well)


def read_status(url: str, policy: Policy, *, now_s: int) -> Json:
    """Return the state of the installation with this database."""
    with read_only(url, half_life_s=lambda group: policy.of(group).half_life_s) as store:
        snapshot = store.snapshot(now_s)
        groups = snapshot.resource_groups
        found = outlook(snapshot, policy, store.experience).forecasts
    left = free(snapshot)
    # What sessions hold: a parked session that wants its GPU holds none yet.
    held: Counter[str] = Counter()
    for session in filter(holds_shares, snapshot.sessions):
        for share in session.placement.shares if session.placement else ():
            held[share.device_uuid] += share.fgpu_milli
    simulated = {d.uuid for node in snapshot.nodes for d in node.devices if d.simulated}
    return {
        "version": 1,
        "read_at_s": now_s,
        "simulated": bool(simulated),
        "groups": [_group(group, left, held) for group in groups],
        "sessions": [
            _session(s, simulated) for s in snapshot.sessions if s.state is not SessionState.PENDING
        ],
        "queue": [
            _waiting(f, s) for f in found.values() if (s := snapshot.session(f.session_id)) is not None
        ],
    }


def _group(group: str, left: Free, held: Mapping[str, int]) -> Json:
    own = [n for n in left if n.node.resource_group == group]
    devices = [d.device for n in own for d in n.devices]
    return {
        "name": group,
        **_fgpu(sum(d.capacity_milli for d in devices), sum(held.get(d.uuid, 0) for d in devices)),
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
                        **_fgpu(d.device.capacity_milli, held.get(d.device.uuid, 0)),
                        "simulated": d.device.simulated,
                        "cordoned": d.device.cordoned,
                        "cordon_reason": d.device.cordon_reason,
                    }
                    for d in n.devices
                ],
            }
            for n in own
        ],
    }


def _fgpu(total_milli: int, used_milli: int) -> Json:
    return {"fgpu_total": format_milli(total_milli), "fgpu_used": format_milli(used_milli)}


def _signed(milli: int) -> str:
    return f"-{format_milli(-milli)}" if milli < 0 else format_milli(milli)


def _session(session: Session, simulated: set[str]) -> Json:
    where = session.placement
    uuids = [s.device_uuid for s in where.shares] if where and holds_shares(session) else []
    return {
        **_request(session),
        "state": session.state.value,
        "node": where.node_id if where else None,
        "gpus": uuids,
        "since_s": session.started_at_s or session.scheduled_at_s or session.submitted_at_s,
        "simulated": any(uuid in simulated for uuid in uuids),
    }


def _waiting(found: Forecast, session: Session) -> Json:
    return {
        "position": found.position,
        **_request(session),
        "wait_reason": found.reason.value,
        "wait_text": found.text,
        "expected_start_at_s": found.expected_start_at_s,
        "since_s": session.submitted_at_s,
    }


def _request(session: Session) -> Json:
    asked = session.request
    own = {name: getattr(asked, name) for name in ("user", "server_name", "resource_group")}
    return {"id": session.id, **own, "amount": amount_words(asked), "fgpu": fgpu_of(session)}


def status_lines(found: Json) -> list[str]:
    """Return the status for reading."""
    lines = ["SIMULATED GPUs: the queue and the sessions are real, the GPUs are not", ""] * found["simulated"]
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
            for d in node["devices"]:
                reason = f": {printable(d['cordon_reason'])}" if d["cordon_reason"] else ""
                lines.append(
                    f"      {d['index']}: {d['fgpu_used']} of {d['fgpu_total']} fGPU, {d['model']}, {d['uuid']}"
                    + " (simulated)" * d["simulated"]
                    + f" CORDONED{reason}" * d["cordoned"]
                )
    if not found["groups"]:
        lines.append("  no node")
    sessions, waiting = [], []
    for s in found["sessions"]:
        amount = s["amount"] + " (simulated)" * s["simulated"]
        sessions.append((s["id"], _server(s), s["state"], amount, s["node"] or "", instant(s["since_s"])))
    for w in found["queue"]:
        request = _server(w), w["amount"], w["resource_group"]
        waiting.append((w["position"] or "now", w["id"], *request, instant(w["since_s"]), w["wait_text"]))
    lines += ["", "Sessions", *_table("id,user/server,state,amount,node,since", sessions)]
    return [*lines, "", "Queue", *_table("position,id,user/server,amount,group,since,why", waiting)]


def _table(heading: str, rows: Sequence[Sequence[object]]) -> list[str]:
    return [f"  {line}" for line in table(heading.split(","), rows)] if rows else ["  none"]


def _server(session: Json) -> str:
    return printable(f"{session['user']}/{session['server_name']}")
