"""The machine: what its kernel can do, what is installed, what a context takes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
from check import missing_features
from realgpu import Gpu, Nvml, context_mib
from slices import Slice, held

PACKAGES = (
    "torch",
    "triton",
    "jax",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numba",
    "cuda-bindings",
    "nvidia-ml-py",
    "pytest",
)
TOOLS = ("gcc", "make", "nm", "nvidia-smi", "nvcc", "unshare", "setpriv")


def test_the_kernel_has_what_libfgpu_lives_on(gpu: Gpu, record_property: Callable[..., None]) -> None:
    """With it, in the figures, what else is there."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    for name, value in (
        ("kernel", platform.release()),
        ("python", platform.python_version()),
        ("cores", os.cpu_count()),
        ("user", os.geteuid()),
        ("memory_mib", gpu.memory_mib),
        ("packages", packages),
        ("tools", {name: shutil.which(name) for name in TOOLS}),
    ):
        record_property(name, value)
    assert missing_features() == ""


def test_what_a_context_takes_can_be_measured(gpu: Gpu, record_property: Callable[..., None]) -> None:
    """As the Hub does for `context_mib = "auto"`."""
    found = context_mib(gpu)
    if isinstance(found, str):
        pytest.skip(found)
    record_property("context_mib", found)
    assert 16 <= found <= 2048


def test_nvml_says_what_a_process_holds(
    slice_of: Callable[..., Slice], gpu: Gpu, nvml: Nvml, record_property: Callable[..., None]
) -> None:
    """The watchdog lives on it."""
    before = nvml.process_bytes(gpu.uuid)
    process, status = held(slice_of(4096), 1024)
    nvml.settled_mib(gpu.uuid)
    after = nvml.process_bytes(gpu.uuid)
    process.kill()
    process.communicate()
    assert status == 0
    record_property("listed", len(after) - len(before))
    if after and process.pid not in after:
        pytest.skip("NVML lists other process ids: this is a PID namespace of its own")
    assert after.get(process.pid, 0) >= 1024 << 20


def test_nvidia_smi_runs_with_libfgpu(slice_of: Callable[..., Slice]) -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("there is no nvidia-smi")
    done = subprocess.run(
        ["nvidia-smi", "-L"], env=slice_of().environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_runs_with_libfgpu(slice_of: Callable[..., Slice]) -> None:
    assert slice_of().run("print(1 + 1)").strip() == "2", sys.version
