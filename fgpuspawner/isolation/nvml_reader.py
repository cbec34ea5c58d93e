"""NVML through a child process with a deadline: a driver that hangs or crashes does not reach the Hub."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from fgpu_scheduler import FGPUError
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own

NVML = "libnvidia-ml.so.1"
ANSWER_WITHIN_S = 30.0
LONGEST_LINE_BYTES = 1 << 22
MOST_LINGERING = 3
"""At this number of children that hang in the driver, none is started."""


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that would load other code into a child."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "CUDA_", "FGPU_", "PYTHON"))}


def child_command(library: str) -> list[str]:
    """Return the command of nvml_child.py: isolated Python without site packages."""
    return [sys.executable, "-I", "-S", str(Path(__file__).with_name("nvml_child.py")), library]


class NvmlUnknown(FGPUError):
    """NVML gave no answer, which does not mean that nothing is used."""

    code = "nvml_unknown"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process holds and uses of a device; None where NVML does not tell.

    ``sm_percent`` is the mean use of the whole GPU since the last snapshot; ``busy_percent`` the highest of any of its
    parts, such as the encoder. ``inner_pid`` is its number inside its session.
    """

    pid: int
    used_bytes: int | None
    sm_percent: float | None
    busy_percent: int | None
    inner_pid: int
    name: str | None


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a device's processes hold and use, the time of the last sample, and the device's energy counter."""

    processes: tuple[ProcessUse, ...]
    seen_us: int = 0
    energy_mj: int | None = None


_Name = Annotated[str, Field(max_length=64)]
_PROCESSES = TypeAdapter(list[tuple[int, int | None, float | None, int | None, int, _Name | None]])


class NvmlReader:
    """Asks one library (the driver's, or a simulated machine's) in a child process that lives while it answers."""

    def __init__(self, library: str, *, within_s: float = ANSWER_WITHIN_S) -> None:
        self.library = library
        self._within_s = within_s
        self._child: subprocess.Popen[bytes] | None = None
        self._lingering: list[subprocess.Popen[bytes]] = []
        self._asking = threading.Lock()

    def device_uses(
        self, uuids: Collection[str], since_us: Mapping[str, int]
    ) -> Mapping[str, DeviceUse | str]:
        """Return what each device's processes hold, and have used since those samples, or why that is unknown. Blocks.

        Raises:
            NvmlUnknown: no device could be read.
        """
        since = {uuid: since_us.get(uuid, 0) for uuid in uuids}
        answer = self.ask_here({"do": "uses", "uuids": sorted(uuids), "since_us": since})
        try:
            return {uuid: _device_use(answer["devices"][uuid]) for uuid in uuids}
        except (KeyError, TypeError, ValueError) as e:
            raise NvmlUnknown(f"{self.library}: an answer that makes no sense ({e!r})") from e

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the child's answer.

        Raises:
            NvmlUnknown: NVML failed, or did not answer in time; the next question starts another child.
        """
        return await in_a_thread_of_its_own(self.ask_here, question)

    def ask_here(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Do as `ask`, and block."""
        with self._asking:
            try:
                answer = json.loads(self._answer(json.dumps(question).encode() + b"\n"))
            except (OSError, ValueError) as e:
                self._abandon()
                raise NvmlUnknown(f"{self.library}: {e}") from e
            if not isinstance(answer, dict) or "error" in answer:
                raise NvmlUnknown(f"{self.library}: {answer}"[:500])
            return answer

    def _answer(self, question: bytes) -> bytes:
        """Return the child's next line; start the child if there is none."""
        if self._child is None:
            self._reap()
            if len(self._lingering) >= MOST_LINGERING:
                raise OSError(f"{len(self._lingering)} processes hang in the driver; no more are started")
            self._child = subprocess.Popen(
                child_command(self.library),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=clean_environment(),
                start_new_session=True,
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(question)
        self._child.stdin.flush()
        deadline, line = time.monotonic() + self._within_s, b""
        output = self._child.stdout.fileno()
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise OSError(f"no answer within {self._within_s:.0f} s")
            piece = os.read(output, 65536)
            if not piece:
                raise OSError("its process ended without an answer")
            line += piece
            if len(line) > LONGEST_LINE_BYTES:
                raise OSError("an answer without an end")
        return line

    def _abandon(self) -> None:
        """Kill the child and forget it. A child that hangs in the driver ends when the driver returns."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            self._lingering.append(child)
            self._reap(wait_s=1)

    def _reap(self, wait_s: float = 0) -> None:
        for child in tuple(self._lingering):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(wait_s)
                self._lingering.remove(child)

    def close(self) -> None:
        """End the child, and with it the wait for its answer."""
        child = self._child
        if child is not None:
            child.kill()
        with self._asking:
            self._abandon()


def _device_use(device: Mapping[str, Any]) -> DeviceUse | str:
    if "error" in device:
        return str(device["error"])[:500]
    processes = tuple(ProcessUse(*row) for row in _PROCESSES.validate_python(device["processes"]))
    energy_mj = device["energy_mj"]
    return DeviceUse(processes, int(device["seen_us"]), None if energy_mj is None else int(energy_mj))
