"""What is charged, until when, and what is refused: programs in a session, with their own assertions."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from sessionfolders import UUID, MakePath, preloaded
from simulatedmachine import Machine
from test_hooks_paths import committed

Run = Callable[..., str]

SECOND = "GPU-simulated-test-1"


class Program:
    """A Python program in a session, with everything of `cudacalls` and a ``cuda`` that is started."""

    def __init__(self, folder: Path, code: str, *, start: bool = True) -> None:
        begin = "from cudacalls import *\n" + ("cuda = Cuda().start()\n" if start else "")
        env = preloaded(folder, PYTHONPATH=str(Path(__file__).parent))
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", begin + textwrap.dedent(code)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """Return the next line that it prints."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        return line or self.end()

    def go(self, line: str = "") -> None:
        """Let it go on where it waits in ``input()``, or for a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def ask(self, line: str) -> str:
        """Return its answer to a line."""
        self.go(line)
        return self.line()

    def end(self) -> str:
        """Return the rest of what it prints. Its own assertions are the test's."""
        out, errors = self._process.communicate(timeout=120)
        assert self._process.returncode == 0, out + errors + (self._folder / "log").read_text()
        return out

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


def run(folder: Path, code: str, **more: bool) -> str:
    return Program(folder, code, **more).end()


@pytest.fixture
def in_128_mib(session_folder: MakePath) -> Run:
    """Run a program in a session with 128 MiB of one device."""
    return lambda code, **more: run(session_folder(devices=[(UUID, 128)]), code, **more)


# ---- plain memory ----


@pytest.mark.parametrize("version", ["", "_v2"])
def test_pitched_memory_beyond_the_limit_is_never_taken(
    session_folder: MakePath, compile_c: MakePath, version: str
) -> None:
    """Rows of 16 bytes are 512 apart: 2 Mi of them, 32 MiB as asked for, are 1 GiB."""
    folder = session_folder(devices=[(UUID, 128)])
    run(
        folder,
        f"""
        address, pitch = c_ulonglong(), c_size_t()
        call = "cuMemAllocPitch{version}"
        assert cuda.result(call, byref(address), byref(pitch), 16, 2 * MIB, 4) == OUT_OF_MEMORY
        assert cuda.used_mib() == 0
        cuda.alloc(64)
        assert cuda.result(call, byref(address), byref(pitch), 16, 128 * 1024, 4) == 0
        assert (pitch.value, cuda.used_mib()) == (512, 128)
        """,
    )
    (device,) = Machine(folder / "simulated", compile_c).entries()
    assert device.peak == 128 << 20


def test_allocations_above_1_mib_are_charged_in_2_mib_pages(
    session_folder: MakePath, compile_c: MakePath
) -> None:
    """As the driver takes it: of many that are just above 1 MiB it holds twice what was asked for."""
    folder = session_folder(
        devices=[(UUID, 64)], machine=f"gpu uuid={UUID} memory_mib=8192 granularity_kib=1024 name=In pages\n"
    )
    run(
        folder,
        """
        held = [cuda.new(call, MIB + 1, *more) for call, *more in [("cuMemAlloc_v2",), ("cuMemAllocManaged", 1)] * 16]
        assert cuda.used_mib() == 64
        assert cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), 1) == OUT_OF_MEMORY
        for address in held:
            cuda.cuMemFree_v2(address)
        assert cuda.used_mib() == 0
        cuda.alloc(1)
        assert cuda.used_mib() == 1
        """,
    )
    (device,) = Machine(folder / "simulated", compile_c).entries()
    assert device.peak == 32 << 20  # managed memory is the host's there


def test_what_the_driver_does_not_free_stays_charged(in_128_mib: Run) -> None:
    in_128_mib("""
        address = cuda.alloc(64)
        context = cuda.new("cuCtxGetCurrent", kind=c_void_p)
        assert cuda.result("cuMemFree_v2", address + 512) == 1
        cuda.cuCtxSetCurrent(None)
        assert cuda.result("cuMemFree_v2", address) == 201
        cuda.cuCtxSetCurrent(context)
        assert cuda.used_mib() == 64
        cuda.cuMemFree_v2(address)
        assert cuda.result("cuMemFree_v2", address) != 0
        assert cuda.used_mib() == 0
    """)


def test_what_the_driver_does_not_allocate_is_not_charged(session_folder: MakePath) -> None:
    # Of a device of 200 MiB, another session has taken 150.
    neighbour = session_folder(devices=[(UUID, 150)], device_mib=200)
    folder = session_folder(devices=[(UUID, 128)], device_mib=200, machine=neighbour)
    other = Program(neighbour, "cuda.alloc(150); say(ready=1); input()")
    assert other.line() == "ready=1"
    run(
        folder,
        """
        assert cuda.info() == (50 * MIB, 128 * MIB)  # no more is free than the driver has
        assert cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), 64 * MIB) == OUT_OF_MEMORY
        cuda.alloc(50)
        """,
    )
    other.go()
    other.end()


