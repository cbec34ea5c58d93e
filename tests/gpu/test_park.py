"""Parked sessions: GPU memory goes to the host and comes back whole, and calls that need no GPU are answered."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import select
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from slices import Gpu, Nvml, Slice, held

WITHIN_S = 35
"""For the cycles of one size."""
CYCLES = 20
PROGRAM = """
    import ctypes, os, random, signal, sys
    cuda = ctypes.CDLL("libcuda.so.1")
    wide, number = ctypes.c_size_t, ctypes.c_int()
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    def ok(*results):
        assert not any(results), results
    ok(cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0))
    ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cuda.cuCtxSetCurrent(context))
    chunks, size, place = int(sys.argv[1]), 1 << 20, lambda chunk: ctypes.c_uint64(address.value + (chunk << 20))
    ok(cuda.cuMemAlloc_v2(ctypes.byref(address), wide(chunks << 20)))
    seed = [0] * chunks
    def fill(chunk):
        seed[chunk] = random.getrandbits(32)
        ok(cuda.cuMemsetD32_v2(place(chunk), ctypes.c_uint(seed[chunk]), wide(size // 4)))
    def right(chunk, at=None, count=4096):
        read, at = ctypes.create_string_buffer(count), random.randrange(size // 4096) * 4096 if at is None else at
        ok(cuda.cuMemcpyDtoH_v2(read, ctypes.c_uint64(place(chunk).value + at), wide(count)))
        return read.raw == seed[chunk].to_bytes(4, "little") * (count // 4)
    for chunk in range(chunks):
        fill(chunk)
    signal.signal(signal.SIGINT, lambda *_: None)
    print("ready", flush=True)
    for word in map(str.strip, sys.stdin):
        if word == "ask":
            flags = ctypes.c_uint()
            ok(cuda.cuInit(0), cuda.cuDriverGetVersion(ctypes.byref(number)), cuda.cuDeviceGetCount(ctypes.byref(number)))
            ok(cuda.cuDeviceGetAttribute(ctypes.byref(number), 75, device))
            ok(cuda.cuDeviceGetName(ctypes.create_string_buffer(99), 99, device))
            ok(cuda.cuDeviceTotalMem_v2(ctypes.byref(wide()), device))
            ok(cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(number)))
            ok(cuda.cuCtxGetCurrent(ctypes.byref(context)), cuda.cuCtxGetDevice(ctypes.byref(number)))
            print("answered", flush=True)
        elif word == "wait":
            print(cuda.cuCtxSynchronize(), flush=True)
        else:
            whole = word == "all"
            wrong = sum(not (right(c, 0, size) if whole else right(c)) for c in range(chunks))
            for chunk in random.sample(range(chunks), chunks // 16):
                fill(chunk)
            ok(cuda.cuCtxSynchronize())
            print("wrong", wrong, flush=True)
"""
"""Fills this number of MiB and checks them, a part of each or all. Then it fills some of them again."""


class Parkable:
    """A session that can be parked, as the Hub does it; and a program in it."""

    def __init__(self, session: Slice, mib: int, *, code: str = PROGRAM, closed: int = 0) -> None:
        self.session = session
        (session.folder / "revision").write_bytes(bytes(8) + closed.to_bytes(8, "little"))
        (session.folder / "lending").mkdir()
        self.word = session.folder / "lending" / "wanted"
        self.word.write_bytes(bytes(8))
        self.program = session.start(code, str(mib))

    def says(self, *, within_s: float = 90) -> str:
        assert self.program.stdout is not None
        ready, _, _ = select.select([self.program.stdout], [], [], within_s)
        assert ready, f"no answer within {within_s} s"
        line = self.program.stdout.readline().strip()
        assert line or self.program.stderr is None, self.program.stderr.read() + self.session.log()
        return line

    def tell(self, word: str) -> None:
        assert self.program.stdin is not None
        print(word, file=self.program.stdin, flush=True)

    def set_gate(self, closed: int) -> None:
        with (
            (self.session.folder / "revision").open("r+b") as file,
            mmap.mmap(file.fileno(), 16) as page,
        ):
            word = ctypes.c_uint64.from_buffer(page, 8)
            word.value = closed
            del word

    def move(self, what: str) -> float:
        """Move the memory, and return the seconds that it took."""
        began = time.monotonic()
        if what == "park":
            self.set_gate(1)
        words = [
            self.session.folder / "probe",
            "--timeout",
            "60",
            f"--{what}",
            self.session.folder / "accounting",
        ]
        done = subprocess.run(
            words, env=self.session.environment(), capture_output=True, text=True, timeout=90
        )
        found = json.loads(done.stdout)
        if not found["done"] and "driver cannot checkpoint" in str(found["why"]):
            pytest.skip(found["why"])
        assert found["done"], found
        assert len(found["processes"]) == 1, found
        if what == "resume":
            self.set_gate(0)
        return time.monotonic() - began


@pytest.fixture
def parkable(slice_of: Callable[..., Slice], gpu: Gpu) -> Iterator[Callable[[int], Parkable]]:
    with contextlib.ExitStack() as stack:

        def parkable(mib: int) -> Parkable:
            found = Parkable(slice_of(min(gpu.memory_mib, mib + 2048)), mib)
            stack.callback(found.program.communicate)
            stack.callback(found.program.kill)
            assert found.says() == "ready"
            return found

        yield parkable


@pytest.mark.parametrize("gib", [2, 16])
def test_memory_comes_back_whole(
    parkable: Callable[[int], Parkable],
    slice_of: Callable[..., Slice],
    gpu: Gpu,
    nvml: Nvml,
    record_property: Callable[..., None],
    gib: int,
) -> None:
    if gpu.memory_mib < (gib + 4) * 1024:
        pytest.skip(f"the GPU has less than {gib + 4} GiB")
    found = parkable(gib * 1024 if not gpu.simulated else 64)
    neighbour, status = held(slice_of(1024), 512)
    assert status == 0
    down, up, end, left_mib = [], [], time.monotonic() + WITHIN_S, 0.0
    while len(down) < CYCLES and time.monotonic() < end:
        down.append(found.move("park"))
        left_mib = max(left_mib, nvml.process_bytes(gpu.uuid).get(found.program.pid, 0) / 2**20)
        up.append(found.move("resume"))
        found.tell("some")
        assert found.says() == "wrong 0"
    found.tell("all")
    whole = found.says()
    record_property("cycles", len(down))
    record_property("median_park_s", round(statistics.median(down), 2))
    record_property("median_resume_s", round(statistics.median(up), 2))
    record_property("left_mib", left_mib)
    assert (whole, left_mib, neighbour.poll()) == ("wrong 0", 0, None)
    neighbour.kill()
    neighbour.communicate()


def test_parked_program_is_answered_what_needs_no_gpu_and_can_be_stopped(
    parkable: Callable[[int], Parkable], record_property: Callable[..., None]
) -> None:
    found = parkable(64)
    found.move("park")
    found.tell("ask")
    assert found.says(within_s=10) == "answered"
    assert found.word.read_bytes() == bytes(8), "no call waited"
    found.tell("wait")
    end = time.monotonic() + 10
    while found.word.read_bytes() == bytes(8):
        assert time.monotonic() < end, "the call did not say that it waits"
        time.sleep(0.05)
    found.program.send_signal(signal.SIGINT)
    assert found.says(within_s=10) == "46"
    found.tell("wait")
    record_property("resume_s", round(found.move("resume"), 2))
    assert found.says(within_s=10) == "0"
    found.tell("all")
    assert found.says() == "wrong 0"


PYTORCH = """
    import sys
    try:
        import torch
    except ImportError:
        sys.exit(print("none", flush=True))
    print("available", torch.cuda.is_available(), flush=True)
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    print("done", flush=True)
    sys.stdin.read()
"""


def test_pytorch_of_a_session_that_is_parked_from_birth_waits_and_holds_nothing(
    slice_of: Callable[..., Slice], gpu: Gpu, nvml: Nvml, record_property: Callable[..., None]
) -> None:
    if gpu.simulated:
        pytest.skip("PyTorch needs a real GPU")
    found = Parkable(slice_of(4096), 0, code=PYTORCH, closed=1)
    try:
        if (first := found.says()) == "none":
            pytest.skip("PyTorch is not installed")
        assert first == "available True"
        end = time.monotonic() + 30
        while found.word.read_bytes() == bytes(8):
            assert time.monotonic() < end, "its first call did not say that it waits"
            time.sleep(0.05)
        # CUDA's runtime may make its context by a function that cannot be hooked, before the first call that waits.
        held_mib = nvml.process_bytes(gpu.uuid).get(found.program.pid, 0) / 2**20
        record_property("held_mib", held_mib)
        found.set_gate(0)
        assert found.says() == "done"
        assert held_mib == 0
    finally:
        found.program.kill()
        found.program.communicate()
