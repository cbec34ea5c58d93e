"""Links to shared folders in the home are made as the user, and never in place of the user's files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from jupyterlab_fgpu.folders import VARIABLE, link_folders

LOG = logging.getLogger("test")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "big").write_text("x")
    monkeypatch.setenv(VARIABLE, json.dumps({"data/sets": str(folder)}))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_folder_is_at_its_place_after_each_start(shared: Path, home: Path) -> None:
    for _ in range(2):
        link_folders(home, LOG)
        assert (home / "data/sets/big").read_text() == "x"
    (home / "data/sets").unlink()
    (home / "data/sets").symlink_to("/nowhere/of/before")
    link_folders(home, LOG)
    assert (home / "data/sets/big").read_text() == "x"


def test_users_own_files_stay_and_the_log_says_where_the_folder_is(
    shared: Path, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "data/sets").mkdir(parents=True)
    (home / "data/sets/mine").write_text("mine")
    link_folders(home, LOG)
    assert (home / "data/sets/mine").read_text() == "mine"
    assert f"the shared folder {shared} is not at {home}/data/sets: something else is there" in caplog.text
    caplog.clear()
    (home / "data/sets/mine").unlink()
    (home / "data/sets").rmdir()
    (home / "data").rmdir()
    (home / "data").write_text("a file")
    link_folders(home, LOG)
    assert (home / "data").read_text() == "a file"
    assert f"is not at {home}/data/sets" in caplog.text


def test_users_link_above_the_place_leads_where_the_user_may_write_anyway(
    shared: Path, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (home / "data").symlink_to(tmp_path / "other")
    link_folders(home, LOG)
    assert (tmp_path / "other/sets/big").read_text() == "x"


def test_missing_folder_and_no_variable_do_no_harm(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps({"data": "/nowhere"}))
    link_folders(home, LOG)
    assert "the shared folder /nowhere is not at" in caplog.text
    monkeypatch.delenv(VARIABLE)
    link_folders(home, LOG)
