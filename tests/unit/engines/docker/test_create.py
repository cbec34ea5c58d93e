"""What a container is made with: nothing gets into the place of our mounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docker.types import Mount as DockerMount

from fgpuspawner.engines.docker.create import parse_environment, sealed_mounts, unnamed_volumes
from fgpuspawner.isolation.base import Mount

OURS = (
    Mount(Path("/data/limits/7/limits"), "/run/fgpu/limits"),
    Mount(Path("/shm/7/accounting"), "/run/fgpu/accounting", read_only=False),
    Mount(Path("/data/tools/fgpu-smi"), "/usr/local/bin/fgpu-smi"),
    Mount(Path("/data/limits/7/ld.so.preload"), "/etc/ld.so.preload"),
)
AS_API = [
    {"Type": "bind", "Source": "/data/limits/7/limits", "Target": "/run/fgpu/limits", "ReadOnly": True},
    {"Type": "bind", "Source": "/shm/7/accounting", "Target": "/run/fgpu/accounting", "ReadOnly": False},
    {"Type": "bind", "Source": "/data/tools/fgpu-smi", "Target": "/usr/local/bin/fgpu-smi", "ReadOnly": True},
    {
        "Type": "bind",
        "Source": "/data/limits/7/ld.so.preload",
        "Target": "/etc/ld.so.preload",
        "ReadOnly": True,
    },
]


def test_our_mounts_are_added_to_an_administrators() -> None:
    given = {
        "Binds": ["home-alice:/home/jovyan:rw", "/srv/data:/srv/data:ro"],
        "Mounts": [DockerMount(target="/scratch", source="/scratch", type="bind")],
        "Tmpfs": {"/tmp": "size=1g"},
        "Memory": 5,
    }
    found, displaced = sealed_mounts(given, OURS)
    assert displaced == []
    assert found["Binds"] == given["Binds"]
    assert found["Tmpfs"] == given["Tmpfs"]
    assert found["Mounts"] == [*given["Mounts"], *AS_API]
    assert found["Memory"] == 5


@pytest.mark.parametrize(
    "given",
    [
        {"Binds": ["/evil:/run/fgpu/limits:rw"]},
        {"Binds": ["/evil:/run/fgpu//limits/:rw"]},
        {"Binds": ["/evil:/run/x/../fgpu/limits"]},
        {"Binds": ["evil:/etc/ld.so.preload:ro,z"]},
        {"Mounts": [DockerMount(target="/etc/ld.so.preload", source="/evil", type="bind")]},
        {"Mounts": [{"Target": "/run/fgpu/accounting/", "Source": "/evil", "Type": "bind"}]},
        {"Mounts": [{"Target": "/usr/local/bin/fgpu-smi", "Type": "tmpfs"}]},
        {"Tmpfs": {"/run/fgpu/limits/deeper": ""}},
    ],
)
def test_conflicting_mounts_are_left_out_and_named(given: dict[str, Any]) -> None:
    found, displaced = sealed_mounts(given, OURS)
    assert len(displaced) == 1
    assert found["Mounts"] == AS_API
    assert found["Binds"] == []
    assert not found.get("Tmpfs")


@pytest.mark.parametrize("target", ["/run/fgpu", "/run", "/etc", "/usr/local/bin", "/run/fgpu/limits2", "/"])
def test_mount_above_ours_stays(target: str) -> None:
    bind = f"/srv/x:{target}:rw"
    found, displaced = sealed_mounts({"Binds": [bind]}, OURS)
    assert (found["Binds"], displaced) == ([bind], [])


def test_our_folder_in_memory_replaces_another_mount() -> None:
    given = {
        "Tmpfs": {"/run/fgpu/written": "size=900g", "/tmp": ""},
        "Binds": ["/evil:/run/fgpu/written/log"],
    }
    found, displaced = sealed_mounts(given, OURS, {"/run/fgpu/written": "size=4m"})
    assert found["Tmpfs"] == {"/tmp": "", "/run/fgpu/written": "size=4m"}
    assert found["Binds"] == []
    assert sorted(displaced) == ["/run/fgpu/written", "/run/fgpu/written/log"]


def test_given_configuration_is_not_modified() -> None:
    given: dict[str, Any] = {"Binds": ["/evil:/run/fgpu/limits:rw"], "Mounts": []}
    sealed_mounts(given, OURS)
    assert given == {"Binds": ["/evil:/run/fgpu/limits:rw"], "Mounts": []}


def test_an_environment_may_be_a_list_as_the_engine_has_it() -> None:
    assert parse_environment(["A=1", "B=", "C", "D=x=y"]) == {"A": "1", "B": "", "C": None, "D": "x=y"}
    assert parse_environment(None) == {}
    assert parse_environment({"A": "1"}) == {"A": "1"}


def test_an_image_gets_the_volumes_that_it_asks_for_where_nothing_else_is_mounted() -> None:
    config = {"Volumes": {"/srv/a": {}, "/home/jovyan/": {}}}
    assert unnamed_volumes(config, ["/home/jovyan"], "abc") == [
        {"Type": "volume", "Target": "/srv/a", "VolumeOptions": {"Labels": {"fgpu.unnamed": "abc"}}}
    ]
    assert unnamed_volumes({"Volumes": None}, [], "abc") == []
