"""One Hub for an installation on a machine, and the note in the data folder that says which."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from fgpu_scheduler import BadSettings
from fgpuspawner.hub.hub_lock import NOTE, HubLock


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
