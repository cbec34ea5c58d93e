"""Receipts: what one session had, how long it waited for it, and what was measured of it. Pure."""

from __future__ import annotations

from fgpu_scheduler import Past, compute_of, held_between
from fgpuspawner.meter.tally import lent_on_the_mean
from fgpuspawner.service.api.session_objects import asked_object
from fgpuspawner.service.csv_file import Cell
from fgpuspawner.service.model import Json, Site, Viewer, World
from fgpuspawner.text.times import cell

COLUMNS = [
    "session_id",
    "user",
    "server_name",
    "image",
    "image_name",
    "resource_group",
    "amount",
    "fgpu",
    "submitted",
    "started",
    "ended",
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
    "compute_entitled_percent",
    "compute_received_percent",
    "compute_borrowed_percent",
    "compute_lent_percent",
]
"""Of the CSV file, in this order."""
INSTANTS = ("submitted", "started", "ended")
"""In UTC, as in the file of live sessions."""


def receipt(past: Past, world: World, viewer: Viewer, site: Site) -> Json:
    """Return a session's receipt; of one that still runs it is as far as it has come. The viewer must be allowed."""
    session, measured = past.session, past.measured
    until_s = world.snapshot.now_s if session.ended_at_s is None else session.ended_at_s
    known = measured if measured is not None and measured.samples else None
    lent = lent_on_the_mean(measured) if measured is not None else None
    placed = session.placement.shares if session.placement is not None else ()
    return {
        "session_id": session.id,
        **asked_object(session, world, viewer, site),
        "wait_s": max(0, (session.started_at_s or until_s) - session.waits_since_s),
        "run_s": max(0, until_s - session.started_at_s) if session.started_at_s is not None else 0,
        "gpu_hours": round(gpu_hours(past, world, until_s), 4),
        "memory_peak_mib": known.peak_mib if known else None,
        "memory_p95_mib": known.p95_mib if known else None,
        "sm_p95_percent": measured.sm_p95_percent if measured else None,
        "energy_wh": _wh(measured.energy_mj if measured else None),
        "energy_estimated": bool(measured and measured.energy_mj is not None and measured.energy_estimated),
        "samples": measured.samples if measured else 0,
        "compute_entitled_percent": compute_of(placed),
        "compute_received_percent": lent.received if lent else None,
        "compute_borrowed_percent": lent.borrowed if lent else None,
        "compute_lent_percent": lent.lent if lent else None,
    }


def cells(receipt: Json) -> list[Cell]:
    """Return a receipt's line of the CSV file, in the order of `COLUMNS`."""
    return [cell(receipt[f"{name}_at_s"]) if name in INSTANTS else receipt[name] for name in COLUMNS]


def gpu_hours(past: Past, world: World, until_s: int) -> float:
    """Return the GPUs x hours of a session's shares, which it holds from its placement to its end."""
    session = past.session
    if session.placement is None or session.scheduled_at_s is None:
        return 0.0
    now_millionths = round(1_000_000 * gpus_of(past, world))
    held = held_between(session.scheduled_at_s, until_s, session.sizes, 0, now_millionths)
    return sum((to_s - from_s) * millionths for from_s, to_s, _, millionths in held) / 1_000_000 / 3600


def gpus_of(past: Past, world: World) -> float:
    """Return how many GPUs the shares that a session has now come to.

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
