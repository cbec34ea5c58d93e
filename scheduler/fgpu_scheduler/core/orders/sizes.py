"""How much a request is, as far as an order has to know."""

from __future__ import annotations

from fgpu_scheduler.core.order import Line
from fgpu_scheduler.core.quota import least_milli

UNLIMITED_S = 4 * 3600
"""What a session without a time limit is taken to run where too few have ended to guess by."""
LEAST_GUESS_S = 900
"""Nobody is guessed to run for less: so little can be gained by many short sessions before a long one."""


def lengths_s(line: Line) -> list[float]:
    """Return how long each in the line is taken to run: its time limit, or a guess.

    The guess is the mean of those sessions that a forecast would go by: of the same user and image, if enough ended. It
    orders, and is no limit: nobody ends by it, and nothing is promised by it.
    """
    guesses: dict[tuple[str, str], float] = {}
    found: list[float] = []
    for session in line.waiting:
        asked = session.request
        if asked.time_limit_s is not None:
            found.append(asked.time_limit_s)
            continue
        who = asked.user, asked.image
        if who not in guesses:
            rest = line.snapshot.runs.lengths(line.resource_group).rest(*who, 0)
            mean_s = None if rest is None else rest.mean_s()
            guesses[who] = UNLIMITED_S if mean_s is None else max(LEAST_GUESS_S, mean_s)
        found.append(guesses[who])
    return found


def asked_milli(line: Line) -> list[int]:
    """Return the fGPU x 1000 that each in the line asks for; of GPU memory and compute the least they are worth."""
    found = [s.request.fgpu_milli for s in line.waiting]
    if 0 not in found:
        return found
    nodes = line.snapshot.nodes
    worth: dict[tuple[int | None, int | None, tuple[str, ...]], int] = {}
    for at, session in enumerate(line.waiting):
        asked = session.request
        if asked.gpu_memory_mib is not None:
            shape = asked.gpu_memory_mib, asked.compute_percent, asked.gpu_models
            if shape not in worth:
                worth[shape] = least_milli(asked, nodes)
            found[at] = worth[shape]
    return found
