"""Texts about resizing a session, and which amounts are possible. Pure."""

from __future__ import annotations

from fgpu_scheduler import (
    MEMORY_GRAIN_MIB,
    Amount,
    NotResized,
    Session,
    Snapshot,
    available_to,
    format_milli,
    memory_words,
    resized,
)
from fgpuspawner.text.sessions import amount_words

COMPUTE_GRAIN_PERCENT = 5


def amounts(world: Snapshot, session: Session, step_milli: int, *, used_mib: int = 0) -> tuple[int, ...]:
    """Return, ascending, each fGPU x 1000 that a running session could have of its GPU now, in steps.

    Within its user's quotas, and enough for what it uses. Waiting requests are not considered.
    """
    left = available_to(world, session)
    if left is None or session.request.gpu_memory_mib is not None or step_milli <= 0:
        return ()
    candidates = range(step_milli, left.device.capacity_milli + 1, step_milli)
    found = ((milli, resized(world, session, Amount(milli))) for milli in candidates)
    return tuple(milli for milli, s in found if isinstance(s, Session) and _memory_mib(s) >= used_mib)


def most_memory_mib(world: Snapshot, session: Session) -> int | None:
    """Return the most GPU memory in MiB that a session of exact amounts could have now; None for another session or a
    GPU that is gone.

    Quotas are not considered.
    """
    left = available_to(world, session)
    if left is None or session.request.gpu_memory_mib is None:
        return None
    return left.memory_mib - left.memory_mib % MEMORY_GRAIN_MIB


def most_words(world: Snapshot, session: Session, step_milli: int) -> str:
    """Return the most that a session could have now: "0.8", or "6 GiB + 50 %" of exact amounts; empty: nothing more."""
    if session.request.gpu_memory_mib is None:
        found = amounts(world, session, step_milli)
        return format_milli(found[-1]) if found else ""
    left, most = available_to(world, session), most_memory_mib(world, session)
    if left is None or most is None:
        return ""
    memory = memory_words(most)
    percent = left.compute_percent - left.compute_percent % COMPUTE_GRAIN_PERCENT
    return memory if session.request.compute_percent is None else f"{memory} + {percent} %"


def not_resized_words(
    why: NotResized, session: Session, amount: Amount, world: Snapshot, *, step_milli: int
) -> str:
    """Return why a session keeps its amount, in one line for its owner, with what would work."""
    most = most_words(world, session, step_milli)
    return NOT_RESIZED[why].format(
        choose=f"choose at most {most}" if most else "end something, or ask again later",
        amount=amount_words(session.request),
        free=_free_words(world, session),
    )


NOT_RESIZED = {
    NotResized.NOT_RUNNING: "Only a running session can be resized.",
    NotResized.NO_GPU: "This session has no GPU. Start a new one to get one.",
    NotResized.SEVERAL_GPUS: "This session's whole GPUs stay as they are. Start a new one for another number.",
    NotResized.WHOLE_GPU: "A whole GPU can't be made smaller while its session runs. Start a new one.",
    NotResized.GPU_GONE: "This session's GPU was removed from the configuration, so its amount stays.",
    NotResized.OTHER_KIND: "This session was requested as {amount}: resize it in the same terms.",
    NotResized.BOTH_WAYS: "Make memory and compute both larger or both smaller; for one of each ask twice.",
    NotResized.IMPOSSIBLE: "This amount isn't possible on the session's GPU; {choose}.",
    NotResized.CORDONED: "The session's machine or GPU takes no new work now, so it can only get smaller.",
    NotResized.NO_ROOM: "{free} free on this GPU: {choose}.",
    NotResized.QUOTA: "Your quota doesn't allow that: {choose}.",
    NotResized.PROMISED: "Another user waits for what is free on this GPU. Choose less, or try again later.",
}


def _free_words(world: Snapshot, session: Session) -> str:
    left = available_to(world, session)
    if left is None or session.placement is None:
        return "Nothing is"
    share = session.placement.shares[0]
    if session.request.gpu_memory_mib is None:
        free = max(0, left.fgpu_milli - share.fgpu_milli)
        return f"{format_milli(free)} fGPU {'is' if free == 1000 else 'are'}"
    memory = memory_words(max(0, left.memory_mib - share.memory_mib))
    if session.request.compute_percent is None:
        return f"{memory} of GPU memory is"
    return f"{memory} of GPU memory and {max(0, left.compute_percent - share.compute_percent)} % are"


def _memory_mib(session: Session) -> int:
    return session.placement.shares[0].memory_mib if session.placement else 0


def in_use_words(session: Session, world: Snapshot, used_mib: int, *, step_milli: int) -> str:
    """Return why a session cannot be made smaller than what it uses, and what would work."""
    uses = f"the session uses {memory_words(used_mib)} of GPU memory"
    if session.request.gpu_memory_mib is None:
        found = amounts(world, session, step_milli, used_mib=used_mib)
        least = format_milli(found[0]) if found else ""
    else:
        least = memory_words(-(-used_mib // MEMORY_GRAIN_MIB) * MEMORY_GRAIN_MIB)
    choose = f"choose at least {least}, or free memory first" if least else "free memory first"
    return f"{uses[0].upper()}{uses[1:]}: {choose}."
