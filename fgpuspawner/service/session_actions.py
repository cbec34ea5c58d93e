"""Ending, keeping, extending, parking and resizing a session, for the API, the pages and the administrators.

If an administrator does it with another user's session, its owner sees who did it and why, and the audit log has a
line.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus

from fgpu_scheduler import (
    ENDED,
    FOR_GOOD_S,
    MOST_MESSAGE_TEXT,
    Amount,
    Audit,
    BadAmount,
    EndCause,
    EndMessages,
    InvalidTransition,
    NotExtended,
    NotResized,
    Resizes,
    SavedSetup,
    Session,
    SessionState,
    Setups,
    StaleVersion,
    Store,
    StoreUnavailable,
    UnknownSession,
    admit,
    parse_milli,
    resized,
)
from fgpuspawner.service.handler import Handler, whole_number
from fgpuspawner.service.hub import HubSilent, HubUnreachable
from fgpuspawner.service.model import (
    Viewer,
    World,
    extension_of,
    is_mine,
    is_visible,
    request_of,
    why_fixed,
    why_no_choice,
    why_not_parked,
)
from fgpuspawner.service.problems import (
    Problem,
    already_ended,
    bad_argument,
    forbidden,
    hub_unavailable,
    no_such_session,
)
from fgpuspawner.settings import FGPU
from fgpuspawner.text.fields import BAD_NAME, clean_name
from fgpuspawner.text.logs import shown_lines
from fgpuspawner.text.resizing import not_resized_words
from fgpuspawner.text.sessions import amount_words, session_name
from fgpuspawner.text.times import duration

log = logging.getLogger(__name__)

NO_ANSWER = "JupyterHub had not answered"
"""Note in the audit log for an end without the Hub's answer: it may have happened or not."""


async def end_session(handler: Handler, session_id: str, *, message: str = "") -> Session:
    """End or cancel a session through the Hub, and return it as it is then.

    The Hub decides, by the caller's own token, whether they may: it knows each server's owner. It does not know a
    session's resource group, so for an administrator of only that group the service uses its own token. ``message`` is
    the administrator's message to the owner.
    """
    reader = handler.service.reader
    session = await reader.session(int(session_id))
    if session is None:
        raise no_such_session(session_id)
    knows = is_visible(session, handler.viewer)
    if session.state in ENDED:
        # A caller who may not see the session does not learn that it existed.
        raise already_ended(session_id) if knows else no_such_session(session_id)
    if session.held and knows:
        # The Hub has no start to cancel, and would still answer with success.
        raise Problem(409, "held", "JupyterHub restarted and takes this request up again; try in a moment")
    if session.state is SessionState.TERMINATING and knows:
        # The call is not repeated: the server may have its next session by now.
        return session
    try:
        async with end_message(handler, session, message):
            await _stop(handler, session, knows=knows)
    except HubUnreachable as e:
        raise hub_unavailable() from e
    return await reader.session(session.id) or session


async def _stop(handler: Handler, session: Session, *, knows: bool) -> None:
    # The Hub knows only servers. The write may have waited for the database since the first reading, and by now the
    # server may have its next session.
    newest = await handler.service.reader.session(session.id)
    if newest is None or newest.state in ENDED:
        raise already_ended(str(session.id)) if knows else no_such_session(str(session.id))
    if newest.state is SessionState.TERMINATING and knows:
        return
    asked = session.request
    viewer = handler.viewer
    for_group = _is_others(newest, viewer) and not viewer.admin
    token = handler.hub_auth.api_token if for_group else handler.token
    hub = handler.service.hub
    found = await hub.stop_server(asked.user, asked.server_name, session_id=newest.id, token=token)
    if found.status in (403, 404) and not knows:
        raise no_such_session(str(session.id))
    if found.status == 403:
        raise forbidden("JupyterHub does not let you end this session")
    if found.status == 404:
        # The Hub's answer is the same for both cases. The session exists, and goes on.
        message = "JupyterHub does not let you end this session, or no longer knows its server"
        raise Problem(409, "hub_refused", message)
    if found.status >= 500:
        raise Problem(502, "hub_failed", f"JupyterHub could not end it: {found.message or found.status}")
    if found.status >= 400:
        raise Problem(409, "hub_refused", f"JupyterHub did not end it: {found.message or found.status}")


