"""An administrator ends somebody else's session: its owner is told by whom and why, and it is in the audit log."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fgpu_scheduler import Session, StoreUnavailable
from fgpu_scheduler.store.audit import Audit
from fgpu_scheduler.store.end_messages import MOST_TEXT, EndMessages
from fgpuspawner.service.base import Handler
from fgpuspawner.service.hub import HubSilent
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.sent import sent_json
from fgpuspawner.service.view import is_mine

log = logging.getLogger(__name__)

NO_ANSWER = "JupyterHub had not answered"
"""In the audit log, of an end that may have followed or not."""


@asynccontextmanager
async def last_words(handler: Handler, session: Session, message: str) -> AsyncIterator[None]:
    """Around asking the Hub to end a session: what is said to its owner, and the line in the audit log.

    Only for administrators, and sessions that are not their own. What is said is forgotten if the Hub refuses, and
    kept if it does not answer: it goes on with what it was asked.

    Raises:
        Problem: the message is too long, or the session ends and the audit log cannot be written.
        StoreUnavailable: nothing can be written.
    """
    if not handler.viewer.admin or is_mine(session, handler.viewer):
        yield
        return
    said = " ".join(message.replace("\0", " ").split())
    if len(said) > MOST_TEXT:
        text = f"message: {len(said)} characters; it may have {MOST_TEXT}"
        raise Problem(400, "bad_argument", text, field="message")
    by = actor_of(handler)
    words = f"ended by the administrator {by}" + (f": {said}" if said else "")
    change = handler.service.reader.change
    await change(lambda store, now_s: EndMessages(store).put(session.id, words, now_s=now_s))
    try:
        yield
    except HubSilent:
        await audited(handler, session, "session.end", "; ".join(filter(None, (said, NO_ANSWER))))
        raise
    except BaseException:
        await change(lambda store, _: EndMessages(store).drop(session.id))
        raise
    await audited(handler, session, "session.end", said)


async def audited(handler: Handler, session: Session, action: str, details: str = "") -> None:
    """Write into the audit log what an administrator did with a session of somebody else.

    Raises:
        Problem: it cannot be written, which does not undo what was done.
    """
    if not handler.viewer.admin or is_mine(session, handler.viewer):
        return
    asked, by = session.request, actor_of(handler)
    where = f"session {session.id} ({asked.server_name or 'default server'}) of {asked.user}"
    try:
        await handler.service.reader.change(
            lambda store, now_s: Audit(store).add(
                actor=by, action=action, target=where, details=details, now_s=now_s
            )
        )
    except StoreUnavailable as e:
        log.error("Not in the audit log: %s by %s of %s: %s", action, by, where, details or "nothing said")
        message = "it was asked for and is under way, but could not be written into the audit log"
        raise Problem(503, e.code, message) from e


def actor_of(handler: Handler) -> str:
    """Return who is written into the audit log: a user, or the service whose token it was."""
    return handler.viewer.user or f"service {handler.current_user.get('name', '')}"


def sent_message(handler: Handler) -> str:
    """Return the message in the JSON object that was sent with a request to end a session, if there is one.

    Raises:
        Problem: what was sent is something else.
    """
    if not handler.request.body:
        return ""
    try:
        found = sent_json(handler.request.body)
        message = found.get("message", "") if isinstance(found, dict) else None
    except ValueError:
        message = None
    if not isinstance(message, str):
        text = 'message: the body must be nothing, or a JSON object such as {"message": "repair at 15:00"}'
        raise Problem(400, "bad_argument", text, field="message")
    return message
