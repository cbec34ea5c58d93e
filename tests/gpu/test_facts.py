"""The machine: what its kernel can do, what is installed, what a context takes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable

import pytest
from check import NATIVE, missing_features
from realgpu import MIB, Gpu, Nvml, context_mib
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
TOOLS = ("gcc", "make", "nvidia-smi", "nvcc", "unshare", "setpriv")


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
        ("libfgpu", hashlib.sha256((NATIVE / "libfgpu.so").read_bytes()).hexdigest()[:12]),
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


def test_libfgpu_is_in_force(slice_of: Callable[..., Slice]) -> None:
    """Else what it costs, and what it charges, would say nothing."""
    code = """
        import ctypes
        cuda, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
        assert cuda.cuInit(0) == cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0) == 0
        print(total.value)
    """
    assert int(slice_of(4096).run(code)) == 4096 * MIB