def test_errors_are_the_drivers_own(in_128_mib: Run) -> None:
    in_128_mib(
        """
        cuda = Cuda()
        out = c_ulonglong()
        assert cuda.result("cuCtxCreate_v2", byref(c_void_p()), 0, 0) == 3  # before cuInit
        cuda.cuInit(0)
        assert cuda.result("cuMemAlloc_v2", byref(out), 512) == 201  # no context
        assert cuda.result("cuMemGetInfo_v2", byref(out), byref(out)) == 201
        assert cuda.result("cuCtxCreate_v2", byref(c_void_p()), 0, 7) == 101  # no such device
        assert cuda.result("cuDeviceTotalMem_v2", byref(out), 7) == 101
        cuda.start()
        assert cuda.result("cuMemAlloc_v2", byref(out), 0) == 1
        assert cuda.result("cuMemAlloc_v2", byref(out), -1) == OUT_OF_MEMORY
        assert cuda.result("cuMemAlloc_v2", None, 512) == 1
        assert cuda.result("cuMemAllocPitch_v2", byref(out), byref(out), -1, -1, 4) in (1, OUT_OF_MEMORY)
        assert cuda.result("cuArrayCreate_v2", None, None) == 1
        assert cuda.result("cuMemFree_v2", 12345) == 1
        assert cuda.used_mib() == 0
        """,
        start=False,
    )


def test_managed_memory_is_refused_where_the_limits_say_so(session_folder: MakePath) -> None:
    refusing = session_folder(devices=[(UUID, 128)], managed="refuse")
    run(
        refusing,
        """
        for flags in (1, 2):
            assert cuda.result("cuMemAllocManaged", byref(c_ulonglong()), MIB, flags) == 801
        assert cuda.used_mib() == 0
        """,
    )
    assert "managed=refuse" in (refusing / "log").read_text()


# ---- limits ----


@pytest.mark.parametrize(
    "damage",
    ["missing", "writable", "malformed", "larger than the device", "no accounting"],
)
def test_everything_is_refused_without_valid_limits(session_folder: MakePath, damage: str) -> None:
    # The scheduler believes in a device of 64 GiB, the driver has 8.
    limit_mib, device_mib = (32768, 65536) if damage == "larger than the device" else (128, 8192)
    folder = session_folder(
        devices=[(UUID, limit_mib)],
        device_mib=device_mib,
        machine=f"gpu uuid={UUID} memory_mib=8192 name=Simulated GPU\n",
    )
    if damage == "missing":
        (folder / "limits").unlink()
    if damage == "writable":
        (folder / "limits").chmod(0o644)
    if damage == "malformed":
        text = (folder / "limits").read_text()
        (folder / "limits").unlink()
        (folder / "limits").write_text(text.replace("memory_mib=", "memory_mib=-"))
        (folder / "limits").chmod(0o444)
    if damage == "no accounting":
        (folder / "accounting").unlink()
    out = run(folder, REFUSED, start=False)
    if damage == "no accounting":  # the limits are known, but nothing can be counted
        assert out.split() == ["reported=0", f"total={128 * 2**20}", f"nvml={128 * 2**20}"]
    else:
        assert out.split() == ["reported=2", "total=0", "nvml=refused"]
    log = (folder / "log").read_text()
    assert len(log.splitlines()) == 1, log


REFUSED = """
    import pynvml
    cuda = Cuda()
    cuda.cuInit(0)
    # A context takes memory too: none can be had, so nothing can be allocated.
    assert cuda.result("cuDevicePrimaryCtxRetain", byref(c_void_p()), 0) == OUT_OF_MEMORY
    assert cuda.result("cuCtxCreate_v2", byref(c_void_p()), 0, 0) == OUT_OF_MEMORY
    properties = Properties(type=PINNED, location=Location(DEVICE, 0))
    assert cuda.result("cuMemCreate", byref(c_ulonglong()), 2 * MIB, byref(properties), 0) == OUT_OF_MEMORY
    total = c_size_t(77)
    reported = cuda.result("cuDeviceTotalMem_v2", byref(total), 0)
    pynvml.nvmlInit()
    try:
        nvml = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total
    except pynvml.NVMLError_NoPermission:
        nvml = "refused"
    print(f"reported={reported} total={total.value} nvml={nvml}")
"""


def test_a_share_of_the_whole_device_is_held_to_what_the_driver_has(session_folder: MakePath) -> None:
    folder = session_folder(
        devices=[(UUID, 8192)],
        device_mib=8192,
        machine=f"gpu uuid={UUID} memory_mib=8100 name=Simulated GPU\n",
    )
    run(folder, "assert cuda.info()[1] == 8100 * MIB; cuda.alloc(8100)")


