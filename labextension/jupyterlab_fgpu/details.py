"""Details for an open panel or widget: the last minutes, processes with their memory, advice; and
the explanation of a CUDA out-of-memory error.

A part that cannot be read is null, and does not hold back the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any, Callable

from .amounts import in_place, next_larger
from .gpu_memory import Used
from .service_client import ServiceClient, ServiceError, Session

ADVICE_EVERY_S = 600.0
MOST_PROCESSES = 50
MOST_ANCESTORS = 64
NAME_BYTES = 4096
SHOWN_NAME = 200


def held_by(used: tuple[Used, ...], kernels: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the processes that hold memory on the session's devices, the largest first.

    Each with its ``pid``, ``name``, ``memory_mib`` and ``notebook``; None where it is unknown.
    """
    memory: dict[int, int | None] = {}
    for process in (p for device in used for p in device.processes):
        before = memory.get(process.pid, 0)
        memory[process.pid] = None if None in (before, process.mib) else before + process.mib  # type: ignore[operator]
    largest = sorted(memory, key=lambda pid: (-(memory[pid] or 0), pid))[:MOST_PROCESSES]
    return [
        {
            "pid": pid,
            "name": process_name(pid),
            "memory_mib": memory[pid],
            "notebook": notebook_of(pid, kernels),
        }
        for pid in largest
    ]


class DetailsReader:
    """Reads the details of one session; a part that cannot be read is null."""

    def __init__(
        self,
        client: ServiceClient | None,
        kernels: Callable[[], Awaitable[Mapping[int, str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._kernels = kernels
        self._clock = clock
        self._advice: str | None = None
        self._advice_at: float | None = None
        self._ran_out = False

    async def details(self, session: Session | None, used: tuple[Used, ...]) -> dict[str, Any]:
        """Return `history`, `processes` and `advice` of this session."""
        return {
            "history": await self._history(session),
            "processes": held_by(used, await self._kernels()),
            "advice": await self._current_advice(session),
        }

    async def explanation(
        self, session: Session | None, used: tuple[Used, ...], tried_mib: int | None
    ) -> dict[str, Any]:
        """Return the cause of an out-of-memory error in this session, and what would help.

        ``tried_mib`` is what the program asked for beyond what it held, if it said so.
        """
        limit_mib = None if session is None else session["gpu_memory_mib"]
        self._ran_out = True
        known = [u.mib for u in used if u.mib is not None]
        used_mib = sum(known) if known and len(known) == len(used) else None
        return {
            "limit_mib": limit_mib,
            "used_mib": used_mib,
            "tried_mib": tried_mib,
            "processes": held_by(used, await self._kernels()),
            "larger": await self._larger(session, used_mib, tried_mib),
        }

    async def _history(self, session: Session | None) -> dict[str, Any] | None:
        if self._client is None or session is None or session["id"] is None:
            return None
        try:
            return dict(await self._client.history(session["id"]))
        except ServiceError:
            # An older service has none; that the service is gone is told by the status.
            return None

    async def _current_advice(self, session: Session | None) -> str | None:
        if self._client is None or session is None or session["image"] is None or self._ran_out:
            # Advice for less is left out where this amount was too little.
            return None
        now = self._clock()
        if self._advice_at is None or now - self._advice_at >= ADVICE_EVERY_S:
            self._advice_at = now
            try:
                self._advice = await self._client.advice(session["image"])
            except ServiceError:
                self._advice = None
        return self._advice

    async def _larger(
        self, session: Session | None, used_mib: int | None, tried_mib: int | None
    ) -> dict[str, Any] | None:
        if self._client is None or session is None:
            return None
        needed = None if None in (used_mib, tried_mib) else used_mib + tried_mib  # type: ignore[operator]
        try:
            larger = next_larger(session, await self._client.capacity(), needed)
            if larger is None:
                return None
            found: dict[str, Any] = {
                "amount": larger.amount,
                "gpu_memory_mib": larger.gpu_memory_mib,
                "options": larger.options,
                "in_place": in_place(session, larger),
                "starts_now": False,
                "text": None,
            }
            if found["in_place"]:
                return found
            forecast = await self._client.forecast(larger.options, instead_of=session["id"])
        except ServiceError:
            return None
        refusals = [r for r in forecast.get("refusals") or [] if isinstance(r, dict)]
        refused = next((_reason(r) for r in refusals if "message" in r), None)
        found["starts_now"] = forecast.get("starts_now") is True and refused is None
        found["text"] = refused or forecast.get("text")
        return found


def _reason(refusal: dict[str, Any]) -> str:
    """Return a refusal's message without its option's name, which Lab does not use."""
    message, name = str(refusal["message"]), f"{refusal.get('field')}: "
    return message[len(name) :] if message.startswith(name) else message


# ---- processes ---------------------------------------------------------------------------------


async def kernels_of(server_app: Any) -> dict[int, str]:
    """Return the notebook (or the console) of each kernel, by the kernel's process."""
    found = {}
    for session in await server_app.session_manager.list_sessions():
        try:
            kernel = server_app.kernel_manager.get_kernel(session["kernel"]["id"])
        except KeyError:
            continue  # It has ended since.
        pid = getattr(getattr(kernel, "provisioner", None), "pid", None)
        if isinstance(pid, int):
            found[pid] = str(session.get("path") or session.get("name") or "")
    return found


def notebook_of(pid: int, kernels: Mapping[int, str], proc: Path = Path("/proc")) -> str | None:
    """Return the notebook of the kernel that started this process; None: a terminal's, or it
    ended.
    """
    for _ in range(MOST_ANCESTORS):
        if pid in kernels:
            return kernels[pid]
        parent = _parent(pid, proc)
        if parent is None or parent <= 1:
            return None
        pid = parent
    return None


def process_name(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return a process's command in a few words, None where it has ended."""
    try:
        with (proc / str(pid) / "cmdline").open("rb") as file:
            words = file.read(NAME_BYTES).rstrip(b"\0").split(b"\0")
    except OSError:
        return None
    words[0] = os.path.basename(words[0])
    return b" ".join(words).decode("utf-8", "replace")[:SHOWN_NAME] or None


def _parent(pid: int, proc: Path) -> int | None:
    try:
        # The name, in brackets, may hold anything; what follows the last one does not.
        fields = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return int(fields[1])
    except (OSError, ValueError, IndexError):
        return None
