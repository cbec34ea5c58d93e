"""Receipts: what one session had, how long it waited for it, and what was measured of it. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from fgpu_scheduler.core.records import Past
from fgpuspawner.service.view import Json, Site, Viewer, World, is_mine, is_simulated
from fgpuspawner.text.sessions import amount_words, fgpu_of

COLUMNS = (
    "session_id",
    "user",
    "server_name",
    "image",
    "image_name",
    "resource_group",
    "amount",
    "fgpu",
    "submitted_at_s",
    "started_at_s",
    "ended_at_s",
    "end_cause",
    "message",
    "wait_s",
    "run_s",
    "gpu_hours",
    "gpu_memory_mib",
    "memory_peak_mib",
    "memory_p95_mib",
    "sm_p95_percent",
    "energy_wh",
    "energy_estimated",
    "samples",
    "simulated",
)
"""Of the CSV file, in this order."""

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""With these a spreadsheet begins to compute."""


def receipt(past: Past, world: World, viewer: Viewer, site: Site) -> Json:
    """Return a session's receipt; of one that still runs it is as far as it has come. The viewer must be allowed."""
    session, measured = past.session, past.measured
    asked = session.request
    shares = session.placement.shares if session.placement else ()
    until_s = world.snapshot.now_s if session.ended_at_s is None else session.ended_at_s
    known = measured if measured is not None and measured.samples else None
    return {
        "session_id": session.id,
        "user": asked.user,
        "server_name": asked.server_name,
        "image": asked.image,
        "image_name": site.image_names.get(asked.image, asked.image),
        "resource_group": asked.resource_group,
        "amount": amount_words(asked),
        "fgpu": fgpu_of(session),
        "submitted_at_s": session.submitted_at_s,
        "started_at_s": session.started_at_s,
        "ended_at_s": session.ended_at_s,
        "end_cause": session.end_cause.value if session.end_cause else None,
        "message": session.message,
        "wait_s": max(0, (session.started_at_s or until_s) - session.waits_since_s),
        "run_s": max(0, until_s - session.started_at_s) if session.started_at_s is not None else 0,
        "gpu_hours": round(gpu_hours(past, world, until_s), 4),
        "gpu_memory_mib": sum(share.memory_mib for share in shares) if shares else None,
        "memory_peak_mib": known.peak_mib if known else None,
        "memory_p95_mib": known.p95_mib if known else None,
        "sm_p95_percent": measured.sm_p95_percent if measured else None,
        "energy_wh": _wh(measured.energy_mj if measured else None),
        "energy_estimated": bool(measured and measured.energy_mj is not None and measured.energy_estimated),
        "samples": measured.samples if measured else 0,
        "mine": is_mine(session, viewer),
        "simulated": is_simulated(session, world),
    }


def gpu_hours(past: Past, world: World, until_s: int) -> float:
    """Return the GPUs x hours of a session's shares, which it holds from its placement to its end."""
    session = past.session
    if session.placement is None or session.scheduled_at_s is None:
        return 0.0
    return gpus_of(past, world) * max(0, until_s - session.scheduled_at_s) / 3600


def gpus_of(past: Past, world: World) -> float:
    """Return how many GPUs a session's shares come to.

    As it was measured while it ran; of one that was not, by what its GPUs are worth now, or else by its compute.
    """
    if past.measured is not None and past.measured.gpu_millionths:
        return past.measured.gpu_millionths / 1_000_000
    found = 0.0
    for share in past.session.placement.shares if past.session.placement else ():
        device = world.devices.get(share.device_uuid)
        found += share.fgpu_milli / device.capacity_milli if device else share.compute_percent / 100
    return found


def _wh(energy_mj: int | None) -> float | None:
    return None if energy_mj is None else round(energy_mj / 3_600_000, 3)


def as_csv(receipts: Iterable[Json]) -> str:
    """Return receipts as a CSV file with a line of names. What a spreadsheet would compute is text in it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for one in receipts:
        writer.writerow([_cell(one[name]) for name in COLUMNS])
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return "" if value is None else value
