"""A simulated machine without libfgpu, for the tests of isolation/simulated/: what the driver itself does."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sessionfolders import write_read_only

LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


@dataclass(frozen=True, slots=True)
class Entry:
    """A device's entry in the ledger (`struct ledger_device`), memory in bytes."""

    uuid: str
    bytes: int
    peak: int
    over: int
    grants: int
    busy_ns: int
    kernels: int
    busy_until: int


@dataclass(frozen=True, slots=True)
class Machine:
    """A folder with the two libraries, `machine`, `log` and, once used, `ledger`."""

    folder: Path
    compile_c: Callable[..., Path]

    def describe(self, text: str) -> None:
        """Write what the machine is."""
        write_read_only(self.folder / "machine", text)

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment in which programs find this driver."""
        return {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | {
            "LD_LIBRARY_PATH": str(self.folder),
            **more,
        }

    def program(self, name: str) -> Path:
        """Compile isolation/tests/NAME.c, linked with the driver."""
        return self.compile_c(f"tests/{name}.c", (self.folder / LIBRARIES[0]).resolve(), "-ldl", "-pthread")

    def run(
        self, name: str, *words: object, before: tuple[str, ...] = (), fails: bool = False, **more: str
    ) -> str:
        """Run a program to its end and return what it printed."""
        command = [*before, str(self.program(name)), *map(str, words)]
        done = self._run(command, **more)
        assert (done.returncode != 0) == fails, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def python(self, text: str, *words: object, before: tuple[str, ...] = (), **more: str) -> str:
        """Run a Python program to its end and return what it printed."""
        done = self._run([*before, sys.executable, "-c", text, *map(str, words)], **more)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    def _run(self, command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
        env = self.environment(**more)
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)

    @contextlib.contextmanager
    def running(
        self, name: str, *words: object, before: tuple[str, ...] = (), **more: str
    ) -> Iterator[Running]:
        """Start a program that prints a line when it is ready and ends with its input; kill it at the end."""
        with subprocess.Popen(
            [*before, str(self.program(name)), *map(str, words)],
            env=self.environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                yield Running(process, process.stdout.readline().strip())
            finally:
                process.kill()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def entries(self) -> list[Entry]:
        """Return the ledger's devices in the order of the machine's lines."""
        data = (self.folder / "ledger").read_bytes()[:16384]
        assert data[:8] == b"simledg1"
        found = []
        for start in range(4096, 4096 + 256 * 32, 256):
            uuid = data[start : start + 96].split(b"\0")[0].decode()
            words = struct.unpack_from("<6Q", data, start + 96)
            (busy_until,) = struct.unpack_from("<Q", data, start + 192)
            found.append(Entry(uuid, *words, busy_until))
        return [entry for entry in found if entry.uuid]


@dataclass(frozen=True, slots=True)
class Running:
    """A program that waits, and the line that it printed first."""

    process: subprocess.Popen[str]
    line: str

    def tell(self, line: object) -> str:
        """Give it a line and return its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()


def machine_at(folder: Path, build: Path, compile_c: Callable[..., Path], text: str) -> Machine:
    """Make a machine's folder."""
    folder.mkdir()
    for name in LIBRARIES:
        (folder / name).symlink_to(build / "simulated" / name)
    (folder / "log").touch()
    machine = Machine(folder, compile_c)
    machine.describe(text)
    return machine


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip where a program's library is not installed."""

    def there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    missing = [name for name in modules if not there(name)]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not installed: pip install '.[test-clients]'"
    )
