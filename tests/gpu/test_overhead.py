"""Uncharged memory of honest programs: the driver's count minus libfgpu's is within the tolerance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from slices import MIB, Gpu, Nvml, Slice, needs

WATCHDOG_TOLERANCE_MIB = 256
"""The default of `c.FGPU.watchdog_tolerance_mib`: beyond it a program is ended."""

EMPTY = """
    context, device = ctypes.c_void_p(), ctypes.c_int()
    assert cuda.cuInit(0) == cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == cuda.cuCtxSetCurrent(context) == 0
"""
TORCH = """
    import torch
    torch.manual_seed(0)
"""
PROGRAMS = {
    "empty": EMPTY,
    "a stack of 16 KiB": EMPTY + "    assert cuda.cuCtxSetLimit(0, ctypes.c_size_t(16384)) == 0\n",
    "a matrix product": TORCH
    + "    a = torch.randn(2048, 2048, device='cuda'); a @ a; (a.bfloat16() @ a.bfloat16())\n",
    "convolutions": TORCH
    + "    x = torch.randn(16, 3, 224, 224, device='cuda')\n    for k in (3, 5, 7):\n"
    + "        torch.nn.Conv2d(3, 64, k).cuda()(x).sum().backward()\n",
    "linalg": TORCH
    + "    a = torch.randn(512, 512, device='cuda'); torch.linalg.svd(a); torch.linalg.solve(a, a); torch.fft.fft(a)\n",
    "eager modules": "    import os\n    os.environ['CUDA_MODULE_LOADING'] = 'EAGER'\n"
    + TORCH
    + "    a = torch.randn(512, 512, device='cuda'); a @ a\n",
    "triton": TORCH
    + "    f = torch.compile(lambda x: (x.sin() + x).sum()); f(torch.randn(4096, device='cuda'))\n",
    "jax": "    import jax.numpy as jnp\n    a = jnp.ones((2048, 2048)); (a @ a).block_until_ready()\n",
    "cupy": "    import cupy\n    a = cupy.ones((2048, 2048)); (a @ a).sum(); cupy.linalg.svd(a[:256, :256])\n",
}
NEEDS = {"jax": "jax", "cupy": "cupy", "triton": "triton", "empty": "ctypes", "a stack of 16 KiB": "ctypes"}
ASK = """
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        cuda.cuCtxSetCurrent(context)
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    assert total.value == int(sys.argv[1]), "libfgpu is not in force"
    # As a slice fills, libfgpu asks the driver what it counts for the code of kernels.
    address = ctypes.c_uint64()
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(total.value // 8)) == cuda.cuMemFree_v2(address) == 0
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    print("charged", total.value - free.value, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(NEEDS.get(name, "torch"))) for name in PROGRAMS]
)
def test_an_honest_program_stays_within_the_tolerance(
    slice_of: Callable[..., Slice],
    gpu: Gpu,
    nvml: Nvml,
    a_context_mib: int,
    record_property: Callable[..., None],
    name: str,
) -> None:
    session = slice_of(min(24576, gpu.memory_mib // 2), context_mib=a_context_mib)
    before = nvml.settled_mib(gpu.uuid)
    code = '\n    import ctypes, sys\n    cuda = ctypes.CDLL("libcuda.so.1")\n' + PROGRAMS[name] + ASK
    with session.start(
        code, str(session.memory_mib * MIB), env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ) as process:
        assert process.stdout is not None
        line = next((text for text in process.stdout if text.startswith("charged")), "")
        used = nvml.settled_mib(gpu.uuid) - before
        process.kill()
        _, errors = process.communicate()
    if not line:
        raise RuntimeError(errors + session.log())
    charged = int(line.split()[1]) / MIB
    record_property("charged_mib", round(charged, 1))
    record_property("beyond_mib", round(used - charged, 1))
    assert used - charged <= WATCHDOG_TOLERANCE_MIB
