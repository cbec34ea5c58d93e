"""``fgpu node``: what becomes of a node, and who is named for it."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from commandline import Fgpu, filled, node, write_config
from fgpu_scheduler import Audit, Store


def test_cordon_is_in_the_audit_log_with_the_system_user(fgpu: Fgpu, tmp_path: Path) -> None:
    path, url = write_config(tmp_path), f"sqlite:///{tmp_path}/data/fgpu.sqlite"
    (tmp_path / "data").mkdir()
    filled(url, node())
    assert fgpu("node", "local", "cordon", "--config", path)[1] == "node local: takes no new sessions\n"
    status, _, said = fgpu("node", "local", "cordon", "--config", path)
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


def test_unknown_action_is_refused_with_the_choices(fgpu: Fgpu) -> None:
    status, _, said = fgpu("node", "local", "drain")
    assert (status, "NodeAction" in said) == (2, False)
    assert "is not one of 'cordon', 'gone', 'uncordon'; see fgpu node --help" in said


def test_gpu_is_cordoned_with_a_reason(fgpu: Fgpu, tmp_path: Path) -> None:
    path, url = write_config(tmp_path), f"sqlite:///{tmp_path}/data/fgpu.sqlite"
    (tmp_path / "data").mkdir()
    filled(url, node())
    asked = ("node", "local", "cordon", "--gpu", "0", "--config", path)
    said = fgpu(*asked, "--reason", "the fan is\nbroken")[1]
    assert said == "GPU 0 of node local: takes no new sessions\n"
    assert fgpu(*asked)[2] == "fgpu: GPU 0 of node 'local' is cordoned already\n"
    (line,) = [one for one in fgpu("status", "--config", path)[1].splitlines() if "CORDONED" in one]
    assert line.endswith(" CORDONED: the fan is broken")
    uncordon = ("node", "local", "uncordon", "--gpu", "GPU-local-0", "--config", path)
    assert fgpu(*uncordon)[1] == "GPU GPU-local-0 of node local: takes sessions again\n"
    assert "CORDONED" not in fgpu("status", "--config", path)[1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("cordon", "--gpu", "7"), "node 'local' has no GPU '7'; its GPUs are 0"),
        (("gone", "--gpu", "0"), "GPU 0 of node 'local': use cordon or uncordon; gone is for a node"),
        (("uncordon", "--gpu", "0"), "GPU 0 of node 'local' is not cordoned already"),
        (("cordon", "--gpu", "0", "--reason", "x" * 201), "reason: at most 200 characters"),
        (("cordon", "--reason", "x"), "--reason: only with --gpu"),
    ],
)
def test_wrong_action_on_a_gpu_is_refused(
    fgpu: Fgpu, tmp_path: Path, asked: tuple[str, ...], said: str
) -> None:
    path, url = write_config(tmp_path), f"sqlite:///{tmp_path}/data/fgpu.sqlite"
    (tmp_path / "data").mkdir()
    filled(url, node())
    status, _, err = fgpu("node", "local", *asked, "--config", path)
    assert (status, err) == (1, f"fgpu: {said}\n")
