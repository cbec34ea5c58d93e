"""Where a request goes, asked of `place` and of a placer."""

from __future__ import annotations

from simulator import World

from fgpu_scheduler.core.model import Request
from fgpu_scheduler.core.placement import Score, best_fit, free, place
from fgpu_scheduler.core.placer import Placer


def goes_to(lab: World, asked: Request, score: Score = best_fit) -> list[str] | None:
    """Return the devices that a new request gets now, or None."""
    found = place(asked, free(lab), score=score)
    own = Placer(free(lab), score=score)
    assert own.place(asked) == (found[0] if found else None)
    assert own.left == (found[1] if found else free(lab))
    return None if found is None else [share.device_uuid for share in found[0].shares]
