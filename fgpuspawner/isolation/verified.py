"""What the check inside a session said, the last of each node: written by the Hub, for the administrators' page."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from fgpu_scheduler import Session, SystemClock
from fgpuspawner.isolation.files import write_whole

log = logging.getLogger("fgpu.isolation")

WRITTEN = "verified.json"
MOST_PROBLEMS = 10
MOST_TEXT = 500
_noting = threading.Lock()
"""Launches are verified side by side, and what one writes has what the others have written."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check of one session said; without ``problems`` its limits were in force."""

    node_id: str
    session_id: int
    backend: str
    at_s: int
    problems: tuple[str, ...] = ()


_VERDICTS = TypeAdapter(tuple[Verdict, ...])


def note_verdict(data: Path, session: Session, backend: str, problems: Sequence[str]) -> None:
    """Keep this as the last verdict of its node. It is no reason for a launch to fail that it cannot be written."""
    if session.placement is None:
        return
    node_id, at_s = session.placement.node_id, SystemClock().now_s()
    said = tuple(problem[:MOST_TEXT] for problem in problems[:MOST_PROBLEMS])
    with _noting:
        found = {verdict.node_id: verdict for verdict in read_verdicts(data)}
        found[node_id] = Verdict(node_id, session.id, backend, at_s, said)
        try:
            write_whole(data / WRITTEN, _VERDICTS.dump_json(tuple(found.values()), indent=2), mode=0o644)
        except OSError as e:
            log.warning("What the check of session %d said cannot be written down: %s", session.id, e)


def read_verdicts(data: Path) -> tuple[Verdict, ...]:
    """Return the last verdict of each node; empty where none is known."""
    try:
        return _VERDICTS.validate_json((data / WRITTEN).read_bytes())
    except (OSError, ValueError):
        return ()
