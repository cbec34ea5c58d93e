"""The scheduler's interfaces to the outside: the clock, the GPUs, and the launcher of sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fgpu_scheduler.core.model import Session
from fgpu_scheduler.core.reconcile import Observed


class Clock(Protocol):
    """The current time; injected, so that tests and the simulator control it."""

    def now_s(self) -> int:
        """Return the current time in whole UTC seconds."""


class SystemClock:
    def now_s(self) -> int:
        return int(time.time())


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A GPU as a probe of `fgpu_scheduler.probes` reports it, before the administrator's unit is known."""

    uuid: str
    index: int
    model: str
    memory_mib: int
    simulated: bool = False


class Seen(NamedTuple):
    """What a launcher observed: everything with this installation's marks on the nodes that answered."""

    things: Sequence[Observed]
    nodes: Sequence[str]
    late: Sequence[str] = ()
    """Nodes that have not answered yet: nothing is concluded about them."""


class Launcher(Protocol):
    """Observes and removes what sessions run in: containers or processes."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` in the running event loop when something ends; extra calls are harmless."""

    async def observe(self) -> Seen:
        """Return what runs now, without waiting for late nodes: when one answers, `watch` calls ``changed``."""

    async def remove(self, observed: Observed) -> bool:
        """Stop and remove it; return whether it is known to be gone. Idempotent."""


class Activity(Protocol):
    """Knows which sessions are idle."""

    async def idle_since(self, sessions: Sequence[Session]) -> Mapping[int, int | None]:
        """Return by session id since when (UTC seconds) both the GPU and the kernels are idle.

        None, or no entry, if one of them is busy or if it is unknown.
        """
