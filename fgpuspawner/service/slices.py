"""What a running session's amount can become, and its last resize request. Pure."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler import Amount, Request, Session, SessionState, fixed, format_milli
from fgpuspawner.service import objects
from fgpuspawner.service.model import World
from fgpuspawner.text.resizing import amounts, most_memory_mib, not_resized_words
from fgpuspawner.text.sessions import amount_words


def resize_object(session: Session, world: World) -> objects.Resize | None:
    """Return a running session's possible amounts and its last resize request; None for one that does not run."""
    if session.state is not SessionState.RUNNING or session.placement is None:
        return None
    wish = world.resizes.get(session.id)
    why = why_fixed(session, world)
    return objects.Resize.of(
        wish,
        why_not=why,
        amounts=[] if why else map(format_milli, amounts(world.snapshot, session, world.step_milli)),
        most_memory_mib=None if why else most_memory_mib(world.snapshot, session),
        asked=None if wish is None else amount_words(request_of(session, wish.amount)),
    )


def request_of(session: Session, amount: Amount) -> Request:
    """Return a session's request with another amount."""
    return replace(
        session.request,
        fgpu_milli=amount.fgpu_milli,
        gpu_memory_mib=amount.gpu_memory_mib,
        compute_percent=amount.compute_percent,
    )


def why_fixed(session: Session, world: World) -> str | None:
    """Return why a session cannot be resized at all, or None."""
    against = fixed(world.snapshot, session)
    if against is not None:
        nothing = Amount.of(session)
        return not_resized_words(against, session, nothing, world.snapshot, step_milli=world.step_milli)
    assert session.placement is not None
    own = next((c for c in world.isolation if c.node_id == session.placement.node_id), None)
    if own is not None and own.fixed:
        return f"{own.fixed[0].upper()}{own.fixed[1:]}."
    return None
