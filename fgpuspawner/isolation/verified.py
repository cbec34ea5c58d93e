"""The last verdict of the check inside a session, by node: written by the Hub, for the administrators' page."""

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
"""Held while the file is read and rewritten: launches are verified concurrently."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the check of one session; without ``problems`` its limits were in force."""

    node_id: str
    session_id: int
    backend: str
    at_s: int
    problems: tuple[str, ...] = ()


_VERDICTS = TypeAdapter(tuple[Verdict, ...])


def note_verdict(data: Path, session: Session, backend: str, problems: Sequence[str]) -> None:
    """Store this as the last verdict of its node. A failed write is logged and fails no launch."""
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
    """Return the last verdict of each node; empty if unknown."""
    try:
        return _VERDICTS.validate_json((data / WRITTEN).read_bytes())
    except (OSError, ValueError):
        return ()
