"""What libfgpu counts over all processes of a session (isolation/libfgpu/region.c)."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accountreader
import pytest
from regiontool import Tool, environment
from sessionfolders import REGION_BYTES, MakePath, write_for_all

from fgpuspawner.isolation.files import make_zeros

MIB = 1 << 20
GPU = [("GPU-0", 90_000)]
Program = MakePath


@pytest.fixture(scope="session")
def program(compile_c: Program, counting_library: Path) -> Program:
    """Compile a test's program with libfgpu's accounting."""
    return lambda name, *more: compile_c(f"tests/{name}.c", *more, counting_library, "-pthread")


@pytest.fixture
def folder(session_folder: MakePath, counting_library: Path) -> Path:
    return session_folder(devices=GPU, library=counting_library, simulated=False)


@pytest.fixture
def start(folder: Path, program: Program) -> Iterator[Callable[..., Tool]]:
    """Start processes of the session that do what they are told; all are killed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda **more: stack.enter_context(Tool(program("region_tool"), folder, **more))


def run(program: Path, folder: Path, *arguments: object, timeout_s: int = 120) -> dict[str, Any]:
    """Run a program that prints a line of JSON."""
    done = subprocess.run(
        [program, *map(str, arguments)],
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode == 77:
        pytest.skip("ptrace is not allowed here")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something has come about in another process."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def log_of(folder: Path) -> list[str]:
    return [line.split(": ", 1)[1] for line in (folder / "log").read_text().splitlines()]


# One process.


def test_releasing_more_than_there_is_is_clamped_and_logged(start: Callable[..., Tool], folder: Path) -> None:
    one, other = start(), start()
    one.ask("reserve 0 100 1000")
    other.ask("reserve 0 50 1000")
    one.ask("release 0 101")
    assert one.ask("mine 0") == "0"
    assert one.ask("used 0") == "50"
    start().ask("release 0 7")
    assert log_of(folder) == [
        "101 bytes of device 0 were to be released where 100 are held",
        "7 bytes of device 0 were to be released where 0 are held",
    ]


def test_what_the_driver_has_taken_counts_above_the_limit_too(start: Callable[..., Tool]) -> None:
    process = start()
    process.ask("charge 0 1500")
    assert process.ask("used 0") == "1500"
    assert process.ask("reserve 0 1 1000") == "over"
    process.ask("release 0 501")
    assert process.ask("reserve 0 1 1000") == "granted"


def test_the_time_account_is_common_to_all_processes(start: Callable[..., Tool]) -> None:
    one, other = start(), start()
    assert [one.ask("time 0"), other.ask("time 0"), one.ask("time 0")] == ["0", "1", "2"]


# Several.


@pytest.mark.parametrize(
    ("processes", "greedy", "rounds", "size"),
    [
        (2, 0, 30_000, 600),
        (2, 0, 30_000, 1000),
        (8, 0, 3000, 600),
        (8, 0, 3000, 301),
        (3, 0, 10_000, 500),
        (1, 1, 30_000, 600),
        (4, 2, 3000, 301),
    ],
)
def test_concurrent_requests_for_the_last_bytes_get_what_fits(
    folder: Path, program: Program, processes: int, greedy: int, rounds: int, size: int
) -> None:
    """``greedy`` others ask for more than there is: that must not cost anybody anything."""
    result = run(program("region_contend"), folder, processes, greedy, rounds, size, 1000)
    assert result == {"fewer": 0, "more": 0, "refused": 0, "greedy": 0, "left": 0}


def test_the_processes_of_a_session_are_known_by_their_ids(start: Callable[..., Tool]) -> None:
    one, other, idle = start(), start(), start()
    one.ask("reserve 0 10 1000")
    other.ask("reserve 0 20 1000")
    assert sorted(one.ask("processes 0").split()) == sorted([f"{one.pid}=10", f"{other.pid}=20"])
    assert [one.ask(f"ours {pid}") for pid in (one.pid, other.pid, idle.pid, 1, 0)] == list("11000")
    other.kill()
    assert one.ask(f"ours {other.pid}") == "0"
    assert idle.ask("processes 0") == f"{one.pid}=10"


def test_more_processes_than_slots_are_refused_and_logged(folder: Path, program: Program) -> None:
    result = run(program("region_crowd"), folder, 1100, 1, 10_000)
    assert result == {
        "first": {"granted": 1024, "over": 0, "refused": 76, "used": 1024},
        # A tenth, 103 of them with a slot, has made room for as many.
        "second": {"granted": 103, "over": 0, "refused": 7, "used": 1024},
        "last": {"granted": 0, "over": 0, "refused": 0, "used": 0},
    }
    lines = log_of(folder)
    assert len(lines) == 83
    assert set(lines) == {
        "all 1024 slots are taken: so many processes of the session use a GPU; this one is refused"
    }


# How a process ends, and what does not end it.


def test_a_slot_is_used_again(start: Callable[..., Tool], folder: Path) -> None:
    for _ in range(5):
        one = start()
        assert one.ask("reserve 0 700 1000") == "granted"
        one.kill()
    # The next owner of the slot clears what the last one left.
    one = start()
    assert one.ask("reserve 0 1000 1000") == "granted"
    assert one.ask("mine 0") == "1000"
    assert accountreader.read(folder / "accounting").devices[0].committed_bytes == 1000
    assert (folder / "accounting").read_bytes()[8:16] == (1).to_bytes(8, "little")


def test_what_a_process_held_is_free_when_it_executes_another_program(start: Callable[..., Tool]) -> None:
    one, other = start(), start()
    one.ask("reserve 0 1000 1000")
    one.tell("exec")
    wait_for(lambda: Path(f"/proc/{one.pid}/comm").read_text() == "sleep\n")
    assert other.ask("used 0") == "0"
    assert other.ask("reserve 0 1000 1000") == "granted"
    os.kill(one.pid, 0)  # Still there.


def test_a_process_that_closes_all_descriptors_keeps_what_it_holds(start: Callable[..., Tool]) -> None:
    one, other = start(), start()
    one.ask("reserve 0 600 1000")
    one.ask("close")
    assert other.ask("reserve 0 401 1000") == "over"
    assert other.ask("used 0") == "600"
    assert one.ask("reserve 0 401 1000") == "over"
    assert one.ask("reserve 0 400 1000") == "granted"


def test_no_descriptor_of_the_region_stays_open(start: Callable[..., Tool]) -> None:
    one = start()
    assert one.ask("reserve 0 1 1000") == "granted"
    one.ask("used 0")
    names = [os.readlink(link) for link in Path(f"/proc/{one.pid}/fd").iterdir()]
    assert [name for name in names if "accounting" in name or "limits" in name or "log" in name] == []


@pytest.mark.parametrize("how", ["fork", "clone"])
def test_a_child_that_does_nothing_does_not_keep_what_its_parent_held(
    start: Callable[..., Tool], how: str
) -> None:
    parent, other = start(), start()
    parent.ask("reserve 0 1000 1000")
    of_child, of_grandchild, grandchild = parent.child(how, "used 0", f"{how} used 0")
    assert [of_child, of_grandchild] == ["1000", "1000"]
    parent.pids.append(int(grandchild))
    parent.kill()
    assert other.ask("reserve 0 1000 1000") == "granted"


def test_a_child_of_a_process_that_has_not_asked_yet_is_forked_too(start: Callable[..., Tool]) -> None:
    parent = start()
    assert parent.child("child", "forked", "forked") == ["1", "0"]
    assert parent.ask("forked") == "0"


def test_a_child_forked_while_a_slot_is_taken_does_not_keep_it(
    start: Callable[..., Tool], folder: Path, program: Program
) -> None:
    judge = start()
    for _ in range(60):
        process = subprocess.Popen(
            [program("region_forks"), "1000", "1000"],
            env=environment(folder),
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"0\n"
            process.kill()
            process.wait()
            assert judge.ask("used 0") == "0"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_processes_in_nested_pid_namespaces_share_one_limit(start: Callable[..., Tool]) -> None:
    before = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("PID namespaces are not allowed here: only root can make them")
    outside, one, other = start(), start(before=before), start(before=before)
    assert one.ask("reserve 0 300 1000") == "granted"
    assert other.ask("reserve 0 300 1000") == "granted"  # Both are process 1 of their namespaces.
    assert outside.ask("reserve 0 401 1000") == "over"
    assert [one.ask("mine 0"), other.ask("mine 0"), outside.ask("used 0")] == ["300", "300", "600"]
    # Only those that can be named there, by the ids that they have there.
    assert [one.ask("ours 1"), one.ask(f"ours {outside.pid}"), outside.ask("ours 1")] == ["1", "0", "0"]
    assert [one.ask("processes 0"), outside.ask("processes 0")] == ["1=300", f"{outside.pid}=0"]
    assert one.ask("fork reserve 0 100 1000").startswith("granted;")
    assert other.ask("used 0") == "700"
    one.kill()
    wait_for(lambda: outside.ask("used 0") == "300")
    other.kill()
    wait_for(lambda: outside.ask("used 0") == "0")


# Instruction by instruction.


def step(program: Program, folder: Path, *arguments: object) -> dict[str, Any]:
    if platform.machine() != "x86_64":
        pytest.skip("processes can be led through atomic instructions on x86-64 only")
    return run(program("region_steps"), folder, *arguments, timeout_s=600)


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_of_two_who_want_the_same_one_gets_it_wherever_they_are_interrupted(
    program: Program, folder: Path, stride: int
) -> None:
    result = step(program, folder, "pairs", stride)
    assert result["tried"] > 2 * result["announced"] ** 2 / stride


@pytest.mark.parametrize(("what", "at_least"), [("kills", 100), ("claims", 50), ("contended", 50)])
def test_a_process_can_be_killed_at_any_instruction(
    program: Program, folder: Path, what: str, at_least: int
) -> None:
    assert step(program, folder, what)["tried"] >= at_least


@pytest.mark.parametrize("who", ["heirs", "newcomers"])
def test_what_the_dead_left_is_free_for_all_at_once(program: Program, folder: Path, who: str) -> None:
    assert step(program, folder, who)["tried"] > 50


def test_bytes_that_move_while_they_are_summed_are_not_taken_for_more(program: Program, folder: Path) -> None:
    assert step(program, folder, "moves")["tried"] > 50


def test_a_process_that_is_stopped_at_any_instruction_keeps_others_from_its_own_bytes_only(
    program: Program, folder: Path
) -> None:
    result = step(program, folder, "stops")
    assert result["over"] > 10
    assert result["moving"] > 0  # The file's header knows of these.


# Files that are not what they should be.


def assert_refused(start: Callable[..., Tool], folder: Path, reason: str) -> None:
    process = start()
    assert process.ask("reserve 0 1 1000") == "refused"
    assert process.ask("reserve 0 0 1000") == "refused"
    process.ask("charge 0 5")
    process.ask("release 0 5")
    assert [process.ask("used 0"), process.ask("mine 0"), process.ask("ours 1"), process.ask("time 0")] == [
        *("0", "0", "0", "-1")
    ]
    assert log_of(folder) == [f"the file accounting {reason}; every allocation is refused"]


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        *(
            (lambda path, size=size: write_for_all(path, size), f"has {size} bytes, not {REGION_BYTES}")
            for size in (0, REGION_BYTES - 1, REGION_BYTES + 1)
        ),
        (
            lambda path: path.write_bytes(b"\x7fELF\0\0\0\0".ljust(REGION_BYTES, b"\0")),
            "begins with 0x464c457f, not with zeros and not with what this libfgpu writes there",
        ),
        (os.mkdir, "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
    ],
)
def test_what_is_no_region_is_refused(
    start: Callable[..., Tool], folder: Path, put: Callable[[Path], None], reason: str
) -> None:
    (folder / "accounting").unlink()
    put(folder / "accounting")
    assert_refused(start, folder, reason)


def test_a_region_that_may_only_be_read_is_refused(start: Callable[..., Tool], folder: Path) -> None:
    (folder / "accounting").chmod(0o444)
    if os.geteuid() != 0:
        assert_refused(start, folder, "may not be opened by this user")
        return
    # To root only a mount is read-only.
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$1"'
    before = ["unshare", "--mount", "sh", "-c", script, str(folder / "accounting")]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounts are not allowed here")
    assert_refused(lambda: start(before=before), folder, "is on a read-only mount")


def test_a_region_may_be_a_link_as_it_is_best_kept_in_memory(
    start: Callable[..., Tool], folder: Path, tmp_path: Path
) -> None:
    (folder / "accounting").rename(tmp_path / "elsewhere")
    (folder / "accounting").symlink_to(tmp_path / "elsewhere")
    assert start().ask("reserve 0 1 1000") == "granted"


def test_without_descriptors_a_process_is_refused_and_later_not(
    start: Callable[..., Tool], folder: Path
) -> None:
    process = start(before=["prlimit", "--nofile=1024:1024"])
    assert process.ask("limits") == f"17 GPU-0={90_000 * MIB}"
    subprocess.run(["prlimit", f"--pid={process.pid}", "--nofile=3:1024"], check=True)
    assert process.ask("reserve 0 1 1000") == "refused"
    subprocess.run(["prlimit", f"--pid={process.pid}", "--nofile=1024:1024"], check=True)
    assert process.ask("reserve 0 1 1000") == "granted"


# What is read from outside.


def test_the_account_can_be_read_from_outside(
    start: Callable[..., Tool], session_folder: MakePath, counting_library: Path, program: Program
) -> None:
    folder = session_folder(
        devices=[("GPU-0", 100), ("GPU-1", 100)], library=counting_library, simulated=False
    )
    path = make_zeros(folder / "accounting", REGION_BYTES)
    assert path.stat().st_blocks * 512 >= REGION_BYTES
    assert path.stat().st_mode & 0o777 == 0o666
    nothing = accountreader.DeviceAccount(0, 0)
    assert accountreader.read(path) == accountreader.Accounting((nothing,) * 16, ())
    tool = program("region_tool")
    with Tool(tool, folder) as one, Tool(tool, folder) as other:
        one.ask("reserve 0 700 1000")
        one.ask("reserve 1 5 1000")
        other.ask("reserve 0 250 1000")
        one.ask("release 0 600")
        assert accountreader.read(path) == accountreader.Accounting(
            (accountreader.DeviceAccount(350, 950), accountreader.DeviceAccount(5, 5), *(nothing,) * 14),
            (
                accountreader.ProcessAccount(one.pid, (100, 5, *(0,) * 14)),
                accountreader.ProcessAccount(other.pid, (250, *(0,) * 15)),
            ),
        )
        one.kill()  # Its amounts stay in the file and do not count.
        assert accountreader.read(path).devices[:2] == (
            accountreader.DeviceAccount(250, 950),
            accountreader.DeviceAccount(0, 5),
        )


def test_both_languages_mean_the_same_bytes(compile_c: Program) -> None:
    constants = json.loads(subprocess.check_output([compile_c("tests/region_layout.c")]))
    assert constants == {name: getattr(accountreader, name) for name in constants}
    assert {name for name in vars(accountreader) if re.fullmatch("[A-Z_]+", name)} == set(constants)
    assert constants["REGION_BYTES"] == REGION_BYTES


def test_what_is_not_in_the_folder_is_made_where_the_session_may_write(
    start: Callable[..., Tool], folder: Path
) -> None:
    written = folder / "written"
    written.mkdir()
    for name in ("accounting", "log"):
        (folder / name).unlink()
    one, other = start(), start()
    assert one.ask("reserve 0 1000 1500") == "granted"
    assert other.ask("reserve 0 1000 1500") == "over", "both count in one account"
    made = (written / "accounting").stat()
    assert (made.st_size, made.st_blocks * 512, made.st_mode & 0o777) == (2 << 20, 2 << 20, 0o666)
    # A link that the session has put there leads nowhere.
    (written / "accounting").unlink()
    (written / "accounting").symlink_to(folder / "elsewhere")
    assert start().ask("reserve 0 1 1500") == "refused"
    assert not (folder / "elsewhere").exists()
    assert "is a link" in (written / "log").read_text()
