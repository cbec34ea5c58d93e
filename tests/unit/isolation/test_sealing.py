"""What is laid over a session's environment: nothing else gets into the place of ours."""

from __future__ import annotations

import pytest
from docker.utils import format_environment

from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.sealing import is_knob, sealed_environment, without_knobs

LIMITS = Limits(7, "charge", ())


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_AUDIT",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "CUDA_DEVICE_MEMORY_LIMIT",
        "CUDA_DEVICE_MEMORY_LIMIT_3",
        "CUDA_DISABLE_CONTROL",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "NVIDIA_GPU_MEMORY_LIMIT",
        "NVIDIA_MIG_CONFIG_DEVICES",
        "CUDA_VISIBLE_DEVICES",
    ],
)
def test_users_and_administrators_cannot_set_a_knob(name: str) -> None:
    assert is_knob(name)
    assert without_knobs({name: "1", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    "name", ["PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "NVIDIA_REQUIRE_CUDA", "PYTORCH_CUDA_ALLOC_CONF"]
)
def test_what_programs_are_told_otherwise_stays(name: str) -> None:
    assert not is_knob(name)


def test_session_variables_win_and_image_knobs_are_unset() -> None:
    prepared = Prepared("mps", LIMITS, environment={"CUDA_DEVICE_SM_LIMIT": "25"})
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