async def grant_wish(handler: Handler, session_id: str, wish: str) -> Session:
    """Do one of `WISHES`, and return the session as it is then. The Hub parks and wakes it within a moment."""
    session = await handler.visible_session(session_id)
    reader, details = handler.service.reader, ""
    if wish == "extend":
        found = await _extend(handler, session)
        details = f"by {duration(reader.extension.by_s)}"
    else:
        if (against := _why_not(wish, session, await reader.world())) is not None:
            raise Problem(409, *against)
        settings = handler.service.settings
        try:
            found = await reader.change(
                lambda store, now_s: _write_wish(wish, session, settings, store, now_s)
            )
        except InvalidTransition:
            raise Problem(409, "changed", f"session {session.id} has changed; look again") from None
    await audit_action(handler, session, f"session.{wish}", details)
    return found


def _why_not(wish: str, session: Session, world: World) -> tuple[str, str] | None:
    """Return the code and message of a refusal."""
    name = f"session {session.id}"
    match wish:
        case "keep" if session.ends_cause is not EndCause.IDLE:
            return "nothing_to_keep", f"{name} is not about to be ended for being idle"
        case "park" if (why := why_not_parked(session, world)) is not None:
            return "not_parked", why
        case "wake" if session.state is not SessionState.PARKED:
            return "not_parked", f"{name} is not parked"
        case "never-park" | "may-park" if (why := why_no_choice(session, world)) is not None:
            return "no_choice", why
    return None


def _write_wish(wish: str, session: Session, settings: FGPU, store: Store, now_s: int) -> Session:
    match wish:
        case "keep":
            until_s = now_s + settings.keep_s(session.request.resource_group)
            return store.keep(session.id, until_s, now_s=now_s)
        case "park":
            return store.ask_to_park(session.id, now_s=now_s)
        case "wake":
            return store.want(session.id, True, now_s=now_s)
    return store.keep(session.id, FOR_GOOD_S if wish == "never-park" else None, now_s=now_s)


async def _extend(handler: Handler, session: Session) -> Session:
    reader = handler.service.reader
    try:
        found = await reader.extend(session.id)
    except UnknownSession:
        raise already_ended(str(session.id)) from None
    except StaleVersion:
        raise Problem(409, "busy", "The queue changes too fast; try again in a moment.") from None
    if isinstance(found, NotExtended):
        allowed = extension_of(session, await reader.world())
        extended, longest = duration(session.extended_s), duration(allowed.longest_s or 0)
        message = NOT_EXTENDED[found].format(extended=extended, longest=longest)
        raise Problem(409, "not_extended", message)
    return found


async def rename_session(handler: Handler, session_id: str, name: object) -> Session:
    """Give the caller's own session another name, and return it as it is then."""
    session = await handler.visible_session(session_id)
    if not is_mine(session, handler.viewer):
        raise forbidden("only its owner can rename a session")
    found = clean_name(name) if isinstance(name, str) else None
    if not found:
        raise bad_argument("name", BAD_NAME)
    if session.state in ENDED:
        raise already_ended(session_id)
    return await handler.service.reader.change(
        lambda store, now_s: store.rename(session.id, found, now_s=now_s)
    )


async def session_log(handler: Handler, session_id: str, *, lines: int) -> list[str]:
    """Return the last lines of a session's log, without secrets, for its owner or an administrator of everything."""
    session = await handler.visible_session(session_id)
    viewer = handler.viewer
    if not viewer.admin and not (is_mine(session, viewer) and may_resize(session, viewer)):
        raise forbidden(
            "only its owner and administrators read a session's log, or a program in the session itself"
        )
    if not session.attempt:
        return []
    try:
        status, text = await handler.service.hub.log(session.id, token=handler.hub_auth.api_token)
    except HubUnreachable as e:
        raise hub_unavailable() from e
    if status == HTTPStatus.NOT_FOUND:
        raise Problem(404, "no_log", "JupyterHub has no log of this session")
    if status != HTTPStatus.OK:
        raise Problem(503, "no_log", "the session's log cannot be read now; try again in a moment")
    setup = await saved_setup(handler, session)
    if setup is None and session.request.setup:
        words = "the values of its variables are no longer saved, so they could not be masked in its log"
        raise Problem(404, "no_log", words)
    await audit_action(handler, session, "session.log")
    return shown_lines(text, most=lines, secrets=[] if setup is None else setup.variables.values())


