"""In real containers: what the code of an image's kernels takes is learnt, and its owner's next session is charged it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from dockerhub import MINI, PYTHON, DockerHub, Engine, Running, until

from fgpuspawner.isolation import limits
from fgpuspawner.isolation.files import write_whole
from fgpuspawner.meter.model import METERS

pytestmark = pytest.mark.usefixtures("libfgpu_built")

CONTEXT_MIB, CODE_MIB, TAKEN_MIB = 64, 48, 10
SOON = """
from fgpuspawner.hub import gpu_observers
gpu_observers.LEARN_AFTER_S = 5.0
c.FGPU.context_mib = 64
"""
"""A program of a test has loaded its code at once; a notebook may need minutes."""
PROGRAM = """
import ctypes, signal
cuda = ctypes.CDLL("libcuda.so.1")
context, module, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
text = b".version 6.0\\n.target sm_50\\n.address_size 64\\n.visible .entry spin_5ms()\\n{\\nret;\\n}\\n"
for status in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
               cuda.cuCtxSetCurrent(context), cuda.cuModuleLoadData(ctypes.byref(module), text),
               cuda.cuMemAlloc_v2(ctypes.byref(memory), 10 << 20)):
    assert status == 0, status
free, total = ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(total.value - free.value, flush=True)
signal.pause()
"""


def charged_mib(hub: DockerHub, running: Running) -> int:
    """Return what a context of the session is charged, by its limits."""
    return limits.read(hub.data / "limits" / str(running.session.id)).devices[0].context_mib


def begin(engine: Engine, running: Running) -> int:
    """Have a program load code and take memory; return how many MiB the session then holds, as it sees it."""
    made = engine.client.exec_create(running.id, [PYTHON, "-c", PROGRAM])
    said = next(engine.client.exec_start(made["Id"], stream=True)).decode()
    return int(said) // 2**20


def test_memory_of_loaded_gpu_code_is_measured_charged_and_shown(
    engine: Engine, make_hub: Callable[..., DockerHub]
) -> None:
    hub = make_hub(after=f"{MINI}{SOON}").start()
    machine = hub.data / "simulated" / "two" / "machine"
    text = machine.read_text()
    assert text.count(" context_mib=0 ") == 3
    taking = f" context_mib={CONTEXT_MIB} code_mib={CODE_MIB} "
    write_whole(machine, text.replace(" context_mib=0 ", taking).encode(), mode=0o444)

    first = hub.running("alice")
    assert charged_mib(hub, first) == CONTEXT_MIB
    assert begin(engine, first) == CONTEXT_MIB + TAKEN_MIB, "of its code libfgpu knows nothing yet"
    learnt = until(lambda: (hub.data / "code.json").exists(), within_s=60, what="its code is learnt")
    assert learnt
    by_image = json.loads((hub.data / "code.json").read_text())
    assert [list(by_user.values()) for by_user in by_image.values()] == [[[CODE_MIB]]]
    hub.end("alice")

    second = hub.running("alice")
    assert charged_mib(hub, second) == CONTEXT_MIB + CODE_MIB
    assert begin(engine, second) == CONTEXT_MIB + CODE_MIB + TAKEN_MIB

    def shown() -> bool:
        told = (METERS.read(hub.data).sessions or {}).get(second.session.id)
        whole, known = CONTEXT_MIB + CODE_MIB + TAKEN_MIB, CONTEXT_MIB + CODE_MIB
        return told is not None and (told.now.memory_used_mib, told.now.memory_context_mib) == (whole, known)

    until(shown, within_s=60, what="what is context and code is told")
    stranger = hub.running("bob")
    assert charged_mib(hub, stranger) == CONTEXT_MIB, "for what a single other user did nobody pays"
    hub.end("alice")
    hub.end("bob")
