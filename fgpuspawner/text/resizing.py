"""Texts about resizing a session, and which amounts are possible. Pure."""

from __future__ import annotations

from typing import assert_never

from fgpu_scheduler import (
    MEMORY_GRAIN_MIB,
    Amount,
    NotResized,
    Session,
    Share,
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
    found = [a for a in candidates if _holds(resized(world, session, Amount(a)), used_mib)]
    return tuple(found)


def _holds(found: Session | NotResized, used_mib: int) -> bool:
    if isinstance(found, NotResized) or found.placement is None:
        return False
    return found.placement.shares[0].memory_mib >= used_mib


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
    choose = f"choose at most {most}" if most else "end something, or ask again later"
    match why:
        case NotResized.NOT_RUNNING:
            return "Only a running session can be resized."
        case NotResized.NO_GPU:
            return "This session has no GPU. Start a new one to get one."
        case NotResized.SEVERAL_GPUS:
            return "This session has several whole GPUs, which stay as they are. Start a new one for another number."
        case NotResized.WHOLE_GPU:
            return "This session has a whole GPU, which can't be made smaller while it runs. Start a new one."
        case NotResized.GPU_GONE:
            return "This session's GPU was removed from the configuration, so its amount stays."
        case NotResized.OTHER_KIND:
            return (
                f"This session was asked for as {amount_words(session.request)}: resize it in the same terms."
            )
        case NotResized.BOTH_WAYS:
            return "Make memory and compute both larger or both smaller; for one of each ask twice."
        case NotResized.IMPOSSIBLE:
            return f"This amount isn't possible on the session's GPU; {choose}."
        case NotResized.TOO_OFTEN:
            return "This session was resized too often. Start a new one."
        case NotResized.CORDONED:
            return (
                "The session's machine or GPU takes no new work now, so a session there can only get smaller."
            )
        case NotResized.NO_ROOM:
            return f"{_free_words(world, session)} free on this GPU: {choose}."
        case NotResized.QUOTA:
            return f"Your quota doesn't allow that: {choose}."
        case NotResized.PROMISED:
            return "Another user waits for what is free on this GPU. Choose less, or try again later."
        case _:
            assert_never(why)


def _free_words(world: Snapshot, session: Session) -> str:
    left, share = available_to(world, session), _share(session)
    if left is None or share is None:
        return "Nothing is"
    if session.request.gpu_memory_mib is None:
        free = max(0, left.fgpu_milli - share.fgpu_milli)
        return f"{format_milli(free)} fGPU {'is' if free == 1000 else 'are'}"
    memory = memory_words(max(0, left.memory_mib - share.memory_mib))
    if session.request.compute_percent is None:
        return f"{memory} of GPU memory is"
    return f"{memory} of GPU memory and {max(0, left.compute_percent - share.compute_percent)} % are"


def _share(session: Session) -> Share | None:
    return session.placement.shares[0] if session.placement and session.placement.shares else None


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
