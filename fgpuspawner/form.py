"""What the Hub's own pages show: the launch form, refusals, and the events of the waiting page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fgpu_scheduler import Forecast, Session, SessionState, amounts_that_fit, format_milli
from fgpuspawner.options import FIELDS, Offer, Refused

TEMPLATES = Path(__file__).parent / "templates"

_jinja = Environment(
    loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)


def render(offer: Offer, *, hub_prefix: str, ticket: str, given: dict[str, str]) -> str:
    """Return the inside of the launch form. It works without JavaScript; with it, it shows a forecast.

    ``ticket`` lets the page ask the service for forecasts. ``given`` is what was sent and refused, to be
    shown again; it is only ever shown as text.
    """
    values = {name: str(value) for name, value in offer.default.as_options().items()} | given
    groups: list[dict[str, Any]] = []
    for group in offer.groups:
        own = [n for n in offer.nodes if n.resource_group == group]
        amounts = amounts_that_fit(own, offer.caps)
        models: dict[str, int] = {}
        for device in (d for n in own for d in n.devices):
            label = f"{device.model} = {format_milli(device.capacity_milli)} fGPU"
            models[label] = models.get(label, 0) + 1
        groups.append(
            {
                "name": group,
                "amounts": [format_milli(a) for a in amounts],
                "max_cpu": format_milli(
                    min(max(n.cpu_milli for n in own), offer.caps.max_cpu_milli or 10**9) if own else 0
                ),
                "max_memory_mib": min(max(n.memory_mib for n in own), offer.caps.max_memory_mib or 10**9)
                if own
                else 0,
                "gpus": [f"{count} x {label}" for label, count in models.items()],
            }
        )
    template = _jinja.get_template("fgpu_options_form.html")
    return template.render(
        images=offer.images,
        groups=groups,
        values=values,
        step=format_milli(offer.caps.fgpu_step_milli),
        most_fgpu=max((g["amounts"][-1] for g in groups if g["amounts"]), key=float, default="0"),
        most_cpu=max((g["max_cpu"] for g in groups), key=float, default="0"),
        most_memory_mib=max((g["max_memory_mib"] for g in groups), default=0),
        max_count=offer.caps.max_count,
        simulated=offer.simulated,
        ticket=ticket,
        service_url=hub_prefix.removesuffix("hub/") + "services/fgpu/",
    )


def render_refusal(refused: Refused) -> str:
    """Return what stands in place of the form for a user who may start nothing."""
    return str(refusal_html(refused))


def refusal_html(refused: Refused) -> str:
    """Return the reasons as escaped HTML, one below the other."""
    items = Markup("").join(Markup("<li>{}</li>").format(r.message) for r in refused.refusals)
    return str(Markup("<ul class='fgpu-refusals mb-0 ps-3'>{}</ul>").format(items))


def given(handler: Any) -> dict[str, str]:
    """Return the options that a link to the form carries, for showing the form filled in with them."""
    arguments = getattr(getattr(handler, "request", None), "query_arguments", {})
    texts = {name: [v.decode("utf-8", "replace") for v in values] for name, values in arguments.items()}
    return first_of({name.removeprefix("opt-"): v for name, v in texts.items() if name.startswith("opt-")})


def first_of(fields: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the first value of each field that the form has, cut to what a field can hold."""
    return {name: str(fields[name][0])[:200] for name in FIELDS if fields.get(name)}


def waiting_event(session: Session, found: Forecast | None, *, simulated: bool) -> dict[str, Any]:
    """Return the progress event of a PENDING session; ``fgpu`` carries the facts, ``message`` the sentence."""
    facts: dict[str, Any] = {
        "session_id": session.id,
        "state": session.state.value,
        "amount": format_milli(session.request.fgpu_milli),
        "simulated": simulated,
        "position": found.position if found else None,
        "reason": found.reason.value if found else None,
        "text": found.text if found else None,
        "expected_start_at_s": found.expected_start_at_s if found else None,
        "basis": found.basis if found else None,
        "submitted_at_s": session.submitted_at_s,
    }
    if found is not None and found.position == 0:
        return {"progress": 30, "message": "Starting", "fgpu": facts}
    if found is None:
        return {"progress": 5, "message": "Waiting in the queue", "fgpu": facts}
    ahead = found.position - 1
    place = "You are next in the queue" if ahead == 0 else f"{ahead} ahead of you in the queue"
    return {"progress": 10, "message": f"{place}: {found.text}", "fgpu": facts}


def away_event(last: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the progress event of a session whose state cannot be read now; ``last`` is the event before."""
    message = "The queue's database does not answer; nothing is lost, and this goes on by itself"
    return {"progress": last["progress"] if last else 0, "message": message}


_STARTING = {
    SessionState.SCHEDULED: (40, "Your share is reserved; starting"),
    SessionState.PREPARING: (60, "Starting your session"),
    SessionState.PULLING: (50, "Fetching the image"),
}


def starting_event(session: Session, *, simulated: bool) -> dict[str, Any]:
    """Return the progress event of a session that has its share and is being launched."""
    progress, message = _STARTING[session.state]
    amount = format_milli(session.request.fgpu_milli)
    return {
        "progress": progress,
        "message": f"{message} ({amount} fGPU)",
        "fgpu": {
            "session_id": session.id,
            "state": session.state.value,
            "amount": amount,
            "simulated": simulated,
            "position": None,
            "reason": None,
            "text": message,
            "expected_start_at_s": None,
            "basis": None,
            "submitted_at_s": session.submitted_at_s,
        },
    }
