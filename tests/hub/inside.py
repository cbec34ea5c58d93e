"""Programs inside a session that runs as a local process: they have the environment of its server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil

from fgpu_scheduler import Session
from hubprocess import HubProcess

CUDA = """
import ctypes, signal, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status:
        print(name, status, flush=True)
        sys.exit(status)
context, device = ctypes.c_void_p(), ctypes.c_int()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
def take(mib):
    pointer = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(mib * 2**20))
    return pointer
"""
HOLD = CUDA + "taken = take(int(sys.argv[1]))\nprint('taken', flush=True)\nsignal.pause()\n"


def server_of(session: Session, hub: HubProcess) -> psutil.Process:
    """Return the process that the Hub noted as the session's server."""
    note = hub.data / "run" / f"{session.id}-{session.attempt}@local"
    return psutil.Process(int(note.read_text()))


class Inside:
    """Runs programs in sessions. What still runs is ended by `close`."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def popen(
        self, hub: HubProcess, session: Session, *command: str, without: str = ""
    ) -> subprocess.Popen[str]:
        env = {k: v for k, v in server_of(session, hub).environ().items() if k != without}
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=hub.folder,
            start_new_session=True,
        )
        self._running.append(child)
        return child

    def run(self, hub: HubProcess, session: Session, *command: str, without: str = "") -> tuple[int, str]:
        child = self.popen(hub, session, *command, without=without)
        output, _ = child.communicate(timeout=120)
        return child.returncode, output

    def holding(
        self, hub: HubProcess, session: Session, mib: int, *, without: str = ""
    ) -> subprocess.Popen[str]:
        """Return a program that holds so much GPU memory."""
        child = self.popen(hub, session, sys.executable, "-c", HOLD, str(mib), without=without)
        assert child.stdout is not None
        assert child.stdout.readline() == "taken\n"
        return child

    def close(self) -> None:
        for child in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
