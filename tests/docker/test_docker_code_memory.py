"""In real containers: the code of kernels counts as used, in the session, for the host and in the meter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dockerhub import MINI, PYTHON, DockerHub, Engine, until

from fgpuspawner.isolation import limits
from fgpuspawner.isolation.files import write_whole
from fgpuspawner.meter.model import METERS

pytestmark = pytest.mark.usefixtures("libfgpu_built")

CONTEXT_MIB, CODE_MIB, TAKEN_MIB = 64, 48, 200
PROGRAM = """
import ctypes, signal
cuda = ctypes.CDLL("libcuda.so.1")
context, module, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
text = b".version 6.0\\n.target sm_50\\n.address_size 64\\n.visible .entry spin_5ms()\\n{\\nret;\\n}\\n"
for status in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
               cuda.cuCtxSetCurrent(context), cuda.cuModuleLoadData(ctypes.byref(module), text),
               cuda.cuMemAlloc_v2(ctypes.byref(memory), 200 << 20)):
    assert status == 0, status
free, total = ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(total.value - free.value, flush=True)
signal.pause()
"""


def test_memory_of_loaded_gpu_code_is_counted_and_shown(
    engine: Engine, make_hub: Callable[..., DockerHub]
) -> None:
    hub = make_hub(after=f"{MINI}c.FGPU.context_mib = {CONTEXT_MIB}\n").start()
    machine = hub.data / "simulated" / "two" / "machine"
    text = machine.read_text()
    assert text.count(" context_mib=0 ") == 3
    taking = f" context_mib={CONTEXT_MIB} code_mib={CODE_MIB} "
    write_whole(machine, text.replace(" context_mib=0 ", taking).encode(), mode=0o444)

    running = hub.running("alice")
    made = engine.client.exec_create(running.id, [PYTHON, "-c", PROGRAM])
    said = next(engine.client.exec_start(made["Id"], stream=True)).decode()
    assert int(said) // 2**20 == CONTEXT_MIB + CODE_MIB + TAKEN_MIB, "it has counted its own code"

    def counted() -> bool:
        return limits.read(hub.data / "limits" / str(running.session.id)).devices[0].code_mib == CODE_MIB

    def shown() -> bool:
        told = (METERS.read(hub.data).sessions or {}).get(running.session.id)
        whole, known = CONTEXT_MIB + CODE_MIB + TAKEN_MIB, CONTEXT_MIB + CODE_MIB
        return told is not None and (told.now.memory_used_mib, told.now.memory_context_mib) == (whole, known)

    until(counted, within_s=60, what="the host has counted it")
    until(shown, within_s=60, what="what is context and code is told")
    hub.end("alice")
