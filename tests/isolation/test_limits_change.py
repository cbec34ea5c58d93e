"""Limits that change while processes run: each follows at its next allocation or launch, and none is ever above."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import accountreader
import pytest
from sessionfolders import UUID, MakePath, preloaded
from test_hooks_accounting import Program

from fgpuspawner.isolation import limits, native
from fgpuspawner.isolation.report import Answer, SlotReport, read_answer, slots_command

MIB = 2**20
DEVICE_MIB = 8192
LEAST_SHRUNK = 250
PEAK = 4096 + 96 + 8
"""Where the simulated driver's ledger has the most that was held at once (isolation/simulated/machine.h)."""
LOCK_MEMORY = 0
"""The byte of it that is locked while memory is given out."""


@pytest.fixture
def changing(session_folder: MakePath) -> MakePath:
    """Make the folder of a session with limits that can change."""

    def changing(memory_mib: int = 2048, **more: object) -> Path:
        folder = session_folder(devices=[(UUID, memory_mib)], **more)
        limits.begin_revisions(folder)
        return folder

    return changing


def set_limit(folder: Path, memory_mib: int, **more: object) -> None:
    """Give a session another limit, as the Hub does."""
    now = limits.read(folder)
    (device,) = now.devices
    limits.change(folder, replace(now, devices=(replace(device, memory_mib=memory_mib, **more),)))  # type: ignore[arg-type]


TOLD = """
held = []
for line in iter(sys.stdin.readline, ""):
    word, *numbers = line.split()
    if word == "take":
        status = cuda.result("cuMemAlloc_v2", byref(address := c_ulonglong()), int(numbers[0]) * MIB)
        held += [address.value] if status == 0 else []
        print(status, flush=True)
    elif word == "give":
        print(cuda.result("cuMemFree_v2", held.pop()), flush=True)
    else:
        import pynvml
        pynvml.nvmlInit()
        seen = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total
        sizes = *cuda.info(), cuda.new("cuDeviceTotalMem_v2", 0, kind=c_size_t), seen
        print(*(size // MIB for size in sizes), flush=True)
"""
OUT_OF_MEMORY = "2"


def test_a_process_that_runs_may_take_what_its_session_has_grown_by(changing: MakePath) -> None:
    folder = changing(1024)
    with Program(folder, TOLD) as program:
        assert [program.ask("take 1024"), program.ask("take 1")] == ["0", OUT_OF_MEMORY]
        set_limit(folder, 2048)
        assert [program.ask("take 1024"), program.ask("take 1")] == ["0", OUT_OF_MEMORY]
    assert (folder / "log").read_text() == ""


def test_a_process_that_runs_is_refused_what_its_session_has_given_back(changing: MakePath) -> None:
    folder = changing(2048)
    with Program(folder, TOLD) as program:
        assert program.ask("take 512") == "0"
        set_limit(folder, 1024)
        assert [program.ask("take 513"), program.ask("take 512")] == [OUT_OF_MEMORY, "0"]


def test_what_a_process_is_shown_changes_at_once(changing: MakePath) -> None:
    folder = changing(2048)
    with Program(folder, TOLD) as program:
        assert program.ask("look") == "2048 2048 2048 2048"
        set_limit(folder, 1024)
        assert program.ask("look") == "1024 1024 1024 1024"


def test_limits_of_a_session_that_was_launched_without_revisions_stay(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 1024)])
    with pytest.raises(limits.BadLimits, match="limits that cannot change"):
        set_limit(folder, 2048)
    assert limits.read(folder).devices[0].memory_mib == 1024


@pytest.mark.parametrize("what", ["fgpu-limits 1\n", "", None])
def test_nothing_is_granted_while_changed_limits_cannot_be_read(changing: MakePath, what: str | None) -> None:
    folder = changing(1024)
    with Program(folder, TOLD) as program:
        assert program.ask("take 100") == "0"
        good = (folder / "limits").read_bytes()
        set_limit(folder, 2048)
        (folder / "limits").unlink()
        if what is not None:
            (folder / "limits").write_text(what)
            (folder / "limits").chmod(0o444)
        assert [program.ask("take 1"), program.ask("give")] == [OUT_OF_MEMORY, "0"]
        (folder / "limits").unlink(missing_ok=True)
        (folder / "limits").write_bytes(good)
        (folder / "limits").chmod(0o444)
        assert program.ask("take 1024") == "0"


