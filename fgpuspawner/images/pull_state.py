"""The progress of pulls that sessions wait for. The Hub writes it to a small file in ``data_dir`` for the service.

It is not in the database: it changes every second, and is worthless once the Hub has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fgpu_scheduler import MIB
from fgpuspawner.isolation.files import HubFile

STALE_AFTER_S = 10
"""It is written every second while there is something to tell: one that is older was left by a Hub that has ended."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is. ``bytes_total`` and ``seconds_left`` are None where they are not known."""

    layers_done: int = 0
    layers: int = 0
    bytes_done: int = 0
    bytes_total: int | None = None
    seconds_left: int | None = None
    unpacks: bool = False
    """All is here, and not all of it is unpacked."""
    broke_off: bool = False
    """The registry broke off, and the engine is about to ask it again by itself."""

    def words(self) -> str:
        """Return it as "3 of 7 layers, 45 of 200 MiB, about 12 s left"; empty where nothing is known yet."""
        parts = []
        if self.layers:
            parts.append(f"{self.layers_done} of {self.layers} layers")
        if self.bytes_total:
            whole = -(-self.bytes_total // MIB)
            done = whole if self.bytes_done >= self.bytes_total else self.bytes_done // MIB
            parts.append(f"{done} of {whole} MiB")
        elif self.bytes_done:
            parts.append(f"{self.bytes_done // MIB} MiB so far")
        if self.seconds_left is not None:
            left = self.seconds_left
            parts.append(f"about {left} s left" if left < 120 else f"about {-(-left // 60)} min left")
        return ", ".join(parts)


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
        last = {"attempt": self.attempt, "trouble": self.trouble}
        return {"phase": self.phase.value, "text": self.words(), **own, **last}


@dataclass(frozen=True, slots=True)
class Told:
    """What the Hub told last: when, and how far which session's pull is."""

    written_at_s: int = 0
    sessions: Mapping[int, PullState] = field(default_factory=dict)


TOLD = HubFile("pulls.json", Told, mode=0o644)


def write_pulls(data: Path, pulls: Mapping[int, PullState], *, now_s: float) -> None:
    """Write what is told of pulls, by session."""
    TOLD.write(data, Told(int(now_s), pulls))


def read_pulls(data: Path, *, now_s: float) -> Mapping[int, PullState]:
    """Return the progress of pulls, by session; empty if the file is missing, unreadable or too old."""
    found = TOLD.read(data)
    return {} if abs(now_s - found.written_at_s) > STALE_AFTER_S else found.sessions