def test_an_instance_of_a_partitioned_device_has_a_limit_of_its_own(session_folder: MakePath) -> None:
    instance = "MIG-simulated-test-0-0"
    machine = (
        f"gpu uuid={UUID} memory_mib=8192 name=Simulated GPU\n"
        f"mig parent={UUID} uuid={instance} memory_mib=1024 name=1g.1gb\n"
    )
    run(
        session_folder(devices=[(instance, 128)], device_mib=1024, machine=machine),
        """
        import pynvml
        assert cuda.info() == (128 * MIB, 128 * MIB)
        cuda.alloc(128)
        assert cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), 512) == OUT_OF_MEMORY
        pynvml.nvmlInit()
        whole = pynvml.nvmlDeviceGetHandleByIndex(0)
        part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, 0)
        assert pynvml.nvmlDeviceGetMemoryInfo(part).total == 128 * MIB
        try:
            pynvml.nvmlDeviceGetMemoryInfo(whole)
        except pynvml.NVMLError_NoPermission:
            pass
        else:
            raise AssertionError
        """,
    )


# ---- several processes ----


def test_a_forked_child_starts_with_nothing_of_its_own(in_128_mib: Run) -> None:
    in_128_mib(
        """
        # As multiprocessing does before the first context: the child makes its own.
        early = Cuda()
        child = os.fork()
        if child == 0:
            mine = Cuda().start()
            kept = mine.alloc(100)
            assert mine.used_mib() == 100
            mine.cuMemFree_v2(kept)
            assert mine.used_mib() == 0
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        cuda = Cuda().start()
        cuda.alloc(64)
        child = os.fork()
        if child == 0:
            # The driver does not work in this child, and what the parent holds is not the child's to give back.
            os._exit(0 if cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), MIB) != 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert cuda.used_mib() == 64
        """,
        start=False,
    )


# ---- contexts ----


def test_destroyed_context_releases_its_charge_and_allocations(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 512)], context_mib=64)
    run(
        folder,
        """
        def used():
            assert cuda.info()[1] == 512 * MIB
            return cuda.used_mib()
        cuda.start()  # retained twice, there once
        assert used() == 64
        cuda.alloc(10)
        for name, arguments in (
            ("cuCtxCreate_v2", (0, 0)),
            ("cuCtxCreate_v3", (None, 0, 0, 0)),
            ("cuCtxCreate_v4", (None, 0, 0)),
            ("cuCtxCreate", (0, 0)),
        ):
            context = cuda.new(name, *arguments, kind=c_void_p)
            assert used() == 74 + 64, name
            cuda.alloc(20)
            assert used() == 74 + 84, name
            assert cuda.result("cuCtxDestroy_v2", None) != 0
            cuda.cuCtxDestroy_v2(context)
            cuda.start()
            cuda.cuDevicePrimaryCtxRelease_v2(0)
            assert used() == 74, name
        cuda.cuDevicePrimaryCtxRelease_v2(0)
        assert used() == 74
        cuda.cuDevicePrimaryCtxRelease_v2(0)
        context = cuda.new("cuCtxCreate_v2", 0, 0, kind=c_void_p)
        assert used() == 64  # the primary one is gone, with its 10 MiB
    """,
    )
    assert committed(folder) == 64 * 2**20  # the last one, of a process that is gone


@pytest.mark.parametrize(
    ("limit", "times"),
    [pytest.param(0, 2 * 2048, id="stack"), pytest.param(1, 1, id="print"), pytest.param(2, 1, id="heap")],
)
def test_stacks_heap_and_print_buffer_are_charged(
    session_folder: MakePath, compile_c: MakePath, limit: int, times: int
) -> None:
    """There is a stack for each of 2,048 threads of both multiprocessors."""
    folder = session_folder(
        devices=[(UUID, 128)], machine=f"gpu uuid={UUID} memory_mib=8192 sm_count=2 name=Small one\n"
    )
    run(
        folder,
        f"""
        limit, times = {limit}, {times}
        first = cuda.new("cuCtxGetLimit", limit, kind=c_size_t)
        for size in (100, 20, 60):
            cuda.cuCtxSetLimit(limit, first + size * MIB // times)
            assert cuda.used_mib() == size
        for size in (129 * MIB // times, 2**62):
            assert cuda.result("cuCtxSetLimit", limit, first + size) == OUT_OF_MEMORY
        assert cuda.used_mib() == 60
        assert cuda.new("cuCtxGetLimit", limit, kind=c_size_t) == first + 60 * MIB // times
        assert cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), 69 * MIB) == OUT_OF_MEMORY
        other = cuda.new("cuCtxCreate_v2", 0, 0, kind=c_void_p)
        cuda.cuCtxSetLimit(limit, first + 8 * MIB // times)
        assert cuda.used_mib() == 68
        cuda.cuCtxDestroy_v2(other)
        cuda.start()
        assert cuda.used_mib() == 60
        cuda.cuCtxSetLimit(limit, first // 2)
        assert cuda.used_mib() == 0
        cuda.cuCtxSetLimit(limit, first + 8 * MIB // times)
        cuda.cuDevicePrimaryCtxReset_v2(0)
        cuda.start()
        assert cuda.used_mib() == 0
        """,
    )
    (device,) = Machine(folder / "simulated", compile_c).entries()
    assert device.peak == 100 << 20


