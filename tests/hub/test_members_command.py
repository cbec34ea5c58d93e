"""The command ``fgpu members``: JupyterHub's groups as a file, on a real Hub."""

from __future__ import annotations

import contextlib
import io
import json
import os
import unittest.mock
from pathlib import Path

from fgpuspawner.cli import main as cli
from hubprocess import HubProcess, running


def fgpu(hub: HubProcess, *words: str, status: int = 0, token: str = "") -> str:
    out, err = io.StringIO(), io.StringIO()
    own = {**os.environ, "FGPU_HUB_URL": hub.url, "JUPYTERHUB_API_TOKEN": token or hub.add_user("admin")}
    with (
        unittest.mock.patch.dict(os.environ, own, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        assert cli.main(words) == status, out.getvalue() + err.getvalue()
    return out.getvalue() if status == 0 else err.getvalue()


def test_members_of_groups_become_those_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    with running(folder) as hub:
        alices = hub.add_user("alice")
        for name in ("bob", "=1+1"):
            hub.add_user(name)
        file = tmp_path / "members.csv"
        file.write_text("hub_group,user\nclass,alice\nclass,bob\nclass,'=1+1\nempty,\n")
        words = ("members", "import", str(file))
        assert fgpu(hub, *words).splitlines()[-1] == "5 changes; --apply makes them"
        assert fgpu(hub, "members", "export") == "hub_group,user\n"
        assert fgpu(hub, *words, "--apply").splitlines()[-1] == "5 changes made"
        exported = fgpu(hub, "members", "export")
        assert exported == "hub_group,user\nclass,'=1+1\nclass,alice\nclass,bob\nempty,\n"

        file.write_text(exported)
        assert fgpu(hub, *words, "--apply") == "nothing to change: all of it is so already\n"
        file.write_text("user;hub_group\nalice;class\n")
        found = json.loads(fgpu(hub, *words, "--apply", "--json"))
        assert [(c["change"], c["user"]) for c in found["changes"]] == [("remove", "=1+1"), ("remove", "bob")]

        file.write_text("hub_group,user\nclass,alice\nclass,carla\n,bob\n")
        said = fgpu(hub, *words, "--apply", status=1)
        assert "line 4, column hub_group: it is empty" in said
        file.write_text("hub_group,user\nclass,carla\n")
        said = fgpu(hub, *words, "--apply", status=1)
        assert "line 2, column user: 'carla': JupyterHub knows no such user" in said
        assert fgpu(hub, "members", "export") == "hub_group,user\nclass,alice\nempty,\n"
        assert fgpu(hub, *words, "--apply", "--add-users").splitlines()[-1] == "3 changes made"
        assert fgpu(hub, "members", "export") == "hub_group,user\nclass,carla\nempty,\n"

        assert fgpu(hub, "members", "export", status=1, token=alices).startswith("fgpu: ")
