"""An event loop with virtual time: it runs step by step on demand, and calls in threads are steps too."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs the tasks of one process, which can be killed between two steps, that is at any await.

    A call in a thread runs in one later step and answers in another; the calls of one executor run one after the other.
    ``takes_s`` draws how long a call takes.
    """

    def __init__(self, began_s: float, takes_s: Callable[[], float]) -> None:
        self._now_s = began_s
        self._takes_s = takes_s
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._numbers = 0
        self._free_at_s: dict[Executor | None, float] = {}
        self._tasks: list[tuple[asyncio.Task[Any], Coroutine[Any, Any, Any]]] = []
        self._killed = False
        self.failures: list[str] = []
        """Exceptions that no task handled."""

    # --- For the simulation ---

    def step(self) -> bool:
        """Run one callback that is due; return whether there was one."""
        while self._timers and self._timers[0][0] <= self._now_s:
            self._ready.append(heapq.heappop(self._timers)[2])
        while self._ready:
            handle = self._ready.popleft()
            if not handle.cancelled():
                asyncio._set_running_loop(self)
                try:
                    handle._run()
                finally:
                    asyncio._set_running_loop(None)
                return True
        return False

    def next_at_s(self) -> float | None:
        """Return when the next callback is due, or None."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._now_s if self._ready else self._timers[0][0] if self._timers else None

    def pass_to(self, at_s: float) -> None:
        """Set the time."""
        self._now_s = max(self._now_s, at_s)

    def kill(self) -> None:
        """Stop at the current step, as after a SIGKILL: no scheduled callback runs."""
        self._killed = True
        self._ready.clear()
        self._timers.clear()
        for _, coroutine in self._tasks:
            coroutine.close()
        self._tasks.clear()

    # --- For asyncio ---

    def time(self) -> float:
        return self._now_s

    def get_debug(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._killed:
            self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._killed:
            self._numbers += 1
            heapq.heappush(self._timers, (when, self._numbers, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks = [(known, its) for known, its in self._tasks if not known.done()]
        self._tasks.append((task, coro))
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._killed:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = self.create_future()
        done_at_s = max(self._now_s, self._free_at_s.get(executor, 0)) + self._takes_s()
        self._free_at_s[executor] = done_at_s
        self.call_at(done_at_s, self._work, answer, func, args)
        return answer

    def _work(self, answer: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
        if answer.cancelled():
            return
        asyncio._set_running_loop(None)
        try:
            found = func(*args)
        except Exception as e:
            self.call_soon(_unless_cancelled, answer, answer.set_exception, e)
        else:
            self.call_soon(_unless_cancelled, answer, answer.set_result, found)
        finally:
            asyncio._set_running_loop(self)


def _unless_cancelled(answer: asyncio.Future[T], tell: Callable[[Any], None], what: object) -> None:
    if not answer.cancelled():
        tell(what)
