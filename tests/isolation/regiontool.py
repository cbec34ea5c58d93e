"""A process of a session, made of libfgpu's accounting alone, that does what a test tells it: region_tool.c."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class Tool:
    """A running process. It is killed, with the children it left, at the end of the block."""

    def __init__(self, program: Path, folder: Path, *, before: Sequence[str] = ()) -> None:
        self.pids: list[int] = []
        self._process = subprocess.Popen(
            [*before, program],
            env=environment(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: str) -> str:
        """Return the reply to a command."""
        self.tell(command)
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def tell(self, command: str) -> None:
        """Give a command, with no wait for its reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def child(self, how: str, *commands: str) -> list[str]:
        """Return a child's replies: of one that stays (fork, clone), or one that is gone (child)."""
        *replies, pid = self.ask(f"{how} {';'.join(commands)}").split(";")
        if how != "child":
            self.pids.append(int(pid))
        return replies

    def kill(self) -> None:
        """Kill it, its children not, and wait until it is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        # No communicate(): its children may have the other end of the pipe.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Tool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.kill()


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a program that is linked with a libfgpu.so: it is the folder's."""
    return os.environ | {"LD_LIBRARY_PATH": str(folder)}
