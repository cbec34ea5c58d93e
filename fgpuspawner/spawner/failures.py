"""Starts that came to nothing: what is said of them, and what can be done next. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fgpu_scheduler import EndCause, Session

LATELY_S = 3600
"""So long the form remembers what a failed start asked for, and the Hub's pages what was said of an end."""

TELL = "tell your administrator what it says here"
NEXT = {
    EndCause.QUEUE_TIMEOUT: "Ask again; less fGPU, or a time limit, often starts sooner. The form tells before.",
    EndCause.PULL_FAILED: f"Choose another image, or try again later; if it stays so, {TELL}.",
    EndCause.LAUNCH_FAILED: f"Try again; if it fails again choose another image, or {TELL}.",
    EndCause.ISOLATION_FAILED: f"Nothing ran without its limits. Try again; if it fails again, {TELL}.",
    EndCause.DISK_LIMIT: "It took more of the disk than it may. Start it again and remove what you do not need.",
    EndCause.OOM: "It needed more memory than it had. Ask for more.",
    EndCause.EXITED: f"Its server ended by itself. Try again; if it fails again choose another image, or {TELL}.",
    EndCause.NODE_LOST: "Its machine does not answer any more. Ask again: another is taken, if there is one.",
    EndCause.PREEMPTED: "A session of higher priority needed its place. Ask again.",
    EndCause.TIME_LIMIT: "Its time limit was reached. Ask again, for longer.",
    EndCause.IDLE: "It was idle. Ask again when you need it.",
    EndCause.USER: "It was cancelled. Ask again whenever you like.",
}
"""What to do after a start that ended so."""
REFUSED_NEXT = "Cancel a request that waits, or end a session, and ask again."


def next_step(cause: EndCause) -> str:
    """Return what to do after a start that ended so."""
    return NEXT[cause]


def failed_html(message: str, step: str) -> str:
    """Return what happened and what to do next, as escaped HTML for the Hub's pages."""
    html = Markup(
        "<div class='fgpu-happened' dir='auto'>{}</div><div class='fgpu-next mt-2'>{}</div>"
    ).format(message, step)
    return str(html)


def last_word(sessions: Sequence[Session], server_name: str, *, now_s: int) -> str | None:
    """Return what was said of the end of the newest session of a server, where that was lately; else None."""
    own = [s for s in sessions if s.request.server_name == server_name]
    newest = max(own, key=lambda s: s.id, default=None)
    if newest is None or newest.ended_at_s is None or now_s - newest.ended_at_s > LATELY_S:
        return None
    return newest.message or None


def failed_lately(sessions: Sequence[Session], server_name: str, *, now_s: int) -> Session | None:
    """Return the newest session of a server where it never ran, ended of itself, and that is not long ago."""
    own = [s for s in sessions if s.request.server_name == server_name]
    newest = max(own, key=lambda s: s.id, default=None)
    if newest is None or newest.ended_at_s is None or newest.started_at_s is not None:
        return None
    if newest.end_cause in (None, EndCause.USER) or now_s - newest.ended_at_s > LATELY_S:
        return None
    return newest
