"""What sessions lend each other of a GPU's compute, from what the driver says that each computed. Pure.

libfgpu counts it too, in a file of the session's own, which the host can neither reach nor believe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lent:
    """In percent of a GPU: what a session computed, what of that was above its share, what others had of its share."""

    received: float
    borrowed: float
    lent: float

    def __add__(self, other: Lent) -> Lent:
        return Lent(self.received + other.received, self.borrowed + other.borrowed, self.lent + other.lent)


def lent_on(
    shares: Mapping[int, int], lend: Mapping[int, int], computed: Mapping[int, float]
) -> dict[int, Lent]:
    """Return what each of those that ``lend`` on a device had and gave, by the shares of all sessions there.

    ``lend`` has their shares, ``computed`` what each computed. What was borrowed came from those who lend and from what
    nobody has, in proportion to how much of it was idle.
    """
    had = {i: computed.get(i, 0.0) for i in lend}
    borrowed = {i: max(0.0, had[i] - share) for i, share in lend.items()}
    idle = {i: max(0.0, share - had[i]) for i, share in lend.items()}
    all_idle = sum(idle.values()) + max(0, 100 - sum(shares.values()))
    part = min(1.0, sum(borrowed.values()) / all_idle) if all_idle else 0.0
    return {i: Lent(had[i], borrowed[i], idle[i] * part) for i in lend}
