"""Refuses a new address of the Hub while sessions run that know it by the old one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from fgpu_scheduler import BadSettings, Session, SessionState

FILE = "hub-urls.json"


def check_not_moved(data: Path, urls: Sequence[str], sessions: Iterable[Session]) -> None:
    """Store the ``urls`` at which sessions reach the Hub and its service.

    Raises:
        BadSettings: running sessions know others. Their log-ins and their pages' requests would fail.
        OSError: they cannot be stored.
    """
    file, wanted = data / FILE, list(urls)
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = None
    if known == wanted:
        return
    running = sum(session.state is SessionState.RUNNING for session in sessions)
    if isinstance(known, list) and running:
        before, after = next(((a, b) for a, b in zip(known, wanted, strict=False) if a != b), (known, wanted))
        raise BadSettings(
            f"c.FGPU.hub_address, c.JupyterHub.hub_ip or a port: {running} running sessions reach this Hub at {before}, "
            f"and it would be at {after}; set it back and let them end first (a drain), or remove {file} to cut them off"
        )
    file.write_text(json.dumps(wanted))