def test_primary_context_of_the_runtime_is_charged_once(session_folder: MakePath) -> None:
    run(
        session_folder(devices=[(UUID, 512)], context_mib=64),
        """
        cuda = Cuda().start_by_table()
        assert cuda.used_mib() == 64
        cuda.alloc(100)
        cuda.start_by_table()
        cuda.start()  # and by the exported one
        assert cuda.used_mib() == 164
        assert cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), 349 * MIB) == OUT_OF_MEMORY
        for _ in range(3):
            assert cuda.used_mib() == 164
            cuda.cuDevicePrimaryCtxRelease_v2(0)
        context = cuda.new("cuCtxCreate_v2", 0, 0, kind=c_void_p)
        assert cuda.used_mib() == 64  # the primary one is gone, with its 100 MiB
        """,
        start=False,
    )


@pytest.mark.parametrize(
    ("asks", "held_mib"),
    [("info()", 64), ("alloc(100)", 164), ("create(100)", 164), ("new('cuMemAllocAsync', 96 * MIB, 0)", 160)],
)
def test_a_primary_context_is_seen_by_whatever_asks_for_memory(
    session_folder: MakePath, asks: str, held_mib: int
) -> None:
    folder = session_folder(devices=[(UUID, 512)], context_mib=64)
    run(
        folder,
        f"""
        cuda = Cuda()
        cuda.cuInit(0)
        cuda.cuCtxPushCurrent_v2(cuda.retain_by_table())
        cuda.{asks}
        """,
        start=False,
    )
    assert committed(folder) == held_mib * 2**20


def test_reset_releases_the_primary_context_of_the_runtime(session_folder: MakePath) -> None:
    run(
        session_folder(devices=[(UUID, 512)], context_mib=64),
        """
        cuda = Cuda().start_by_table()
        for _ in range(20):  # none of it adds up
            cuda.alloc(400)
            cuda.cuDevicePrimaryCtxReset_v2(0)
            cuda.start_by_table()
            assert cuda.used_mib() == 64
        cuda.cuDevicePrimaryCtxReset_v2(0)
        context = cuda.new("cuCtxCreate_v2", 0, 0, kind=c_void_p)
        assert cuda.used_mib() == 64
        """,
        start=False,
    )


def test_a_created_context_and_a_primary_one_are_told_apart(session_folder: MakePath) -> None:
    run(
        session_folder(devices=[(UUID, 512)], context_mib=64),
        """
        cuda = Cuda()
        cuda.cuInit(0)
        created = cuda.new("cuCtxCreate_v2", 0, 0, kind=c_void_p)
        held = cuda.alloc(10)
        assert cuda.used_mib() == 74
        cuda.start_by_table()
        cuda.alloc(20)
        assert cuda.used_mib() == 158
        cuda.cuDevicePrimaryCtxReset(0)
        cuda.cuCtxSetCurrent(c_void_p(created))
        assert cuda.used_mib() == 74
        cuda.cuDevicePrimaryCtxReset(0)  # there is none: this ends nothing
        assert cuda.used_mib() == 74
        cuda.cuMemFree_v2(held)
        assert cuda.used_mib() == 64
        """,
        start=False,
    )


def test_nothing_is_granted_beside_a_primary_context_that_does_not_fit(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 192)], context_mib=64)
    first = Program(
        folder, "held = cuda.alloc(100); say(full=1); input(); cuda.cuMemFree_v2(held); say(free=1); input()"
    )
    assert first.line() == "full=1"
    second = Program(
        folder,
        """
        cuda = Cuda().start_by_table()
        assert cuda.info() == (0, 192 * MIB)
        assert cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), MIB) == OUT_OF_MEMORY
        assert cuda.result("cuMemAllocAsync", byref(c_ulonglong()), MIB, 0) == OUT_OF_MEMORY
        say(refused=1)
        input()
        assert cuda.used_mib() == 128
        cuda.alloc(64)
        """,
        start=False,
    )
    assert second.line() == "refused=1"
    assert committed(folder) == (100 + 2 * 64) * 2**20  # as the driver has it
    first.go()
    assert first.line() == "free=1"
    second.go()
    second.end()
    first.go()
    first.end()


GREEN = """
        cuda = Cuda()
        cuda.cuInit(0)
        resource, description = (c_ulonglong * 32)(), c_void_p()
        cuda.cuDeviceGetDevResource(0, resource, 1)
        cuda.cuDevResourceGenerateDesc(byref(description), resource, 1)
"""


