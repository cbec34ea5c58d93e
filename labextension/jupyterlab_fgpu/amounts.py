"""The amounts of the panel's bars, and the next larger amount for a session."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from .service_client import Session, malformed

KINDS = ("fgpu", "cpu", "memory_mib")
MEMORY_STEP_MIB = 128


class Larger(NamedTuple):
    """A request for more than a session has: its options, and what it would give."""

    options: dict[str, str]
    amount: str
    gpu_memory_mib: int


def bars(capacity: Mapping[str, Any], group: str | None) -> dict[str, Any]:
    """Return for each resource what the caller holds, and the total that they could have.

    `mine` of `total` is in the resource group, `mine_overall` of `total_overall` in all of
    theirs. Amounts are exact decimals. Raises Unreachable for an answer that this version does
    not understand.
    """
    here = group_of(capacity, group)
    own, free = capacity["mine_overall"], capacity["allocatable_overall"]
    rows = []
    for kind in KINDS:
        row: dict[str, Any] = {"kind": kind}
        for suffix, used, left in (
            ("", here["mine"], here["allocatable"]),
            ("_overall", own, free),
        ):
            mine = _amount(used, kind)
            total = mine + _amount(left, kind)
            row["mine" + suffix], row["total" + suffix] = _words(mine), _words(total)
            row["percent" + suffix] = _percent(mine, total)
        rows.append(row)
    return {"group": here["name"], "rows": rows}


def group_of(capacity: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """Return a resource group of the answer, or the first one if it is missing."""
    groups: list[dict[str, Any]] = capacity["groups"]
    if not groups:
        raise malformed("it has no resource group")
    return next((group for group in groups if group["name"] == name), groups[0])


def next_larger(session: Session, capacity: Mapping[str, Any], needed_mib: int | None) -> Larger | None:
    """Return the smallest larger amount that holds ``needed_mib``, or half as much again.

    None where the session has a whole GPU, or several, or its GPU cannot be found.
    """
    if len(session["gpus"]) != 1 or session["gpu_memory_mib"] is None:
        return None
    group = group_of(capacity, session["resource_group"])
    own = session["gpus"][0]
    device = next((d for d in group["devices"] if d["uuid"] == own["uuid"]), None)
    if device is None:
        return None
    whole_mib, held_mib = device["memory_mib"], session["gpu_memory_mib"]
    least_mib = max(needed_mib or held_mib * 3 // 2, held_mib + 1)
    if held_mib >= whole_mib or (needed_mib or 0) > whole_mib:
        return None
    common = _common(session)
    if len({d["model"] for d in group["devices"]}) > 1:
        # On another model the same amount may be less memory than now.
        common["gpu_model"] = own["model"]
    if session["fgpu"] is not None and session["amount"] == f"{session['fgpu']} fGPU":
        step, per_gpu = _amount(group, "fgpu_step"), _amount(device, "fgpu_total")
        if step <= 0 or per_gpu <= 0:
            return None
        steps = -((-min(least_mib, whole_mib) * per_gpu) // (whole_mib * step))
        amount = min(max(steps * step, _amount(dict(session), "fgpu") + step), per_gpu)
        # Memory is rounded down, so the step that seems enough may lack some.
        while _slice_mib(whole_mib, amount, per_gpu) < least_mib and amount + step <= per_gpu:
            amount += step
        words = _words(amount)
        return Larger({**common, "fgpu": words}, f"{words} fGPU", _slice_mib(whole_mib, amount, per_gpu))
    memory_mib = min(whole_mib, -(-least_mib // MEMORY_STEP_MIB) * MEMORY_STEP_MIB)
    options = {**common, "gpu_memory_mib": str(memory_mib)}
    amount_words = f"{memory_mib} MiB"
    percent = session["compute_percent"]
    if percent is not None and session["amount"] is not None and "%" in session["amount"]:
        options["compute_percent"] = str(percent)
        amount_words += f" + {percent} %"
    return Larger(options, amount_words, memory_mib)


def in_place(session: Session, larger: Larger) -> bool:
    """Return whether the session could have the larger amount now, with its programs running on."""
    resize = session["resize"]
    if resize is None or resize["why_not"] is not None or resize["state"] == "ASKED":
        return False
    if "fgpu" in larger.options:
        return larger.options["fgpu"] in resize["amounts"]
    # The owner's quotas may allow less; the service then says so.
    return larger.gpu_memory_mib <= (resize["most_memory_mib"] or 0)


def _common(session: Session) -> dict[str, str]:
    fields = {"image": "image", "group": "resource_group", "cpu": "cpu", "memory_mib": "memory_mib"}
    same = {option: session[name] for option, name in fields.items()}
    return {name: str(value) for name, value in same.items() if value is not None}


def _slice_mib(whole_mib: int, amount: Decimal, per_gpu: Decimal) -> int:
    if amount >= per_gpu:
        return whole_mib
    return int(whole_mib * amount / per_gpu) // MEMORY_STEP_MIB * MEMORY_STEP_MIB


def _amount(raw: dict[str, Any], name: str) -> Decimal:
    try:
        amount = Decimal(raw[name])
        if amount.is_finite():
            return amount
    except InvalidOperation:
        pass
    raise malformed(f"{name} is no amount")


def _words(amount: Decimal) -> str:
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _percent(part: Decimal, whole: Decimal) -> float:
    return 0.0 if whole <= 0 else float(min(Decimal(1000), part * 1000 // whole) / 10)
