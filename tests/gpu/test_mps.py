"""NVIDIA's MPS daemon, which the backend `mps` needs: what its caps hold. Not run where it is not installed.

The daemon is this check's own, with folders of its own, and ends with it; the GPU's settings stay as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slices import Gpu, Slice, held, status_of

CONTROL = "nvidia-cuda-mps-control"
SMS = """
    import ctypes
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    assert cuda.cuInit(0) == cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuDeviceGetAttribute(ctypes.byref(count), 16, device) == 0
    print(count.value)
"""


@pytest.fixture(scope="module")
def pipes(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A daemon's folder."""
    if gpu.simulated:
        pytest.skip("simulated GPUs have no MPS")
    if shutil.which(CONTROL) is None:
        pytest.skip(f"there is no {CONTROL}")
    folder = tmp_path_factory.mktemp("mps")
    environment = os.environ | {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder),
        "CUDA_MPS_LOG_DIRECTORY": str(folder),
        "CUDA_VISIBLE_DEVICES": gpu.uuid,
    }
    done = subprocess.run([CONTROL, "-d"], env=environment, capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"the daemon does not start: {done.stdout}{done.stderr}")
    yield folder
    subprocess.run([CONTROL], input="quit\n", env=environment, text=True, timeout=60)


@pytest.fixture
def client(pipes: Path, slice_of: Callable[..., Slice]) -> Callable[..., Slice]:
    """Makes sessions as the backend does: libfgpu for the memory, the daemon for memory and SMs."""

    class Client(Slice):
        percent, pinned_mib = 25, 4096

        def environment(self, more: object = {}) -> dict[str, str]:
            return {
                **super().environment(),
                "CUDA_VISIBLE_DEVICES": "0",
                "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(self.percent),
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={self.pinned_mib}M",
            }

    def make(memory_mib: int = 4096) -> Slice:
        made = slice_of(memory_mib)
        made.__class__ = Client
        return made

    return make


def test_a_client_has_no_more_sms_than_its_share(
    client: Callable[..., Slice], slice_of: Callable[..., Slice], record_property: Callable[..., None]
) -> None:
    whole, part = int(slice_of().run(SMS)), int(client().run(SMS))
    record_property("sms", [part, whole])
    assert part <= 0.25 * whole + 2


def test_the_daemon_holds_memory_that_libfgpu_would_give(client: Callable[..., Slice]) -> None:
    """The slice is larger than what is pinned, so it is the daemon that refuses."""
    assert status_of(client(16_384), 6144) == 2


def test_a_client_sees_its_slice(client: Callable[..., Slice]) -> None:
    assert status_of(client(2048), 3072) == 2


def test_what_a_killed_client_does_to_its_neighbour(
    client: Callable[..., Slice], record_property: Callable[..., None]
) -> None:
    """Without a kernel in flight. With one, docs/isolation.md only says that the neighbour can end."""
    first, status = held(client(2048), 512)
    assert (status, status_of(client(2048), 512)) == (0, 0)
    record_property("neighbour_lives", first.poll() is None)
    assert int(client(2048).run(SMS)) > 0
    first.kill()
    first.communicate()
