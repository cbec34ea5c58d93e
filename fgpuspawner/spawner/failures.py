"""Failed starts: their messages, and what the user can do next. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fgpu_scheduler import EndCause, Session
from fgpuspawner.text.sessions import isolated

REMEMBERED_S = 3600
"""How long the form remembers the options of a failed start, and the Hub's pages the message of an end."""

TELL = "show your administrator this message"
SHOW_IT = f"{TELL[0].upper()}{TELL[1:]}."
"""What to do where a setting is in the way."""
NEXT_STEP = {
    EndCause.QUEUE_TIMEOUT: "Ask again. Less fGPU or a time limit often starts sooner: the form shows it.",
    EndCause.PULL_FAILED: f"Choose another image, or try again later. If it fails again, {TELL}.",
    EndCause.LAUNCH_FAILED: f"Try again. If it fails again, {TELL}, or choose another image.",
    EndCause.ISOLATION_FAILED: f"Nothing ran without limits. Try again. If it fails again, {TELL}.",
    EndCause.DISK_LIMIT: "It used too much disk. Start it again and remove what you do not need.",
    EndCause.OOM: "It needed more memory than it had. Ask for more.",
    EndCause.EXITED: f"Its server has ended. Try again; if that fails, choose another image, or {TELL}.",
    EndCause.NODE_LOST: "Its machine does not answer. Ask again to start on another one.",
    EndCause.PREEMPTED: "A request that goes first took its place. Ask again.",
    EndCause.TIME_LIMIT: "Its time limit was reached. Ask again, for longer.",
    EndCause.IDLE: "It was idle. Ask again when you need it.",
    EndCause.HUB_STOPPED: "JupyterHub was stopped. Ask again.",
    EndCause.USER: "Ask again whenever you like.",
}
"""What to do after an end, by its cause."""
REFUSED_NEXT = "Cancel a waiting request or end a session, then ask again."


def end_words(session: Session) -> str:
    """Return how and why a session ended, and what to do next, as sentences."""
    what = "Your session did not start" if session.started_at_s is None else "Your session has ended"
    if session.end_cause is EndCause.USER:
        what = "Your request was cancelled" if session.started_at_s is None else "Your session was ended"
    why = f": {isolated(session.message)}" if session.message else ""
    return f"{what}{why}. {NEXT_STEP[session.end_cause or EndCause.EXITED]}"


def failed_html(message: str, step: str) -> str:
    """Return what happened and what to do next, as escaped HTML for the Hub's pages."""
    html = Markup(
        "<div class='fgpu-happened' dir='auto'>{}</div><div class='fgpu-next mt-2'>{}</div>"
    ).format(message, step)
    return str(html)


def last_end(sessions: Sequence[Session], server_name: str, *, now_s: int) -> Session | None:
    """Return the newest session of a server if it ended within the last hour."""
    own = [s for s in sessions if s.request.server_name == server_name]
    newest = max(own, key=lambda s: s.id, default=None)
    if newest is None or newest.ended_at_s is None or now_s - newest.ended_at_s > REMEMBERED_S:
        return None
    return newest


def last_failure(sessions: Sequence[Session], server_name: str, *, now_s: int) -> Session | None:
    """Return the server's `last_end` if that session never ran, and neither its owner nor the Hub's stop ended it."""
    found = last_end(sessions, server_name, now_s=now_s)
    if found is None or found.started_at_s is not None:
        return None
    return None if found.end_cause in (None, EndCause.USER, EndCause.HUB_STOPPED) else found
