"""Changes the amount of a running session: stores the request, and the Hub acts on it."""

from __future__ import annotations

from collections.abc import Mapping

from fgpu_scheduler import (
    Amount,
    BadAmount,
    InvalidTransition,
    NotResized,
    Resizes,
    Session,
    admit,
    parse_milli,
    resized,
)
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.model import Viewer
from fgpuspawner.service.problems import Problem, bad_argument, forbidden
from fgpuspawner.service.session_actions import audited
from fgpuspawner.service.slices import request_of, why_fixed
from fgpuspawner.text.resizing import not_resized_words
from fgpuspawner.text.sessions import amount_words

FIELDS = ("fgpu", "gpu_memory_mib", "compute_percent")


async def resize_session(handler: Handler, session_id: str, given: Mapping[str, object]) -> Session:
    """Have the Hub resize a session, and return it as it is then: the Hub acts within a moment.

    Raises:
        Problem: it isn't possible, with what would work.
    """
    session = await handler.visible_session(session_id)
    if not may_resize(session, handler.viewer):
        raise forbidden(
            "a session's own token resizes that session only; use the sessions page, or a token of yours"
        )
    world = await handler.service.reader.world()
    # The session may have changed since the page was made.
    session = world.session(session.id) or session
    amount = _amount(session, given)
    if (why := why_fixed(session, world)) is not None:
        raise Problem(409, "not_resized", why)
    asked = request_of(session, amount)
    if amount != Amount.of(session):
        refusals = admit(
            asked, 1, world.snapshot.nodes, handler.service.settings.caps(), world.snapshot.quotas
        )
        for refusal in refusals:
            if refusal.field in FIELDS:
                raise Problem(400, "bad_argument", refusal.message, field=refusal.field)
    found = resized(world.snapshot, session, amount)
    if isinstance(found, NotResized):
        words = not_resized_words(found, session, amount, world.snapshot, step_milli=world.step_milli)
        raise Problem(409, "not_resized", words)
    by = handler.actor
    change = handler.service.reader.change
    try:
        await change(lambda store, now_s: Resizes(store).ask(session.id, amount, by=by, now_s=now_s))
    except InvalidTransition:
        raise Problem(409, "busy", "This session is being resized already; try again in a moment.") from None
    before, after = amount_words(session.request), amount_words(asked)
    await audited(handler, session, "session.resize", f"{before} -> {after}")
    return session


def may_resize(session: Session, viewer: Viewer) -> bool:
    """Return whether a user who sees a session may resize it.

    Every program in a session has that session's token, also one of another user's image, so the token cannot take from
    its owner's other sessions. An administrator of them may resize them with any token.
    """
    own = viewer.server_name in (None, session.request.server_name)
    return own or viewer.may_administer(session.request.resource_group)


def _amount(session: Session, given: Mapping[str, object]) -> Amount:
    """Return the requested amount: fGPU, or GPU memory with or without compute, in the same terms as the session's
    request.
    """
    if ("fgpu" in given) is ("gpu_memory_mib" in given) or ("compute_percent" in given and "fgpu" in given):
        raise bad_argument("fgpu", 'send {"fgpu": "0.5"}, or {"gpu_memory_mib": 4096, "compute_percent": 25}')
    if "fgpu" in given:
        text = given["fgpu"]
        if not isinstance(text, str):
            raise bad_argument("fgpu", 'must be a text such as "0.5"')
        try:
            milli = parse_milli(text, field="fgpu")
        except BadAmount as e:
            raise Problem(400, "bad_argument", str(e), field="fgpu") from None
        if milli <= 0:
            raise bad_argument("fgpu", "must be above 0; end the session to give all of it back")
        return Amount(milli)
    memory_mib = _whole(given, "gpu_memory_mib")
    percent = _whole(given, "compute_percent") if given.get("compute_percent") is not None else None
    # A missing field keeps its value.
    if percent is None and session.request.compute_percent is not None and "compute_percent" not in given:
        percent = session.request.compute_percent
    return Amount(0, memory_mib, percent)


def _whole(given: Mapping[str, object], field: str) -> int:
    value = given[field]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**9:
        raise bad_argument(field, "must be a whole number above 0")
    return value
