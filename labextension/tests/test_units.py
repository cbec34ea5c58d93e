"""The parts that need no Jupyter server: environment, sharing one read, GPU memory, versions."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import answers, driver

import jupyterlab_fgpu
from jupyterlab_fgpu import smi, verify
from jupyterlab_fgpu.environment import NoService, Service, read_service, read_slice
from jupyterlab_fgpu.gpu_memory import Device, GpuMemory, Process, Used
from jupyterlab_fgpu.status import SharedRead, total_use

ROOT = Path(__file__).parents[1]
GPU = Device("GPU-a", 2048)


def test_one_version_everywhere() -> None:
    version = json.loads((ROOT / "package.json").read_text())["version"]
    assert version == jupyterlab_fgpu.__version__ == smi.VERSION == verify.VERSION


def test_the_lock_file_names_no_host() -> None:
    assert "://" not in (ROOT / "yarn.lock").read_text()


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({}, "not started by a Hub"),
        ({"FGPU_SERVICE_URL": "file:///etc/passwd", "JUPYTERHUB_API_TOKEN": "t"}, "not an http"),
        ({"FGPU_SERVICE_URL": "http://127.0.0.1:1/services/fgpu"}, "no token"),
    ],
)
def test_an_unusable_environment_says_why(env: dict[str, str], part: str) -> None:
    service = read_service(env)
    assert isinstance(service, NoService)
    assert part in service.reason


def test_the_service_address_ends_in_a_slash_and_the_token_is_not_printed() -> None:
    service = read_service({"FGPU_SERVICE_URL": "http://h/x", "JUPYTERHUB_API_TOKEN": "secret"})
    assert isinstance(service, Service)
    assert service.url == "http://h/x/"
    assert "secret" not in repr(service)


def test_malformed_numbers_are_unknown_and_never_zero() -> None:
    env = {
        "FGPU_AMOUNT": "0.5",
        "FGPU_SESSION_ID": "x",
        "FGPU_MEMORY_MIB": "-1",
        "FGPU_COMPUTE_PERCENT": "",
        "NVIDIA_VISIBLE_DEVICES": "all, GPU-a,0,MIG-b",
    }
    slice_ = read_slice(env)
    assert slice_ is not None
    assert (slice_.session_id, slice_.memory_mib, slice_.compute_percent) == (None, None, None)
    assert slice_.uuids == ("GPU-a", "MIG-b")
    assert read_slice({}) is None


def test_one_unknown_device_makes_the_sum_unknown() -> None:
    assert total_use([Used(1, None), Used(2, None)]) == Used(3, None)
    assert total_use([Used(1, None), Used(None, "why")]) == Used(None, "why")
    assert total_use([]).mib is None


async def test_a_fresh_read_begins_after_it_was_asked_for() -> None:
    gates, begun = [asyncio.Event() for _ in range(3)], 0

    async def read() -> int:
        nonlocal begun
        begun += 1
        await gates[(number := begun) - 1].wait()
        return number

    shared = SharedRead(read, max_age_s=60)
    old = asyncio.ensure_future(shared.get())
    while begun == 0:
        await asyncio.sleep(0)
    fresh = [asyncio.ensure_future(shared.fresh()) for _ in range(2)]
    # Both wait before the first read ends.
    await asyncio.sleep(0)
    for gate in gates:
        gate.set()
    assert await old == 1
    # Two who wait for the same share what comes after, and it is kept.
    assert await asyncio.gather(*fresh) == [2, 2]
    assert await shared.get() == 2
    assert await shared.fresh() == 3
    assert begun == 3


async def test_a_read_is_shared_expires_and_survives_an_asker_who_leaves() -> None:
    now, reads = [0.0], []

    async def read() -> int:
        await asyncio.sleep(0)
        reads.append(1)
        return len(reads)

    shared = SharedRead(read, max_age_s=3, clock=lambda: now[0])
    leaver = asyncio.ensure_future(shared.get())
    await asyncio.sleep(0)
    leaver.cancel()
    assert await asyncio.gather(shared.get(), shared.get()) == [1, 1]
    now[0] = 2.9
    assert await shared.get() == 1
    now[0] = 3.0
    assert await shared.get() == 2
    shared.forget()
    assert await shared.get() == 3


Sampler = Callable[..., GpuMemory]


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Sampler:
    """Return a function that reads a driver for session 12."""

    def of(nvml: smi.Nvml, proc: Path = Path("/nowhere")) -> GpuMemory:
        answers(monkeypatch, nvml)
        return GpuMemory(session_id=12, timeout_s=5, proc=proc)

    return of


@pytest.fixture
def host_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's /proc: process 41 belongs to session 12, 42 to session 120, 43 to none."""
    for pid, environ in ((41, "A=b\0FGPU_SESSION_ID=12\0"), (42, "FGPU_SESSION_ID=120\0")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_text(environ)
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").touch()
    inode = os.stat(tmp_path / "self" / "ns" / "pid").st_ino
    monkeypatch.setattr("jupyterlab_fgpu.gpu_memory.HOST_PID_NAMESPACE", inode)
    return tmp_path


async def test_a_device_that_shows_only_the_slice_tells_the_slices_use(sampler: Sampler) -> None:
    assert await sampler(driver(total_mib=2048, used_mib=700)).sample([GPU]) == [Used(700, None)]


async def test_only_this_sessions_processes_count(sampler: Sampler, host_proc: Path) -> None:
    nvml = driver(used_mib=6000, processes={41: 512, 42: 1024, 43: 2048})
    assert await sampler(nvml, host_proc).sample([GPU]) == [Used(512, None, (Process(41, 512),))]


async def test_the_whole_devices_use_is_never_shown_as_the_slices(sampler: Sampler, tmp_path: Path) -> None:
    [used] = await sampler(driver(used_mib=6000), tmp_path).sample([GPU])
    assert used.mib is None
    assert "container" in (used.reason or "")


async def test_a_driver_without_per_process_memory_is_unknown(sampler: Sampler, host_proc: Path) -> None:
    [used] = await sampler(driver(processes={41: None}), host_proc).sample([GPU])
    assert used == Used(None, "the GPU driver does not report memory per process", (Process(41, None),))


async def test_without_a_driver_the_reason_is_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise smi.NvmlError("nvmlInit_v2", 9, "Driver Not Loaded")

    monkeypatch.setattr(smi, "Nvml", fail)
    [used] = await GpuMemory(session_id=1, timeout_s=5).sample([GPU])
    assert used == Used(None, "no NVIDIA driver answers here (Driver Not Loaded)")


async def test_the_installed_driver_answers_or_says_why() -> None:
    [used] = await GpuMemory(session_id=1, timeout_s=30).sample([GPU])
    assert (used.mib is None) != (used.reason is None)


async def test_a_hanging_driver_costs_one_thread_and_an_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def open_nvml() -> smi.Nvml:
        release.wait(20)
        return driver(total_mib=2048)

    monkeypatch.setattr(smi, "Nvml", open_nvml)
    gpu_memory = GpuMemory(session_id=12, timeout_s=0.05)
    [first] = await gpu_memory.sample([GPU])
    [second] = await gpu_memory.sample([GPU])
    assert first == Used(None, "the GPU driver did not answer in time")
    assert second == Used(None, "the GPU driver has not answered yet")
    release.set()
    while gpu_memory._running is not None and not gpu_memory._running.done():
        await asyncio.sleep(0.01)
    gpu_memory._timeout_s = 20
    assert await gpu_memory.sample([GPU]) == [Used(0, None)]