def test_green_contexts_share_one_charge(session_folder: MakePath) -> None:
    run(
        session_folder(devices=[(UUID, 512)], context_mib=64),
        GREEN
        + """
        green = cuda.new("cuGreenCtxCreate", description, 0, 1, kind=c_void_p)
        cuda.cuCtxSetCurrent(c_void_p(cuda.new("cuCtxFromGreenCtx", c_void_p(green), kind=c_void_p)))
        cuda.alloc(10)
        assert cuda.used_mib() == 74
        primary = cuda.retain_by_table()
        assert cuda.used_mib() == 74
        more = [cuda.new("cuGreenCtxCreate", description, 0, 1, kind=c_void_p) for _ in range(3)]
        assert cuda.used_mib() == 74
        for one in (green, *more):
            cuda.cuGreenCtxDestroy(c_void_p(one))
        cuda.cuCtxSetCurrent(primary)  # this stays, and so it stays charged
        assert cuda.used_mib() == 74
        """,
        start=False,
    )
    run(
        session_folder(devices=[(UUID, 128)], context_mib=64),
        GREEN
        + """
        for _ in range(3):  # the last one takes the primary one with it, and what was allocated there
            first = cuda.new("cuGreenCtxCreate", description, 0, 1, kind=c_void_p)
            second = cuda.new("cuGreenCtxCreate", description, 0, 1, kind=c_void_p)
            cuda.cuCtxSetCurrent(c_void_p(cuda.new("cuCtxFromGreenCtx", c_void_p(first), kind=c_void_p)))
            cuda.alloc(64)
            assert cuda.used_mib() == 128
            cuda.cuGreenCtxDestroy(c_void_p(second))
            assert cuda.used_mib() == 128
            cuda.cuGreenCtxDestroy(c_void_p(first))
        other = cuda.new("cuCtxCreate_v2", 0, 0, kind=c_void_p)
        assert cuda.used_mib() == 64
        assert cuda.result("cuGreenCtxCreate", byref(c_void_p()), description, 0, 1) == 0
        assert cuda.result("cuCtxCreate_v2", byref(c_void_p()), 0, 0) == OUT_OF_MEMORY
        """,
        start=False,
    )


# ---- what programs map themselves ----


def test_created_memory_is_held_by_its_handles_and_its_mappings(in_128_mib: Run) -> None:
    in_128_mib("""
        handle = cuda.create(64)
        address = cuda.reserve(256)
        cuda.map(address, 64, handle)
        cuda.map(address + 64 * MIB, 64, handle)  # twice
        assert cuda.used_mib() == 64
        cuda.cuMemRelease(handle)
        assert cuda.used_mib() == 64
        again = cuda.new("cuMemRetainAllocationHandle", address + 5 * MIB)
        cuda.cuMemUnmap(address, 64 * MIB)
        assert cuda.used_mib() == 64
        cuda.cuMemUnmap(address + 64 * MIB, 64 * MIB)
        assert cuda.used_mib() == 64  # by the handle that was retained
        cuda.cuMemRelease(again)
        assert cuda.used_mib() == 0
        assert cuda.result("cuMemRelease", again) != 0
        cuda.create(128)
    """)


def test_one_unmapping_ends_the_mappings_of_a_whole_range(in_128_mib: Run) -> None:
    in_128_mib("""
        address = cuda.reserve(256)
        for i in range(32):
            handle = cuda.create(2)
            cuda.map(address + 2 * i * MIB, 2, handle)
            cuda.cuMemRelease(handle)
        assert cuda.used_mib() == 64
        cuda.cuMemUnmap(address, 32 * MIB)
        assert cuda.used_mib() == 32
        cuda.cuMemUnmap(address + 32 * MIB, 32 * MIB)
        assert cuda.used_mib() == 0
    """)


def test_memory_of_the_host_is_not_charged(in_128_mib: Run) -> None:
    in_128_mib("""
        # Of these, the simulated driver has none: it is the one that says so, libfgpu does not object.
        properties = Properties(type=PINNED, location=Location(HOST_NUMA, 0))
        assert cuda.result("cuMemCreate", byref(c_ulonglong()), 512 * MIB, byref(properties), 0) in (0, 801)
        properties = PoolProperties(type=PINNED, location=Location(HOST_NUMA, 0))
        assert cuda.result("cuMemPoolCreate", byref(c_ulonglong()), byref(properties)) in (0, 801)
        for name, arguments in (("cuMemAllocHost_v2", (MIB,)), ("cuMemHostAlloc", (MIB, 0))):
            cuda.cuMemFreeHost(cuda.new(name, *arguments, kind=c_void_p))
        assert cuda.used_mib() == 0
    """)


# ---- arrays ----