async def session_setup(handler: Handler, session_id: str) -> SavedSetup:
    """Return the variables and script of a live session to the session itself: nobody else gets the values."""
    session = await handler.visible_session(session_id)
    asked = session.request
    if not is_mine(session, handler.viewer) or handler.viewer.server_name != asked.server_name:
        raise forbidden("only the session itself gets its variables and script")
    found = None
    if session.state not in ENDED:
        found = await saved_setup(handler, session)
    if found is None:
        raise Problem(404, "no_setup", "this session has no variables or script of its own")
    return found


async def saved_setup(handler: Handler, session: Session) -> SavedSetup | None:
    """Return a session's own variables and script; None without any, or if they are no longer saved."""
    asked = session.request
    return await handler.service.reader.read_store(lambda store: Setups(store).get(asked.setup, asked.user))


NOT_EXTENDED = {
    NotExtended.OFF: "Time limits can't be extended here.",
    NotExtended.NOT_RUNNING: "Only a running session can be extended.",
    NotExtended.NO_LIMIT: "This session has no time limit of its own.",
    NotExtended.PREEMPTED: "A request that goes first needs this place.",
    NotExtended.USED_UP: "You have extended this session by {extended} already. That is the most.",
    NotExtended.LONGEST: "Sessions may run for {longest} here. One more extension would pass that.",
    NotExtended.PROMISED: "Another user was promised a start that this would delay.",
}


def _is_others(session: Session, viewer: Viewer) -> bool:
    return viewer.may_administer(session.request.resource_group) and not is_mine(session, viewer)


@asynccontextmanager
async def end_message(handler: Handler, session: Session, message: str) -> AsyncIterator[None]:
    """Context of a request to the Hub to end a session: stores the message to its owner and the audit log's line.

    Only for administrators and sessions of other users. The message is removed if the Hub refuses, and kept if it does
    not answer, as it may still act.

    Raises:
        Problem: the message is too long, or the audit log cannot be written.
        StoreUnavailable: nothing can be written.
    """
    if not _is_others(session, handler.viewer):
        yield
        return
    said = " ".join(message.replace("\0", " ").split())
    if len(said) > MOST_MESSAGE_TEXT:
        raise bad_argument("message", f"{len(said)} characters; it may have {MOST_MESSAGE_TEXT}")
    by = handler.actor
    words = f"ended by the administrator {by}" + (f": {said}" if said else "")
    change = handler.service.reader.change
    await change(lambda store, now_s: EndMessages(store).put(session.id, words, now_s=now_s))
    try:
        yield
    except HubSilent:
        await audit_action(handler, session, "session.end", "; ".join(filter(None, (said, NO_ANSWER))))
        raise
    except BaseException:
        await change(lambda store, _: EndMessages(store).drop(session.id))
        raise
    await audit_action(handler, session, "session.end", said)


async def write_audit(
    handler: Handler, action: str, target: str, *, group: str | None = None, details: str = ""
) -> None:
    """Write a line into the audit log, with the caller as its actor."""

    def write(store: Store, by: str, now_s: int) -> None:
        Audit(store).add(actor=by, action=action, target=target, group=group, details=details, now_s=now_s)

    await handler.change(write)


async def audit_action(handler: Handler, session: Session, action: str, details: str = "") -> None:
    """Write an administrator's action on another user's session into the audit log.

    Raises:
        Problem: it cannot be written; the action is not undone.
    """
    if not _is_others(session, handler.viewer):
        return
    by, where = (
        handler.actor,
        f"session {session.id} ({session_name(session.request)}) of {session.request.user}",
    )
    try:
        await write_audit(handler, action, where, group=session.request.resource_group, details=details)
    except StoreUnavailable as e:
        log.error("Not in the audit log: %s by %s of %s: %s", action, by, where, details or "nothing said")
        message = "it was asked for and is under way, but could not be written into the audit log"
        raise Problem(503, e.code, message) from e


FIELDS = ("fgpu", "gpu_memory_mib", "compute_percent")
MOST_AMOUNT = 10**9 - 1


async def resize_session(handler: Handler, session_id: str, given: Mapping[str, object]) -> Session:
    """Have the Hub resize a session, and return it as it is then: the Hub acts within a moment."""
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
    await audit_action(handler, session, "session.resize", f"{before} -> {after}")
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
    memory_mib = whole_number("gpu_memory_mib", given["gpu_memory_mib"], least=1, most=MOST_AMOUNT)
    # A missing field keeps its value.
    percent = given.get("compute_percent", session.request.compute_percent)
    if percent is not None:
        percent = whole_number("compute_percent", percent, least=1, most=MOST_AMOUNT)
    return Amount(0, memory_mib, percent)
