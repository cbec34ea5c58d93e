"""The isolation backend of each node with its reason, and the last verdict of the check inside its sessions.

The Hub writes both into `data_dir`, for the service and the command line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fgpu_scheduler import BadSettings, Node, Session, SystemClock
from fgpuspawner.isolation.base import Backend
from fgpuspawner.isolation.files import HubFile

log = logging.getLogger("fgpu.isolation")

AUTO = "auto"
MOST_PROBLEMS = 10
MOST_TEXT = 500


@dataclass(frozen=True, slots=True)
class Choice:
    """A node's backend and the reason for it. ``loud``: logged as a warning."""

    node_id: str
    backend: Backend
    reason: str
    loud: bool = False


def choose(setting: str, node: Node, backends: Mapping[str, Backend]) -> Choice:
    """Return the backend of a node under ``c.FGPU.isolation = setting``.

    Raises:
        BadSettings: the chosen backend does not work here, or none does and "none" was not set. The message names what
            would work.
    """
    if setting != AUTO:
        chosen = backends[setting]
        trouble = chosen.available(node.devices)
        if trouble is not None and node.devices:
            raise BadSettings(
                f'c.FGPU.isolation is {setting!r}, which node {node.id!r} cannot have: {trouble}; "auto" takes '
                "the strongest that it can"
            )
        return Choice(node.id, chosen, f"{chosen.words} (set so)", loud=setting == "none")
    if not node.devices:
        return Choice(node.id, backends["none"], "it has no GPU")
    if all(d.simulated for d in node.devices):
        held, none = backends["interposer"], backends["none"]
        trouble = held.available(node.devices)
        if trouble is None:
            return Choice(node.id, held, f"{held.words}; its GPUs are simulated")
        return Choice(node.id, none, f"{none.words}, as {trouble}; its GPUs are simulated", loud=True)
    passed: list[str] = []
    for backend in (one for one in backends.values() if one.auto):
        trouble = backend.available(node.devices)
        if trouble is None:
            return Choice(node.id, backend, "; ".join([backend.words, *passed]))
        passed.append(f"not {backend.name}: {trouble}")
    # The last one needs the least of a machine.
    raise BadSettings(
        f"nothing isolates the sessions of node {node.id!r}: {trouble}; or set c.FGPU.isolation = 'none', knowing "
        "that nothing then holds a session to its slice"
    )


@dataclass(frozen=True, slots=True)
class StoredChoice:
    """A node's backend and reason as `write_choices` stored them. ``fixed`` says why a slice cannot change there, and
    ``unparkable`` why no session can be parked."""

    node_id: str
    backend: str
    reason: str
    fixed: str = ""
    unparkable: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the check of one session; without ``problems`` its limits were in force."""

    node_id: str
    session_id: int
    backend: str
    at_s: int
    problems: tuple[str, ...] = ()


CHOICES = HubFile("isolation.json", tuple[StoredChoice, ...], mode=0o644)
"""Each node's backend as of the Hub's last start; empty if unknown."""
VERDICTS = HubFile("verified.json", tuple[Verdict, ...], mode=0o644)
"""The last verdict of each node; empty if unknown."""
_noting = threading.Lock()
"""Held while the verdicts are read and rewritten: launches are verified concurrently."""


def write_choices(data: Path, choices: Iterable[Choice]) -> None:
    stored = (
        StoredChoice(c.node_id, c.backend.name, c.reason, c.backend.fixed, c.backend.unparkable)
        for c in choices
    )
    CHOICES.write(data, tuple(stored))


def note_verdict(data: Path, session: Session, backend: str, problems: Sequence[str]) -> None:
    """Store this as the last verdict of its node. A failed write is logged and fails no launch."""
    if session.placement is None:
        return
    node_id, at_s = session.placement.node_id, SystemClock().now_s()
    texts = tuple(problem[:MOST_TEXT] for problem in problems[:MOST_PROBLEMS])
    with _noting:
        found = {verdict.node_id: verdict for verdict in VERDICTS.read(data)}
        found[node_id] = Verdict(node_id, session.id, backend, at_s, texts)
        try:
            VERDICTS.write(data, tuple(found.values()))
        except OSError as e:
            log.warning("The verdict on session %d cannot be stored: %s", session.id, e)
