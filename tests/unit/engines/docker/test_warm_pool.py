from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.docker.homes import Home
from fgpuspawner.engines.docker.warm_pool import WarmPool, busiest
from fgpuspawner.engines.docker.warm_shape import Shape, Unpoolable, files_of, shape_of

FOLDER = Path("/srv/data/limits/7")


def made(session: int = 7, user: str = "alice", **host: Any) -> dict[str, Any]:
    return {
        "name": f"fgpu-x-{session}-1",
        "image": "fgpuspawner/base:0.1",
        "command": ["fgpu-start", "--preload", "--within", "60"],
        "environment": {"FGPU_SESSION_ID": str(session), "LD_LIBRARY_PATH": "/run/fgpu/simulated"},
        "labels": {"fgpu.user": user, "lab.course": "ml"},
        "host_config": {
            "Binds": [f"home-{user}:/home/jovyan:rw", "/usr/share/dict:/srv/dict:ro"],
            "Memory": session << 20,
            "CpuQuota": session * 1000,
            "PidsLimit": session,
            "NetworkMode": f"fgpu-x-u-{user}",
            "Mounts": [
                {
                    "Type": "bind",
                    "Source": f"/srv/data/limits/{session}/limits",
                    "Target": "/run/fgpu/limits",
                },
                {"Type": "bind", "Source": f"/srv/data/limits/{session}", "Target": "/run/fgpu"},
                {
                    "Type": "bind",
                    "Source": f"/dev/shm/fgpu-x/lending/{session}",
                    "Target": "/run/fgpu/lending",
                },
                {
                    "Type": "bind",
                    "Source": f"/dev/shm/fgpu-x/lending/{session}/own-0",
                    "Target": "/run/fgpu/lending/own-0",
                },
            ],
            **host,
        },
    }


def words_of(session: int) -> Path:
    return Path("/dev/shm/fgpu-x/lending") / str(session)


def shaped(kwargs: dict[str, Any], session: int = 7) -> Shape:
    return shape_of(
        kwargs,
        image_id="sha256:1",
        slice_environment={"FGPU_SESSION_ID": str(session)},
        folders={"{folder}": FOLDER.with_name(str(session)), "{words}": words_of(session)},
    )[0]


def test_changeable_settings_do_not_change_the_shape() -> None:
    assert shaped(made(7, "alice")) == shaped(made(8, "bob"), 8)


@pytest.mark.parametrize(
    "other",
    [
        made(ReadonlyRootfs=True),
        made(CapDrop=["ALL"]),
        made(DeviceRequests=[{"Driver": "nvidia", "DeviceIDs": ["GPU-a"]}]),
        made(Devices=[{"PathOnHost": "/dev/nvidia0"}]),
        made(Binds=["/usr/share/dict:/srv/dict:ro"]),
        made(Binds=["home-alice:/home/other:rw", "/usr/share/dict:/srv/dict:ro"]),
        made(Binds=["home-alice:/home/jovyan:rw", "/usr/share/words:/srv/dict:ro"]),
        {**made(), "image": "another"},
        {**made(), "user": "1001"},
        {**made(), "labels": {"lab.course": "of alice"}},
        {**made(), "environment": {"LD_LIBRARY_PATH": "/opt/cuda"}},
        {**made(), "hostname": "alice"},
    ],
)
def test_other_settings_change_the_shape(other: dict[str, Any]) -> None:
    assert shaped(other) != shaped(made())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({**made(), "networking_config": {"x": {}}}, "network"),
        ({**made(), "healthcheck": {1, 2}}, "no JSON"),
        (made(Binds=["home:/home/jovyan:rw", "/srv/dict:/home/jovyan/dict:ro"]), "within /home/jovyan"),
        (made(Binds=["home:/home/jovyan/:rw", "data:/home/jovyan/data:rw"]), "within /home/jovyan"),
        (made(Tmpfs={"/home/jovyan/.cache": ""}), "within /home/jovyan"),
    ],
)
def test_settings_that_a_running_container_cannot_get_start_cold(other: dict[str, Any], words: str) -> None:
    with pytest.raises(Unpoolable, match=words):
        shaped(other)


def test_read_write_bind_is_a_home() -> None:
    _, homes = shape_of(made(), image_id="", slice_environment={}, folders={})
    assert homes == (Home("home-alice", "/home/jovyan"),)


def test_nothing_of_a_session_is_in_its_shape() -> None:
    text = str(shaped(made()))
    for own in ("alice", "fgpu-x-7-1", "/srv/data/limits/7", "/lending/7", "FGPU_SESSION_ID"):
        assert own not in text


def test_files_of_a_session_are_recorded_without_its_limits(tmp_path: Path) -> None:
    (tmp_path / "simulated").mkdir(mode=0o755)
    (tmp_path / "limits").write_text("of the session")
    (tmp_path / "ld.so.preload").write_text("/run/fgpu/libfgpu.so\n")
    (tmp_path / "ld.so.preload").chmod(0o444)
    assert files_of(tmp_path) == (
        ("ld.so.preload", 0o444, "/run/fgpu/libfgpu.so\n"),
        ("simulated", 0o755, None),
    )
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(Unpoolable, match="link"):
        files_of(tmp_path)


def test_the_busiest_five_minutes_are_found_wherever_they_begin() -> None:
    assert busiest([], window_s=300) == 0
    assert busiest([0, 10, 299, 300, 310, 800], window_s=300) == 3
    assert busiest([800, 5, 3], window_s=300) == 2


TORCH = "torch", "lab", ()


def pool_of(
    folder: Path, *, client: Any = None, background: Background | None = None, **more: Any
) -> WarmPool:
    """Return the pool of an engine that has ``client``, for two containers of image torch unless told otherwise."""
    containers: Any = SimpleNamespace(installation="abc", client=client)
    hub: Any = SimpleNamespace(background=background, isolation=None)
    return WarmPool(containers, hub, **{"sizes": {"torch": 2}, "node_ids": ["lab"], "data": folder, **more})


async def test_disabled_image_has_no_warm_containers(tmp_path: Path) -> None:
    offered = {"torch"}
    pool = pool_of(tmp_path, is_offered=lambda slug: slug in offered)
    assert await pool._size(TORCH) == 2
    offered.clear()
    assert await pool._size(TORCH) == 0