def test_an_array_is_charged_by_its_format_and_all_its_levels(session_folder: MakePath) -> None:
    run(
        session_folder(devices=[(UUID, 512)]),
        """
        M = 2048  # 4 Mi elements, 4 MiB with one byte for each
        formats = {  # format, channels: bytes of 4 elements
            (0x01, 1): 4, (0x08, 4): 16, (0x02, 2): 16, (0x10, 4): 32, (0x0A, 2): 32, (0x20, 4): 64,
            (0x50, 4): 16, (0xC0, 1): 4, (0xC2, 4): 16, (0xC5, 4): 32, (0xCB, 4): 32,  # as many as the name says
            (0x91, 4): 2, (0x93, 4): 4, (0x97, 1): 2, (0x9D, 4): 4,  # blocks of 16 elements
            (0xB0, 3): 6, (0x9F, 3): 12, (0xA2, 3): 8, (0xB2, 3): 12, (0xB1, 4): 32,  # brightness and colour
        }
        for (format, channels), mib in formats.items():
            plane = ArrayDescription(M, M, 0, format, channels, 0)
            # The simulated driver has few of these formats, but is asked only if the session may have so much.
            rest = cuda.alloc(512 - mib)
            result = cuda.result("cuArray3DCreate_v2", byref(array := c_void_p()), byref(plane))
            assert result in (0, 1), hex(format)
            if result == 0:
                cuda.cuArrayDestroy(array)
            more = cuda.new("cuMemAlloc_v2", 512)
            assert cuda.result("cuArray3DCreate_v2", byref(c_void_p()), byref(plane)) == OUT_OF_MEMORY, hex(format)
            cuda.cuMemFree_v2(rest)
            cuda.cuMemFree_v2(more)
        for description, levels, mib in (
            (ArrayDescription(1 << 20, 0, 0, 0x01, 4, 0), 1, 4),  # a line
            (ArrayDescription(M, 0, 64, 0x20, 4, 1), 1, 2),  # layers of lines
            (ArrayDescription(256, 256, 64, 0x01, 4, 0), 3, 20),  # levels of a space: 16 + 2 + 0.25, in pages
            (ArrayDescription(256, 256, 64, 0x01, 4, 1), 3, 22),  # levels of layers: 16 + 4 + 1
        ):
            array = cuda.new("cuMipmappedArrayCreate", byref(description), levels, kind=c_void_p)
            assert cuda.used_mib() == mib, (mib, cuda.used_mib())
            cuda.cuMipmappedArrayDestroy(array)
        """,
    )


# ---- pools ----


def test_a_pool_is_charged_what_it_holds_and_not_what_is_used_of_it(in_128_mib: Run) -> None:
    in_128_mib("""
        stream, pool = cuda.stream(), cuda.pool()
        cuda.cuMemPoolSetAttribute(pool, 4, byref(c_uint64(2**64 - 1)))  # keep everything
        address = cuda.new("cuMemAllocFromPoolAsync", 64 * MIB, pool, stream)
        assert cuda.used_mib() == 64
        cuda.cuMemFreeAsync(address, stream)
        cuda.cuStreamSynchronize(stream)
        assert cuda.used_mib() == 64
        address = cuda.new("cuMemAllocFromPoolAsync", 64 * MIB, pool, stream)  # the same again
        assert cuda.used_mib() == 64
        cuda.cuMemFreeAsync(address, stream)
        cuda.cuStreamSynchronize(stream)
        cuda.cuMemPoolTrimTo(pool, 0)
        assert cuda.used_mib() == 0
    """)


def test_unused_pool_memory_makes_room_for_other_allocations(in_128_mib: Run) -> None:
    in_128_mib("""
        stream, pool = cuda.stream(), cuda.pool()
        cuda.cuMemPoolSetAttribute(pool, 4, byref(c_uint64(2**64 - 1)))
        for name, arguments in (
            ("cuMemAlloc_v2", ()),
            ("cuMemAllocAsync", (stream,)),
        ):
            address = cuda.new("cuMemAllocFromPoolAsync", 96 * MIB, pool, stream)
            cuda.cuMemFreeAsync(address, stream)
            cuda.cuStreamSynchronize(stream)
            assert cuda.used_mib() == 96
            other = cuda.new(name, 96 * MIB, *arguments)
            assert cuda.used_mib() == 96
            cuda.cuMemFree_v2(other)
    """)


def test_destroyed_pool_is_charged_until_its_last_free(in_128_mib: Run) -> None:
    in_128_mib("""
        stream, pool = cuda.stream(), cuda.pool()
        first = cuda.new("cuMemAllocFromPoolAsync", 32 * MIB, pool, stream)
        second = cuda.new("cuMemAllocFromPoolAsync", 32 * MIB, pool, stream)
        cuda.cuMemPoolDestroy(pool)
        assert cuda.used_mib() == 64
        cuda.cuMemFreeAsync(first, stream)
        cuda.cuMemFreeAsync(second, stream)
        cuda.cuStreamSynchronize(stream)
        assert cuda.used_mib() == 0
    """)


def test_a_pool_is_charged_to_its_own_device(session_folder: MakePath) -> None:
    run(
        session_folder(devices=[(UUID, 128), (SECOND, 64)]),
        """
        stream = cuda.stream()
        default = cuda.new("cuDeviceGetDefaultMemPool", 1)
        made = cuda.pool(where=1)
        for pool in (default, made):
            assert cuda.result("cuMemAllocFromPoolAsync", byref(c_ulonglong()), 65 * MIB, pool, stream) == OUT_OF_MEMORY
            address = cuda.new("cuMemAllocFromPoolAsync", 64 * MIB, pool, stream)
            cuda.start(1)
            assert cuda.used_mib() == 64
            cuda.start(0)
            assert cuda.used_mib() == 0
            cuda.cuMemFreeAsync(address, stream)
            cuda.cuStreamSynchronize(stream)
            cuda.cuMemPoolTrimTo(pool, 0)
        """,
    )