def test_process_that_cannot_read_changed_limits_is_reported_behind(changing: MakePath) -> None:
    folder = changing(1024)
    with Program(folder, TOLD) as program:
        assert program.ask("take 1") == "0"
        good = (folder / "limits").read_bytes()
        set_limit(folder, 512)
        (folder / "limits").unlink()
        assert program.ask("take 1") == OUT_OF_MEMORY
        assert behind(folder) == (1, 1)
        (folder / "limits").write_bytes(good)
        (folder / "limits").chmod(0o444)
        assert program.ask("take 1") == "0"
        assert behind(folder) == (1, 0)


def behind(folder: Path) -> tuple[int, int]:
    """Return how many processes libfgpu counts, and how many of them cannot read their limits, as the Hub asks."""
    probe = native.find()
    assert probe is not None
    words = slots_command("n", str(folder / "accounting"), ())
    done = subprocess.run([probe.probes[words[0]], *words[1:]], capture_output=True, check=True)
    found = read_answer(SlotReport, Answer(done.stdout, 0), "n")
    return len(found.slots), len(found.behind)


def test_limits_that_become_another_sessions_grant_nothing(changing: MakePath) -> None:
    folder = changing(1024)
    with Program(folder, TOLD) as program:
        assert program.ask("take 1") == "0"
        limits.change(folder, replace(limits.read(folder), session_id=18))
        assert program.ask("take 1") == OUT_OF_MEMORY
    assert "another session's" in (folder / "log").read_text()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_a_limit_that_moves_up_and_down_in_a_storm_is_never_exceeded(
    changing: MakePath, compile_c: MakePath, seed: int
) -> None:
    """As the Hub shrinks: the smaller limit first, then what is held. The driver's own ledger has the last word."""
    folder = changing(4096, context_mib=32, device_mib=DEVICE_MIB)
    worker = compile_c("tests/storm_cuda.c", "-ldl")
    workers = [
        subprocess.Popen([worker, str(seed * 100 + n)], env=preloaded(folder), stderr=subprocess.PIPE)
        for n in range(6)
    ]
    shrunk = given_up = 0
    try:
        most, end = LEAST_SHRUNK if seed == 1 else 2000, time.monotonic() + 200
        with (folder / "simulated" / "ledger").open("r+b") as file, mmap.mmap(file.fileno(), 8192) as ledger:
            while shrunk < most and time.monotonic() < end:
                # Far up, and down to about what they hold: what is granted in between decides.
                least = 1024 + 97 * (shrunk % 16)
                set_limit(folder, 4096)
                time.sleep(0.02)
                set_limit(folder, least)
                if not _held_within(folder, least, within_s=0.5):
                    given_up += 1
                    continue
                # Lock out processes that take memory: they would write an older sum as the peak.
                fcntl.lockf(file, fcntl.LOCK_EX, 1, LOCK_MEMORY)
                struct.pack_into("<Q", ledger, PEAK, 0)
                fcntl.lockf(file, fcntl.LOCK_UN, 1, LOCK_MEMORY)
                time.sleep(0.01)
                (peak,) = struct.unpack_from("<Q", ledger, PEAK)
                assert peak <= least * MIB, f"{peak / MIB} MiB were held of {least} MiB"
                shrunk += 1
    finally:
        for one in workers:
            assert one.poll() is None, one.stderr
            one.kill()
            one.wait()
            assert one.stderr is not None
            one.stderr.close()
    # More of them on a machine that has the time.
    assert shrunk >= LEAST_SHRUNK, given_up


def _held_within(folder: Path, most_mib: int, *, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if accountreader.read(folder / "accounting").devices[0].committed_bytes <= most_mib * MIB:
            return True
        os.sched_yield()
    return False
