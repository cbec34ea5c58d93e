"""A Hub is not moved away from sessions that run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fgpu_scheduler import BadSettings, Request, Session, SessionState
from fgpuspawner.hub.hub_lock import URLS, check_not_moved

OLD = ["http://172.20.0.1:8081/hub/api", "http://172.20.0.1:10880/services/fgpu/"]
NEW = ["http://10.0.0.1:8081/hub/api", "http://172.20.0.1:10880/services/fgpu/"]


def session(state: SessionState) -> Session:
    return Session(1, Request("alice", "", "python", "default", 500, 100, 256), state, 0)


RUNNING, WAITING = session(SessionState.RUNNING), session(SessionState.PENDING)


def test_hub_may_move_while_no_session_runs(
    tmp_path: Path,
) -> None:
    check_not_moved(tmp_path, OLD, [])
    check_not_moved(tmp_path, NEW, [WAITING])
    check_not_moved(tmp_path, NEW, [RUNNING])
    with pytest.raises(BadSettings):
        check_not_moved(tmp_path, OLD, [RUNNING])


def test_move_away_from_running_sessions_is_refused(
    tmp_path: Path,
) -> None:
    check_not_moved(tmp_path, OLD, [])
    with pytest.raises(BadSettings) as found:
        check_not_moved(tmp_path, NEW, [RUNNING, RUNNING, WAITING])
    assert str(found.value) == (
        "c.FGPU.hub_address, c.JupyterHub.hub_ip or a port: 2 running sessions reach this Hub at "
        "http://172.20.0.1:8081/hub/api, and it would be at http://10.0.0.1:8081/hub/api; set it back and let them end "
        f"first (a drain), or remove {tmp_path / URLS} to cut them off"
    )
    # It is asked again at each start, until one of the two is done.
    with pytest.raises(BadSettings):
        check_not_moved(tmp_path, NEW, [RUNNING])
    check_not_moved(tmp_path, OLD, [RUNNING])
    (tmp_path / URLS).unlink()
    check_not_moved(tmp_path, NEW, [RUNNING])


@pytest.mark.parametrize("damaged", ["", "{", "7"], ids=["empty", "cut", "a number"])
def test_damaged_address_file_does_not_refuse_the_start(tmp_path: Path, damaged: str) -> None:
    (tmp_path / URLS).write_text(damaged)
    check_not_moved(tmp_path, NEW, [RUNNING])
    check_not_moved(tmp_path, NEW, [RUNNING])