@pytest.fixture
def ordered(session_folder: MakePath, compile_c: MakePath) -> MakePath:
    """A session with another driver: its pools keep freed memory until the program waits for the stream."""

    def ordered(*flags: str, mib: int = 128) -> Path:
        uuid = "GPU-" + "-".join("1" * digits for digits in (8, 4, 4, 4, 12))
        folder = session_folder(devices=[(uuid, mib)], simulated=False)
        (folder / "simulated").mkdir()
        driver = compile_c(
            "tests/hooks_ordered.c", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1", *flags
        )
        (folder / "simulated" / "libcuda.so.1").symlink_to(driver)
        return folder

    return ordered


def test_memory_that_the_driver_frees_a_moment_later_is_waited_for(ordered: MakePath) -> None:
    """So a restart after a kill meets no error."""
    run(ordered("-DLATE=60"), "cuda.alloc(64); assert cuda.used_mib() == 64")
    run(
        ordered("-DLATE=1000"),
        """
        for _ in range(2):
            assert cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), 64 * MIB) == OUT_OF_MEMORY
        assert cuda.used_mib() == 0
        """,
    )


def test_what_is_freed_in_order_serves_again_before_it_is_given_back(ordered: MakePath) -> None:
    run(
        ordered(),
        """
        for _ in range(5):  # nothing waits
            address = cuda.new("cuMemAllocAsync", 100 * MIB, 0)
            cuda.cuMemFreeAsync(address, 0)
        assert cuda.used_mib() == 128
        assert cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), 64 * MIB) == OUT_OF_MEMORY
        cuda.cuStreamSynchronize(0)
        assert cuda.used_mib() == 0
        cuda.alloc(128)
        """,
    )


def test_a_pool_never_holds_more_than_the_limit_not_even_for_a_moment(ordered: MakePath) -> None:
    run(
        ordered(),
        """
        held = cuda.alloc(40)
        kept = []
        while cuda.result("cuMemAllocAsync", byref(out := c_ulonglong()), 7 * MIB, 0) == 0:
            kept.append(out.value)
        assert len(kept) == 9  # of 64 MiB, as another 32 do not fit beside 40
        highest = c_uint64()
        cuda.cuMemPoolGetAttribute(16, 6, byref(highest))
        assert highest.value == 64 * MIB
        """,
    )


def test_other_steps_are_learnt(ordered: MakePath) -> None:
    run(
        ordered("-DSTEP=(2*MIB)"),
        """
        held = cuda.alloc(40)
        kept = []
        while cuda.result("cuMemAllocAsync", byref(out := c_ulonglong()), 7 * MIB, 0) == 0:
            kept.append(out.value)
        assert len(kept) == 12
        assert cuda.used_mib() == 40 + 84
        """,
    )
    run(
        ordered("-DSTEP=(64*MIB)"),
        """
        first = cuda.new("cuMemAllocAsync", 7 * MIB, 0)
        assert cuda.used_mib() == 64
        held = cuda.alloc(64)
        assert cuda.result("cuMemAllocAsync", byref(c_ulonglong()), 64 * MIB, 0) == OUT_OF_MEMORY
        assert cuda.used_mib() == 64 + 7  # what the pool had free, it has given back
        highest = c_uint64()
        cuda.cuMemPoolGetAttribute(16, 6, byref(highest))
        assert highest.value == 64 * MIB
        """,
    )


def test_a_pool_in_pieces_teaches_no_larger_steps(ordered: MakePath) -> None:
    run(
        ordered("-DPIECES", mib=1024),
        """
        kept = [cuda.new("cuMemAllocAsync", size * MIB, 0) for size in (128, 32, 128, 32)]
        for address in kept[::2]:
            cuda.cuMemFreeAsync(address, 0)
        cuda.new("cuMemAllocAsync", 256 * MIB, 0)  # what is free would do, were it in one piece
        assert cuda.used_mib() == 2 * 128 + 2 * 32 + 256
        held = cuda.alloc(1024 - 576 - 40)
        cuda.new("cuMemAllocAsync", 128 * MIB, 0)  # into the pieces
        cuda.new("cuMemAllocAsync", 128 * MIB, 0)
        assert cuda.used_mib() == 1024 - 40
        cuda.new("cuMemAllocAsync", 20 * MIB, 0)  # 32 of the 40 MiB that are left
        assert cuda.used_mib() == 1024 - 8
        """,
    )


def test_a_pool_in_pieces_gives_them_back_for_what_needs_one(ordered: MakePath) -> None:
    run(
        ordered("-DPIECES", mib=1024),
        """
        kept = [cuda.new("cuMemAllocAsync", size * MIB, 0) for size in (256, 32, 256, 32)]
        for address in kept[::2]:
            cuda.cuMemFreeAsync(address, 0)
        assert cuda.used_mib() == 576
        cuda.new("cuMemAllocAsync", 600 * MIB, 0)  # beside the pieces it would be too much
        assert cuda.used_mib() == 64 + 608
        assert cuda.result("cuMemAllocAsync", byref(c_ulonglong()), 400 * MIB, 0) == OUT_OF_MEMORY
        assert cuda.used_mib() == 64 + 608
        """,
    )


