"""Shared folders: who is offered which, and settings that would do harm or not work are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from fgpu_scheduler import BadSettings
from fgpuspawner.settings import FGPU

DATA = {"path": "/srv/data", "at": "data/sets", "text": "ImageNet"}


def settings(folders: dict[Any, Any], **more: Any) -> FGPU:
    config = Config()
    config.FGPU.data_dir = "/var/lib/fgpu"
    config.FGPU.folders = folders
    for name, value in more.items():
        setattr(config.FGPU, name, value)
    return FGPU.from_config(config).checked()


@pytest.mark.parametrize(
    ("folders", "line"),
    [
        ({"Big Data": DATA}, "['Big Data'] is not a name; use 1 to 40 of a-z, 0-9 and '-', not '-' first"),
        ({"data": "/srv/data"}, "['data'] is '/srv/data'; use a dict such as {'path': '/srv/data'}"),
        ({"data": {**DATA, "ro": 1}}, "['data'] has an unknown key 'ro'; known are path, mode, at, text"),
        ({"data": {**DATA, "claim": "c"}}, "['data'] has an unknown key 'claim'; known are path, mode"),
        ({"data": {}}, "['data']: path is None; use an absolute path without '..', such as '/srv/data'"),
        ({"data": {"path": "srv"}}, "['data']: path is 'srv'; use an absolute path"),
        ({"data": {"path": "/srv/../etc"}}, "['data']: path is '/srv/../etc'; use an absolute path"),
        ({"data": {"path": "//etc"}}, "['data']: path is '//etc'; use an absolute path"),
        (
            {"data": {"path": "/"}},
            "['data']: path '/' has files of the machine or the Hub, /proc; use another",
        ),
        (
            {"data": {"path": "/run/docker"}},
            "path '/run/docker' has files of the machine or the Hub, /run; use",
        ),
        (
            {"data": {"path": "/var/lib"}},
            "path '/var/lib' has files of the machine or the Hub, /var/lib/docker",
        ),
        (
            {"data": {"path": "/var/lib/fgpu/home"}},
            "has files of the machine or the Hub, /var/lib/fgpu; use another",
        ),
        ({"data": {**DATA, "at": "/run/fgpu"}}, "at is '/run/fgpu'; use a path in the home, such as"),
        ({"data": {**DATA, "at": ""}}, "['data']: at is ''; use a path in the home, such as 'data/data'"),
        ({"data": {**DATA, "at": "."}}, "at is '.'; use a path in the home"),
        ({"data": {**DATA, "at": "a/../../b"}}, "at is 'a/../../b'; use a path in the home"),
        ({"data": {**DATA, "at": ".ssh"}}, "at is '.ssh'; use a path in the home"),
        ({"data": {**DATA, "at": "x" * 101}}, "use a path in the home"),
        ({"data": {**DATA, "mode": "rw"}}, "mode is 'rw'; use 'read-only' or 'read-write'"),
        ({"data": {**DATA, "always": "yes"}}, "always is 'yes'; use True or False"),
        ({"data": {**DATA, "text": "two\nlines"}}, r"text is 'two\nlines'; use a line of at most 200"),
        ({"data": {**DATA, "hub_groups": []}}, "hub_groups is []; use a list of one name or more, or"),
        ({"data": {**DATA, "users": "ann"}}, "users is 'ann'; use a list of one name or more"),
        (
            {"data": DATA, "more": {**DATA, "at": "data/sets/more"}},
            "['more']: at 'data/sets/more' is at or in the place of 'data', 'data/sets'; use another",
        ),
        (
            {"all": {"path": "/srv", "mode": "read-write"}, "data": DATA},
            "['data']: path '/srv/data' is in that of 'all', where users may write; use another",
        ),
        ({"data": DATA, "same": DATA}, "['data']: at 'data/sets' is at or in the place of 'same'"),
    ],
)
def test_wrong_folder_stops_the_hub_with_one_line(folders: dict[Any, Any], line: str) -> None:
    with pytest.raises(BadSettings) as refused:
        settings(folders)
    assert str(refused.value).startswith("c.FGPU.folders[")
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ({"path": "/srv"}, "has an unknown key 'path'; known are claim, subpath, mode"),
        ({"claim": "A_b"}, "claim is 'A_b'; use the name of a PersistentVolumeClaim"),
        ({"claim": "a", "subpath": "../x"}, "subpath is '../x'; use a relative path without '..'"),
    ],
)
def test_folder_of_a_cluster_is_a_claim(folder: dict[str, str], line: str) -> None:
    with pytest.raises(BadSettings, match=line):
        settings({"data": folder}, finds_nodes=True)
    assert settings({"data": {"claim": "sets", "subpath": "a/b"}}, finds_nodes=True).folders_for("ann", ())


@pytest.mark.parametrize("above", [{}, {"subpath": "team"}])
def test_folder_of_a_claim_is_in_no_other_that_users_write(above: dict[str, str]) -> None:
    open_one = {"claim": "sets", "mode": "read-write", **above}
    line = "subpath 'team/b' is in that of 'all', where users may write; use another"
    with pytest.raises(BadSettings, match=line):
        settings({"all": open_one, "part": {"claim": "sets", "subpath": "team/b"}}, finds_nodes=True)
    beside = {"claim": "other", "subpath": "team/b"}
    assert settings({"all": open_one, "part": beside}, finds_nodes=True).folders_for("ann", ())


def test_folder_is_offered_by_user_and_group_and_chosen_ones_only_with_those_of_all_sessions() -> None:
    own = settings(
        {
            "data": {**DATA, "always": True},
            "vision": {
                "path": "/srv/vision",
                "mode": "read-write",
                "hub_groups": ["vision"],
                "users": ["eve"],
            },
            "free": {"path": "/srv/free"},
        }
    )
    assert [f.name for f in own.folders_for("ann", ("vision", "x"))] == ["data", "vision", "free"]
    assert [f.name for f in own.folders_for("eve", ())] == ["data", "vision", "free"]
    assert [f.name for f in own.folders_for("bob", ("x",))] == ["data", "free"]
    assert [f.name for f in own.folders_of("ann", ("vision",), ("vision",))] == ["data", "vision"]
    assert [f.name for f in own.folders_of("bob", (), ("vision",))] == ["data"]
    data, vision, free = own.folders_for("eve", ())
    assert (data.at, data.read_only, vision.at, vision.read_only, free.read_only) == (
        *("data/sets", True, "vision", False, True),
    )


def test_one_path_is_read_only_for_some_and_written_by_others() -> None:
    path = {"path": "/srv/data"}
    writers = {**path, "mode": "read-write", "hub_groups": ["staff"], "at": "edit"}
    both = settings({"data": path, "edit": writers, "part": {"path": "/srv/other"}})
    assert [f.name for f in both.folders_for("ann", ("staff",))] == ["data", "edit", "part"]


def test_folder_missing_on_this_machine_stops_the_hub_unless_it_is_hidden_here(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "hidden").mkdir()
    there = {"path": str(tmp_path / "there")}
    settings({"data": there}).check_folders_here(one_user=False)
    gone = settings({"data": {"path": str(tmp_path / "gone")}})
    with pytest.raises(
        BadSettings, match=r"\['data'\]: path '.*/gone' is no folder on this machine; make it"
    ):
        gone.check_folders_here(one_user=False)
    # As units show /home: an empty folder.
    settings({"data": {"path": str(tmp_path / "hidden/x")}}).check_folders_here(one_user=False)
    away = [{"name": "annex", "engine": "ssh://root@10.0.0.2"}]
    elsewhere = {"nodes": away, "hub_address": "10.0.0.1"}
    settings({"data": {"path": str(tmp_path / "gone")}}, **elsewhere).check_folders_here(one_user=False)


def test_local_sessions_are_promised_no_read_only_folder_that_they_could_write(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=r"can be written by local sessions.*or use mode 'read-write'"):
        settings({"data": {"path": str(tmp_path)}}).check_folders_here(one_user=True)
    settings({"data": {"path": str(tmp_path), "mode": "read-write"}}).check_folders_here(one_user=True)


def test_preset_with_an_unknown_folder_stops_the_hub() -> None:
    preset = {"name": "Vision", "folders": ["data", "gone"]}
    with pytest.raises(
        BadSettings, match=r"presets: 'Vision': folders: there is no 'gone'; choose one of data"
    ):
        settings({"data": DATA}, presets=[preset])
