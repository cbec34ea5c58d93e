"""``fgpu node``: what becomes of a node, and who is named for it."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from commandline import fgpu, filled, node, write_config
from fgpu_scheduler import Audit, Store


def test_a_node_is_cordoned_and_the_audit_log_says_by_which_system_user(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, url = write_config(tmp_path), f"sqlite:///{tmp_path}/data/fgpu.sqlite"
    (tmp_path / "data").mkdir()
    filled(url, node())
    assert (
        fgpu(capsys, "node", "local", "cordon", "--config", path)[1] == "node local: takes no more sessions\n"
    )
    status, _, said = fgpu(capsys, "node", "local", "cordon", "--config", path)
    assert (status, said) == (1, "fgpu: node 'local' is CORDONED; cordon is for a node that is READY\n")
    store = Store(url)
    store.open()
    try:
        lines = Audit(store).lines(limit=9)
    finally:
        store.close()
    assert [(line.actor, line.action, line.target) for line in lines] == [
        (f"{getpass.getuser()} (fgpu)", "node.cordon", "node local")
    ]
