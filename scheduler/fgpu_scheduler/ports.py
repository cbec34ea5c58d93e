"""What the scheduler asks of the world: the time, the devices, and who starts and stops sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fgpu_scheduler.core.model import Session
from fgpu_scheduler.core.reconcile import Observed


class Clock(Protocol):
    """The time. Injected, so that tests and the simulator own it."""

    def now_s(self) -> int:
        """Return the instant as integer UTC seconds."""


class SystemClock:
    """The machine's own clock."""

    def now_s(self) -> int:
        """Return the instant as integer UTC seconds."""
        return int(time.time())


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """A GPU as a probe reports it, before the administrator's unit is known."""

    uuid: str
    index: int
    model: str
    memory_mib: int
    simulated: bool = False


class DeviceProbe(Protocol):
    """Lists the GPUs of this machine."""

    def devices(self) -> tuple[FoundDevice, ...]:
        """Return the GPUs in order of their index; empty only if there truly is none.

        Raises:
            ProbeFailed: the GPUs could not be read.
        """


class Seen(NamedTuple):
    """What a launcher sees: everything with this installation's marks on the nodes that answered."""

    things: Sequence[Observed]
    nodes: Sequence[str]
    late: Sequence[str] = ()
    """Nodes that have not answered yet, and may: nothing is concluded of them."""


class Launcher(Protocol):
    """Sees and removes what sessions were launched as (containers, processes)."""

    def watch(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called, in the running event loop, when something has ended. It may be called for nothing."""

    async def observe(self) -> Seen:
        """Look. What is late delays nothing of the others: `watch`'s ``changed`` is called when it has answered."""

    async def remove(self, observed: Observed) -> bool:
        """Stop and remove it; return whether it is known to be gone. Idempotent."""


class Activity(Protocol):
    """Knows who works in which session."""

    async def idle_since(self, sessions: Sequence[Session]) -> Mapping[int, int | None]:
        """Return since when (UTC seconds) the GPU and the kernels of each are both idle, by the session's id.

        None, or no entry, where one of them is not, or where that is not known.
        """
