"""Checks on a real GPU. Skipped, with the reason, where there is none. `tests/gpu/run.sh` is the one command."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slices import Gpu, NoGpu, Nvml, Slice, build


@pytest.fixture(scope="session")
def nvml() -> Nvml:
    """The driver's own figures; skips where there is no driver."""
    try:
        return Nvml()
    except NoGpu as e:
        pytest.skip(str(e))


@pytest.fixture(scope="session")
def gpu(nvml: Nvml) -> Gpu:
    """The first real GPU."""
    try:
        found = nvml.gpus()
    except NoGpu as e:
        pytest.skip(str(e))
    if not found:
        pytest.skip("the NVIDIA driver reports no GPU")
    return found[0]


@pytest.fixture(scope="session")
def built(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libfgpu, built."""
    return build(tmp_path_factory.mktemp("isolation"))


@pytest.fixture
def slice_of(gpu: Gpu, built: Path, tmp_path: Path) -> Callable[..., Slice]:
    """Makes slices of the GPU; every call makes another session."""
    made: list[Slice] = []

    def make(memory_mib: int = 4096, **settings: Any) -> Slice:
        made.append(Slice(tmp_path / f"session-{len(made)}", built, gpu, memory_mib=memory_mib, **settings))
        return made[-1]

    return make


@pytest.fixture(scope="session")
def results(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Figures for the results file that FGPU_GPU_RESULTS names."""
    figures: dict[str, Any] = {}
    yield figures
    if path := os.environ.get("FGPU_GPU_RESULTS"):
        machine = {
            "gpu": gpu.name,
            "driver": gpu.driver,
            "memory_mib": gpu.memory_mib,
            "kernel": platform.release(),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }
        Path(path).write_text(json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n")
