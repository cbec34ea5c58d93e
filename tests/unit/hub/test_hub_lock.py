"""One Hub serves an installation on a machine, and it keeps its address while sessions run."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from fgpu_scheduler import BadSettings, Request, Session, SessionState
from fgpuspawner.hub.hub_lock import NOTE, URLS, HubLock, check_not_moved


def test_empty_note_after_a_full_disk_does_not_refuse_the_start(tmp_path: Path) -> None:
    (tmp_path / "limits/1").mkdir(parents=True)
    (tmp_path / NOTE).touch()
    only = HubLock(SimpleNamespace(init_db=None))
    only._data = tmp_path
    only.serve(f"test-{os.getpid()}")
    assert (tmp_path / NOTE).read_text() == f"test-{os.getpid()}"
    only._name.close()


def test_name_taken_by_another_account_does_not_refuse_the_start(
    tmp_path: Path,
) -> None:
    if os.geteuid():
        pytest.skip("only root has another account's name taken")
    installation = f"test-{os.getpid()}-taken"
    with socket.socket(socket.AF_UNIX) as other:
        os.seteuid(65534)
        try:
            other.bind(f"\0fgpu-hub-{installation}")
            other.listen()
        finally:
            os.seteuid(0)
        only = HubLock(SimpleNamespace(init_db=None))
        only._data = tmp_path
        only.serve(installation)
        only._name.close()


def test_another_hub_of_this_account_is_refused(tmp_path: Path) -> None:
    hubs = [HubLock(SimpleNamespace(init_db=None)) for _ in range(2)]
    for number, hub in enumerate(hubs):
        hub._data = tmp_path / str(number)
        hub._data.mkdir()
    hubs[0].serve(f"test-{os.getpid()}-twice")
    with pytest.raises(BadSettings, match="another Hub on this machine serves installation"):
        hubs[1].serve(f"test-{os.getpid()}-twice")
    for hub in hubs:
        hub._name.close()


OLD = ["http://172.20.0.1:8081/hub/api", "http://172.20.0.1:10880/services/fgpu/"]
NEW = ["http://10.0.0.1:8081/hub/api", "http://172.20.0.1:10880/services/fgpu/"]
ASKED = Request("alice", "", "python", "default", 500, 100, 256)
RUNNING, PENDING = (Session(1, ASKED, state, 0) for state in (SessionState.RUNNING, SessionState.PENDING))


def test_hub_moves_only_while_no_session_runs(tmp_path: Path) -> None:
    check_not_moved(tmp_path, OLD, [])
    with pytest.raises(BadSettings) as found:
        check_not_moved(tmp_path, NEW, [RUNNING, RUNNING, PENDING])
    assert str(found.value) == (
        "c.FGPU.hub_address, c.JupyterHub.hub_ip or a port: 2 running sessions reach this Hub at "
        "http://172.20.0.1:8081/hub/api, and it would be at http://10.0.0.1:8081/hub/api; set it back and let them end "
        f"first (a drain), or remove {tmp_path / URLS.name} to cut them off"
    )
    # Every start checks again, until the address is set back or the sessions have ended.
    with pytest.raises(BadSettings):
        check_not_moved(tmp_path, NEW, [RUNNING])
    check_not_moved(tmp_path, OLD, [RUNNING])
    check_not_moved(tmp_path, NEW, [PENDING])
    check_not_moved(tmp_path, NEW, [RUNNING])


@pytest.mark.parametrize("damaged", [None, "", "{", "7"], ids=["removed", "empty", "cut", "a number"])
def test_missing_or_damaged_address_file_does_not_refuse_the_start(
    tmp_path: Path, damaged: str | None
) -> None:
    check_not_moved(tmp_path, OLD, [])
    path = tmp_path / URLS.name
    path.unlink() if damaged is None else path.write_text(damaged)
    check_not_moved(tmp_path, NEW, [RUNNING])
    check_not_moved(tmp_path, NEW, [RUNNING])
