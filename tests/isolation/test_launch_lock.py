"""The lock that each launch takes: its first thread has it with plain stores, until another wants it."""

from __future__ import annotations

import subprocess

import pytest
from sessionfolders import MakePath

SOURCES = ("tests/lock_turns.c", "libfgpu/lock.c", "libfgpu/clock.c")


def take_turns(compile_c: MakePath, *arguments: str) -> tuple[int, int, int]:
    """Return how often the lock was taken, how often it counted that, and how often its first thread lost it."""
    done = subprocess.run(
        [compile_c(*SOURCES, "-pthread"), *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    taken, counted, lost = map(int, done.stdout.split())
    return taken, counted, lost


def test_one_thread_alone_never_loses_the_lock(compile_c: MakePath) -> None:
    taken, counted, lost = take_turns(compile_c, "1", "100")
    assert taken > 1000
    assert (counted, lost) == (taken, 0)


@pytest.mark.parametrize("threads", ["2", "4"])
def test_no_two_threads_have_it_at_once_while_it_changes_hands(compile_c: MakePath, threads: str) -> None:
    taken, counted, lost = take_turns(compile_c, threads, "2000")
    assert counted == taken
    assert lost > 100


def test_nor_where_the_program_has_forbidden_itself_to_ask_the_kernel(compile_c: MakePath) -> None:
    """Then the first thread loses it once, for ever: without the kernel that takes a millisecond."""
    for _ in range(20):
        taken, counted, lost = take_turns(compile_c, "2", "20", "deny")
        assert counted == taken
        assert lost == 1
