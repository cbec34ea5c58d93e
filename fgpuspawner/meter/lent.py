"""Compute that sessions on a GPU lend each other, by the driver's figures. Pure.

libfgpu counts it too, but in a file of the session that the host cannot trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lent:
    """Percent of a GPU: what a session computed, what of it exceeded its share, what others used of its share."""

    received: float
    borrowed: float
    lent: float

    def __add__(self, other: Lent) -> Lent:
        return Lent(self.received + other.received, self.borrowed + other.borrowed, self.lent + other.lent)


def lent_on(
    shares: Mapping[int, int], lend: Mapping[int, int], computed: Mapping[int, float]
) -> dict[int, Lent]:
    """Return what each session that lends on a device received and gave, by the shares of all sessions there.

    ``lend`` has the lenders' shares, ``computed`` what each session computed. Borrowed compute is attributed to lenders
    and to free capacity in proportion to their idle parts.
    """
    had = {i: computed.get(i, 0.0) for i in lend}
    borrowed = {i: max(0.0, had[i] - share) for i, share in lend.items()}
    idle = {i: max(0.0, share - had[i]) for i, share in lend.items()}
    all_idle = sum(idle.values()) + max(0, 100 - sum(shares.values()))
    part = min(1.0, sum(borrowed.values()) / all_idle) if all_idle else 0.0
    return {i: Lent(had[i], borrowed[i], idle[i] * part) for i in lend}
