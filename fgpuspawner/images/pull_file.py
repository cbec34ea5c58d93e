"""What the Hub tells the service of the pulls that sessions wait for: a small file in ``data_dir``.

It is no business of the database: it changes every second, and means nothing any more once the Hub has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fgpuspawner.images.meter import Progress
from fgpuspawner.isolation.files import write_whole

WRITTEN = "pulls.json"
STALE_AFTER_S = 10
"""It is written every second while there is something to tell: one that is older was left by a Hub that has ended."""


class Phase(StrEnum):
    """What becomes of a pull."""

    WAITING = "WAITING"
    FETCHING = "FETCHING"
    UNPACKING = "UNPACKING"
    COPYING = "COPYING"
    AGAIN = "AGAIN"
    FAILED = "FAILED"


BEGINNINGS = {
    Phase.WAITING: "the image waits until others have been fetched",
    Phase.FETCHING: "fetching the image",
    Phase.UNPACKING: "unpacking the image",
    Phase.COPYING: "copying the image from another machine",
    Phase.AGAIN: "the image could not be fetched yet, trying again",
    Phase.FAILED: "the image could not be fetched yet, and is tried again when the session starts",
}


@dataclass(frozen=True, slots=True)
class PullState:
    """How far the pull is that a session waits for. ``trouble`` is the last failure's reason, in words."""

    phase: Phase
    progress: Progress = field(default_factory=Progress)
    attempt: int = 1
    trouble: str | None = None

    def words(self) -> str:
        """Return it for the owner of the session: "fetching the image: 3 of 7 layers, 45 of 200 MiB"."""
        far = "" if self.phase in (Phase.AGAIN, Phase.FAILED) else self.progress.words()
        return self.step() + (f": {far}" if far else "")

    def step(self) -> str:
        """Return the same without how far it is, which changes every second: "fetching the image"."""
        tries = f" (try {self.attempt})" if self.attempt > 1 and self.phase is Phase.FETCHING else ""
        why = self.trouble if self.phase in (Phase.AGAIN, Phase.FAILED) else None
        return BEGINNINGS[self.phase] + tries + (f": {why}" if why else "")

    def as_json(self) -> dict[str, Any]:
        """Return the API's ``pull``."""
        own = asdict(self.progress)
        del own["unpacks"], own["broke_off"]
        return {
            "phase": self.phase.value,
            "text": self.words(),
            **own,
            "attempt": self.attempt,
            "trouble": self.trouble,
        }


def write_pulls(data: Path, pulls: Mapping[int, PullState], *, now_s: float) -> None:
    """Write what is told of pulls, by session."""
    found = {str(session_id): asdict(state) for session_id, state in pulls.items()}
    write_whole(
        data / WRITTEN, json.dumps({"written_at_s": int(now_s), "sessions": found}).encode(), mode=0o644
    )


def read_pulls(data: Path, *, now_s: float) -> Mapping[int, PullState]:
    """Return what is told of pulls, by session; empty where there is nothing, or nobody tells any more."""
    try:
        found = json.loads((data / WRITTEN).read_text())
        if abs(now_s - found["written_at_s"]) > STALE_AFTER_S:
            return {}
        return dict(_states(found["sessions"].items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _states(written: Iterable[tuple[str, Any]]) -> Iterable[tuple[int, PullState]]:
    for session_id, own in written:
        progress = Progress(**own["progress"])
        yield (
            int(session_id),
            PullState(Phase(own["phase"]), progress, int(own["attempt"]), own["trouble"]),
        )