def test_what_a_pool_grows_by_against_expectation_is_taken_back(ordered: MakePath) -> None:
    run(
        ordered("-DSTEP=(64*MIB)"),
        """
        held = cuda.alloc(80)  # 32 MiB more would do, 64 do not
        assert cuda.result("cuMemAllocAsync", byref(c_ulonglong()), 7 * MIB, 0) == OUT_OF_MEMORY
        assert cuda.used_mib() == 80
        reserved = c_uint64()
        cuda.cuMemPoolGetAttribute(16, 5, byref(reserved))
        assert reserved.value == 0
        cuda.cuMemFree_v2(held)
        cuda.new("cuMemAllocAsync", 7 * MIB, 0)
        assert cuda.used_mib() == 64
        """,
    )


# ---- graphs ----


def test_a_graphs_memory_is_charged_from_its_launch_until_it_is_trimmed(in_128_mib: Run) -> None:
    in_128_mib("""
        stream = cuda.stream()
        graph, _ = cuda.graph(40, 40, frees=True)
        executable = cuda.instantiate(graph)
        assert cuda.used_mib() == 0
        cuda.cuGraphLaunch(executable, stream)
        cuda.cuStreamSynchronize(stream)
        reserved = cuda.used_mib()
        assert 40 <= reserved <= 80
        for _ in range(3):
            cuda.cuGraphLaunch(executable, stream)
        cuda.cuStreamSynchronize(stream)
        assert cuda.used_mib() == reserved
        cuda.cuDeviceGraphMemTrim(0)
        assert cuda.used_mib() == 0
        held = cuda.alloc(100)
        assert cuda.result("cuGraphLaunch", executable, stream) == OUT_OF_MEMORY
        assert cuda.used_mib() == 100
        cuda.cuMemFree_v2(held)
        cuda.cuGraphLaunch(executable, stream)  # the program went on
    """)


def test_the_reserve_for_graphs_makes_room_when_it_is_needed(in_128_mib: Run) -> None:
    in_128_mib("""
        stream = cuda.stream()
        executable = cuda.instantiate(cuda.graph(100, frees=True)[0])
        cuda.cuGraphLaunch(executable, stream)
        cuda.cuStreamSynchronize(stream)
        assert cuda.used_mib() == 100
        held = cuda.alloc(100)
        assert cuda.used_mib() == 100
        assert cuda.result("cuGraphLaunch", executable, stream) == OUT_OF_MEMORY
    """)


def test_what_makes_room_for_a_graph_may_be_what_it_counted_on(in_128_mib: Run) -> None:
    in_128_mib("""
        stream, pool = cuda.stream(), cuda.pool()
        cuda.cuMemPoolSetAttribute(pool, 4, byref(c_uint64(2**64 - 1)))
        cuda.cuMemFreeAsync(cuda.new("cuMemAllocFromPoolAsync", 32 * MIB, pool, stream), stream)
        cuda.cuGraphLaunch(cuda.instantiate(cuda.graph(60, frees=True)[0]), stream)
        cuda.cuStreamSynchronize(stream)
        assert cuda.used_mib() == 92  # of which nothing is in use
        # 40 more would be too many; so all is given back, and 100 are needed.
        cuda.cuGraphLaunch(cuda.instantiate(cuda.graph(100, frees=True)[0]), stream)
        assert cuda.used_mib() == 100
    """)


def test_child_graph_counts_and_upload_charges_like_launch(in_128_mib: Run) -> None:
    in_128_mib("""
        stream = cuda.stream()
        inner, _ = cuda.graph(100, frees=True)
        outer = cuda.new("cuGraphCreate", 0)
        node = c_void_p()
        cuda.cuGraphAddChildGraphNode(byref(node), outer, None, 0, inner)
        executable = cuda.instantiate(outer)
        held = cuda.alloc(64)
        for name in ("cuGraphLaunch", "cuGraphLaunch_ptsz", "cuGraphUpload", "cuGraphUpload_ptsz"):
            assert cuda.result(name, executable, stream) == OUT_OF_MEMORY, name
        parameters = InstantiateParameters(flags=2, stream=stream)
        out = c_void_p()
        assert cuda.result("cuGraphInstantiateWithParams", byref(out), outer, byref(parameters)) == OUT_OF_MEMORY
        cuda.cuMemFree_v2(held)
        cuda.cuGraphUpload(executable, stream)
        assert cuda.used_mib() == 100
    """)


# ---- NVML ----


def test_a_version_of_an_nvml_function_that_is_not_known_is_missing(session_folder: MakePath) -> None:
    """It would tell of other sessions' processes."""
    name = "nvmlDeviceGetAccountingStats_v2"
    folder = session_folder(devices=[(UUID, 128)])
    assert name.encode() in (folder / "simulated" / "libnvidia-ml.so.1").read_bytes()
    run(
        folder,
        f"""
        library = ctypes.CDLL("libnvidia-ml.so.1")
        assert not hasattr(library, "{name}")
        assert hasattr(library, "nvmlDeviceGetSerial")
        assert "has {name}, a version that this libfgpu does not know" in log()
        """,
        start=False,
    )
