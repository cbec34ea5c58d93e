"""Details for an open panel or widget: the last minutes, processes with their memory, advice; and
the explanation of a CUDA out-of-memory error.

A part that cannot be read is null, and does not hold back the others.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Callable

from .gpu_memory import Used
from .kernels import notebook_of, process_name
from .room import in_place, next_larger
from .service_answers import ServiceError, Session
from .service_client import ServiceClient

ADVICE_EVERY_S = 600.0
MOST_PROCESSES = 50


@dataclass(frozen=True)
class Held:
    """One process of this session that holds GPU memory; with its notebook, if known."""

    pid: int
    name: str | None
    memory_mib: int | None
    notebook: str | None


def held_by(used: tuple[Used, ...], kernels: Mapping[int, str]) -> list[Held]:
    """Return the processes that hold memory on the session's devices, the largest first."""
    memory: dict[int, int | None] = {}
    for process in (p for device in used for p in device.processes):
        before = memory.get(process.pid, 0)
        memory[process.pid] = None if None in (before, process.mib) else before + process.mib  # type: ignore[operator]
    found = [
        Held(pid, process_name(pid), mib, notebook_of(pid, kernels)) for pid, mib in memory.items()
    ]
    return sorted(found, key=lambda held: (-(held.memory_mib or 0), held.pid))[:MOST_PROCESSES]


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
            "processes": await self._processes(used),
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
            "processes": await self._processes(used),
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

    async def _processes(self, used: tuple[Used, ...]) -> list[dict[str, Any]]:
        held = held_by(used, await self._kernels())
        return [
            {"pid": h.pid, "name": h.name, "memory_mib": h.memory_mib, "notebook": h.notebook}
            for h in held
        ]

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
            if in_place(session, larger):
                return {
                    "amount": larger.amount,
                    "gpu_memory_mib": larger.gpu_memory_mib,
                    "options": larger.options,
                    "in_place": True,
                    "starts_now": False,
                    "text": None,
                }
            forecast = await self._client.forecast(larger.options, instead_of=session["id"])
        except ServiceError:
            return None
        refusals = forecast.get("refusals") or []
        refused = next(
            (_reason(r) for r in refusals if isinstance(r, dict) and "message" in r), None
        )
        return {
            "amount": larger.amount,
            "gpu_memory_mib": larger.gpu_memory_mib,
            "options": larger.options,
            "in_place": False,
            "starts_now": forecast.get("starts_now") is True and refused is None,
            "text": refused or forecast.get("text"),
        }


def _reason(refusal: dict[str, Any]) -> str:
    """Return a refusal's message without its option's name, which Lab does not use."""
    message, name = str(refusal["message"]), f"{refusal.get('field')}: "
    return message[len(name) :] if message.startswith(name) else message
