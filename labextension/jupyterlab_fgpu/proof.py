"""fgpu-verify, run for the panel: one at a time, and within limits of time and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from . import verify
from .start import TOKENS

WITHIN_S = 180.0
CHECK_WITHIN_S = 20
END_WITHIN_S = 2.0
MOST_BYTES = 256 * 1024
MOST_TEXT = 500
STATES = {verify.PROVED: "held", verify.FAILED: "failed", verify.BYPASSED: "bypassed"}


class Proof:
    """The last run, shared by all tabs."""

    def __init__(self, *, within_s: float = WITHIN_S, program: str = verify.__file__) -> None:
        self._within_s = within_s
        self._program = program
        self._running: asyncio.Task[None] | None = None
        self._last: dict[str, Any] = {"state": "none", "at_s": None, "checks": [], "problem": None}

    def begin(self) -> dict[str, Any]:
        """Begin a run, unless one is under way; return `last_run`."""
        if self._running is None or self._running.done():
            self._last = {**self._last, "state": "running", "at_s": int(time.time())}
            self._running = asyncio.get_running_loop().create_task(self._run())
        return self.last_run()

    def last_run(self) -> dict[str, Any]:
        """Return `state` (none, running, held, failed, unknown), `at_s`, `checks` and `problem`."""
        return dict(self._last)

    async def _run(self) -> None:
        found: dict[str, Any] = {"state": "unknown", "checks": [], "problem": None}
        try:
            checks = await self._checks()
            held = all(check["state"] != "failed" for check in checks)
            found.update(state="held" if held else "failed", checks=checks)
        except (OSError, ValueError) as error:
            found["problem"] = str(error)[:MOST_TEXT]
        self._last = {**found, "at_s": int(time.time())}

    async def _checks(self) -> list[dict[str, str]]:
        """Run the program; raises ValueError with a sentence if it gives no result."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(self._program).resolve()),
            "--json",
            f"--timeout={CHECK_WITHIN_S}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in TOKENS},
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            out, said = await asyncio.wait_for(
                asyncio.gather(_read(process.stdout), _read(process.stderr)), self._within_s
            )
        except asyncio.TimeoutError:
            raise ValueError(f"fgpu-verify gave no answer in {self._within_s:g} s.") from None
        finally:
            await _end(process)
        try:
            return _shown(json.loads(out))
        except (ValueError, KeyError, TypeError, RecursionError):
            words = said.decode("utf-8", "replace").strip().split("\n")[-1]
            raise ValueError(words or "fgpu-verify said nothing that can be shown.") from None


async def _end(process: asyncio.subprocess.Process) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), END_WITHIN_S)


async def _read(stream: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while piece := await stream.read(65536):
        found += piece[: MOST_BYTES - len(found)]
    return bytes(found)


def _shown(told: Any) -> list[dict[str, str]]:
    checks = [
        {
            "name": str(check["name"])[:MOST_TEXT],
            "what": str(check["what"])[:MOST_TEXT],
            "state": STATES.get(check["verdict"], "not tried"),
            "text": str(check["text"])[:MOST_TEXT],
        }
        for check in told["checks"]
    ]
    if not checks:
        raise ValueError("no checks")
    return checks
