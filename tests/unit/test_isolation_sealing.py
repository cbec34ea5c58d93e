"""What is laid over a container's mounts and environment: nothing else gets into the place of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docker.types import Mount as DockerMount
from docker.utils import format_environment

from fgpuspawner.engines.docker.create import parse_environment, sealed_mounts
from fgpuspawner.isolation.base import Mount, Prepared
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.sealing import is_knob, sealed_environment, without_knobs

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
LIMITS = Limits(7, "charge", ())


def test_ours_are_added_to_what_an_administrator_mounts() -> None:
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
def test_what_would_take_the_place_of_ours_is_left_out_and_named(given: dict[str, Any]) -> None:
    found, displaced = sealed_mounts(given, OURS)
    assert len(displaced) == 1
    assert found["Mounts"] == AS_API
    assert found["Binds"] == []
    assert not found.get("Tmpfs")


@pytest.mark.parametrize("target", ["/run/fgpu", "/run", "/etc", "/usr/local/bin", "/run/fgpu/limits2", "/"])
def test_what_is_mounted_above_ours_stays_and_lies_below_them(target: str) -> None:
    bind = f"/srv/x:{target}:rw"
    found, displaced = sealed_mounts({"Binds": [bind]}, OURS)
    assert (found["Binds"], displaced) == ([bind], [])


def test_what_there_was_is_not_changed() -> None:
    given: dict[str, Any] = {"Binds": ["/evil:/run/fgpu/limits:rw"], "Mounts": []}
    sealed_mounts(given, OURS)
    assert given == {"Binds": ["/evil:/run/fgpu/limits:rw"], "Mounts": []}


# --- Environment ---


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_AUDIT",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_DEVICE_MEMORY_LIMIT",
        "CUDA_DEVICE_MEMORY_LIMIT_3",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_GPU_MEMORY_LIMIT",
        "NVIDIA_MIG_CONFIG_DEVICES",
        "CUDA_VISIBLE_DEVICES",
    ],
)
def test_a_knob_is_nobodys_to_set(name: str) -> None:
    assert is_knob(name)
    assert without_knobs({name: "1", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "name", ["PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "NVIDIA_REQUIRE_CUDA", "PYTORCH_CUDA_ALLOC_CONF"]
)
def test_what_programs_are_told_otherwise_stays(name: str) -> None:
    assert not is_knob(name)


def test_ours_is_over_all_and_an_images_knobs_are_taken_away() -> None:
    prepared = Prepared("hami", LIMITS, environment={"CUDA_DEVICE_SM_LIMIT": "25"})
    found = sealed_environment(
        {
            "JUPYTERHUB_USER": "alice",
            "LD_PRELOAD": "/evil.so",
            "FGPU_MEMORY_MIB": "1",
            "CUDA_DEVICE_SM_LIMIT": "100",
        },
        {"FGPU_MEMORY_MIB": "2048", "NVIDIA_VISIBLE_DEVICES": "GPU-1f"},
        prepared,
        image={"NVIDIA_VISIBLE_DEVICES": "all", "LD_AUDIT": "/evil.so", "CUDA_MPS_X": "1", "LANG": "C"},
    )
    assert found == {
        "JUPYTERHUB_USER": "alice",
        "FGPU_MEMORY_MIB": "2048",
        "NVIDIA_VISIBLE_DEVICES": "GPU-1f",
        "CUDA_DEVICE_SM_LIMIT": "25",
        "LD_AUDIT": None,
        "CUDA_MPS_X": None,
    }
    # A name without a value takes away what the image sets.
    assert {"LD_AUDIT", "CUDA_MPS_X"} <= set(format_environment(found))


@pytest.mark.parametrize(
    ("given", "image", "expected"),
    [
        ({}, {}, "/run/fgpu/simulated"),
        ({}, {"LD_LIBRARY_PATH": "/usr/local/nvidia/lib"}, "/run/fgpu/simulated:/usr/local/nvidia/lib"),
        ({"LD_LIBRARY_PATH": "/opt/lib"}, {"LD_LIBRARY_PATH": "/x"}, "/run/fgpu/simulated:/opt/lib"),
        ({"LD_LIBRARY_PATH": ""}, {"LD_LIBRARY_PATH": "/x"}, "/run/fgpu/simulated"),
    ],
)
def test_a_search_path_goes_before_what_there_is(
    given: dict[str, str | None], image: dict[str, str], expected: str
) -> None:
    prepared = Prepared("interposer", LIMITS, search_paths={"LD_LIBRARY_PATH": "/run/fgpu/simulated"})
    assert sealed_environment(given, {}, prepared, image=image) == {"LD_LIBRARY_PATH": expected}


def test_an_environment_may_be_a_list_as_the_engine_has_it() -> None:
    assert parse_environment(["A=1", "B=", "C", "D=x=y"]) == {"A": "1", "B": "", "C": None, "D": "x=y"}
    assert parse_environment(None) == {}
    assert parse_environment({"A": "1"}) == {"A": "1"}
