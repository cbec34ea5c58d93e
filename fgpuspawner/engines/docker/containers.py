"""Observes, identifies, stops and removes the containers of one Docker engine.

A container's name (``fgpu-INSTALLATION-SESSION-ATTEMPT``) and its labels identify it. An image can forge labels, but
not a name. A container without both is left alone; one with both is checked against the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import docker
from docker.errors import APIError, NotFound

from fgpu_scheduler import EndCause, Observed, Session
from fgpuspawner.concurrency.waiting import to_the_end
from fgpuspawner.engines.base import Ended, EngineSilent
from fgpuspawner.engines.docker import remote_machine
from fgpuspawner.engines.docker.client import FAILED, checked_rows, checked_state
from fgpuspawner.engines.docker.endings import how_it_ended, with_last_words
from fgpuspawner.engines.marks import name_of, names_of, session_and_attempt
from fgpuspawner.text.logs import as_text
from fgpuspawner.text.sessions import fgpu_of

T = TypeVar("T")

log = logging.getLogger("fgpu.docker")

LABEL = "fgpu"
WARM = "warm"
"""In the name and a label of a warm container. A session that takes it changes its name and keeps its labels."""
HOSTS_PROCESSES = "pid:[4026531836]"
"""The kernel's fixed name of the initial PID namespace."""

REMOVAL_TIMEOUT_S = 30

THREADS = 16
STOPPERS = 64
"""If all servers of a class ignore the first signal, they still end within about one stop timeout, and delay no start.
"""
LOOKERS = 4
LOG_TAIL_LINES = 20
REMOVED = "the session's container was removed outside JupyterHub"
MOST_ENDS = 1000


class Containers:
    """The containers of one engine. All calls run in its own threads."""

    def __init__(
        self,
        client: docker.APIClient,
        *,
        looker: docker.APIClient | None = None,
        installation: str,
        elsewhere: bool = False,
        stop_timeout_s: int = 10,
    ) -> None:
        self.client = client
        #: A client with a short timeout, for questions.
        self.looker = looker or client
        self.installation = installation
        self._elsewhere = elsewhere
        self.stop_timeout_s = stop_timeout_s
        #: Called after a session's container was removed.
        self.removed: Callable[[], None] = lambda: None
        self.executor = ThreadPoolExecutor(THREADS, thread_name_prefix="fgpu-docker")
        self._stoppers = ThreadPoolExecutor(STOPPERS, thread_name_prefix="fgpu-stop")
        self._lookers = ThreadPoolExecutor(LOOKERS, thread_name_prefix="fgpu-look")
        #: Ids of logged containers with our labels and another name.
        self._ignored: set[str] = set()
        #: Node and name of what the last `look` returned.
        self._seen: frozenset[tuple[str, str]] = frozenset()
        #: How the last ended containers ended, by id.
        self._ends: dict[str, Ended] = {}
        #: Ended containers that we are removing; they are no longer reported.
        self._in_removal: dict[str, asyncio.Task[bool]] = {}

    def name(self, session: Session) -> str:
        return name_of(self.installation, session.id, session.attempt)

    def labels(self, session: Session) -> dict[str, str]:
        """Return the labels that identify the container, and that inform an administrator."""
        assert session.placement is not None
        return {
            f"{LABEL}.installation": self.installation,
            f"{LABEL}.session": str(session.id),
            f"{LABEL}.attempt": str(session.attempt),
            f"{LABEL}.node": session.placement.node_id,
            f"{LABEL}.user": session.request.user,
            f"{LABEL}.server": session.request.server_name,
            f"{LABEL}.image": session.request.image,
            f"{LABEL}.amount": fgpu_of(session) or "",
        }

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a call to the engine in a thread, and wait for it even when cancelled."""
        return await self._in(self.executor, functools.partial(function, *args, **kwargs))

    async def _in(self, threads: ThreadPoolExecutor, call: Callable[[], T]) -> T:
        return await to_the_end(asyncio.get_running_loop().run_in_executor(threads, call))

    async def look(self) -> list[Observed]:
        """Return this installation's containers, and files on another machine that a container left.

        Raises:
            EngineSilent: the engine does not answer.
        """
        filters = {"label": f"{LABEL}.installation={self.installation}"}
        try:
            listed = checked_rows(await self._look("containers", all=True, filters=filters))
            observed = await asyncio.gather(*(self._observed(entry) for entry in listed))
            found = [one for one in observed if one is not None]
            if self._elsewhere:
                found += await self._left_files({one.handle for one in found})
        except FAILED as e:
            raise EngineSilent(str(e)) from e
        self._seen = frozenset((one.node_id, one.handle) for one in found)
        return found

    async def _left_files(self, there: Collection[str]) -> list[Observed]:
        """Return files without a container, as ended containers.

        Files are made before their container and removed after it, so a Hub that dies in between leaves them.
        """
        loop = asyncio.get_running_loop()
        names = await loop.run_in_executor(
            self._lookers, remote_machine.containers_of_volumes, self.looker, self.installation
        )
        return [
            Observed(node_id, *named, name, alive=False, message=REMOVED)
            for name, node_id in sorted(names.items())
            if name not in there and (named := session_and_attempt(name, self.installation)) is not None
        ]

    def has_seen(self, observed: Observed) -> bool:
        """Return whether the last `look` returned it here: another daemon can claim a container of that name."""
        return (observed.node_id, observed.handle) in self._seen

    async def _look(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Query with a short timeout, in threads that do nothing slower."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._lookers, lambda: getattr(self.looker, method)(*args, **kwargs)
        )

    async def _observed(self, entry: dict[str, Any]) -> Observed | None:
        labels = entry.get("Labels") or {}
        name = (entry.get("Names") or ["/"])[0].removeprefix("/")
        named = self._named(entry)
        if named is None:
            if name.startswith(f"fgpu-{self.installation}-{WARM}-"):
                return None
            if entry["Id"] not in self._ignored:
                self._ignored.add(entry["Id"])
                log.warning("Container %s carries our labels, but it is not ours; it is left alone", name)
            return None
        alive = entry.get("State") not in ("exited", "dead", "removing")
        # A container that was never started is listed as alive until it is removed.
        if name in self._in_removal:
            return None
        ended: Ended | None = None
        if not alive:
            try:
                ended = await self._end_of(named[0], entry["Id"])
            except NotFound:
                return None
            except FAILED as e:
                # One broken container does not make its engine, which has just listed it, silent.
                log.warning("Container %s has ended, and the engine does not say how: %s", name, e)
                words = "the session's container ended; its engine does not say how"
                ended = Ended(0, EndCause.EXITED, words)
        node_id = labels.get(f"{LABEL}.node", "")
        if ended is None:
            return Observed(node_id, *named, name, alive)
        return Observed(node_id, *named, name, alive, ended.cause, ended.message)

    async def ended(self, session: Session) -> Ended | None:
        """Return how the session's container ended; None while it runs or the engine does not answer."""
        try:
            container = await self._look("inspect_container", self.name(session))
            state = checked_state(container)
            if state["Running"] or state["Status"] == "created":
                return None
            return await self._end_of(session.id, container["Id"])
        except NotFound:
            return Ended(0, EndCause.EXITED, REMOVED)
        except FAILED as e:
            # Silence is not an end: the share stays held until the engine answers.
            log.warning("Session %d: the engine does not answer: %s", session.id, e)
            return None

    async def _end_of(self, session_id: int, container: str) -> Ended:
        """Return how a container ended, with its last line. Cached, as it does not change."""
        if container not in self._ends:
            found = await self._look("inspect_container", container)
            checked_state(found)
            ended = how_it_ended(found)
            tail = await self.log_tail(container)
            self._ends[container] = with_last_words(ended, tail)
            if len(self._ends) > MOST_ENDS:
                del self._ends[next(iter(self._ends))]
        return self._ends[container]

    async def log(self, session: Session, lines: int) -> bytes | None:
        """Return the last lines of a session's container; None if there is no container."""
        try:
            found: bytes = await self._look("logs", self.name(session), tail=lines)
        except NotFound:
            return None
        except FAILED as e:
            raise EngineSilent("the Docker engine does not answer") from e
        return found or None

    async def log_tail(self, container: str) -> list[str]:
        """Return a container's last lines of output; none if the engine does not answer."""
        try:
            output = await self._look("logs", container, tail=LOG_TAIL_LINES)
        except FAILED:
            return []
        # The owner's programs print them, and they go to the Hub's log, the command line and pages.
        return [as_text(line) for line in output.decode("utf-8", "replace").splitlines() if line.strip()]

    async def remove_named(self, name: str, *, now: bool) -> bool:
        """Stop (unless ``now``) and remove a container; return whether the engine confirms it."""
        gone = await self._removed(name, now=now)
        if gone and self._elsewhere:
            try:
                await self.call(remote_machine.remove_files, self.client, name)
            except FAILED as e:
                log.warning("The files of container %s could not be removed: %s", name, e)
        return gone

    async def _removed(self, name: str, *, now: bool) -> bool:
        try:
            if not now:
                await self.call(self.client.stop, name, timeout=self.stop_timeout_s)
            await self.call(self.client.remove_container, name, v=True, force=True)
        except NotFound:
            return True
        except FAILED as e:
            if isinstance(e, APIError) and e.status_code == HTTPStatus.CONFLICT:
                # Another call removes it already.
                with contextlib.suppress(*FAILED):
                    await self.call(self.client.wait, name, timeout=REMOVAL_TIMEOUT_S, condition="removed")
            else:
                log.warning("Container %s could not be removed: %s", name, e)
        return await self._state(name) is None

    def sessions_of(self, pids: Sequence[int]) -> dict[int, int]:
        """Return the session of each process that runs in one of our containers on the engine's machine."""
        filters = {"label": f"{LABEL}.installation={self.installation}"}
        # Read them before asking the engine: a process may end during that.
        cgroups = (
            {} if self._elsewhere else {pid: text for pid in pids if (text := _cgroup_of(pid)) is not None}
        )
        try:
            sessions = {
                entry["Id"]: named[0]
                for entry in checked_rows(self.client.containers(filters=filters))
                if (named := self._named(entry)) is not None
            }
            found: dict[int, int] = {}
            elsewhere = set(pids) - set(cgroups)
            for pid, text in cgroups.items():
                own = next((i for i in container_ids(text) if i in sessions), None)
                if own is not None:
                    found[pid] = sessions[own]
                elif not numbers_are_the_hosts():
                    elsewhere.add(pid)
            # The rest have ended, or their numbers are of another namespace, in which the engine's processes are
            # invisible.
            if elsewhere:
                for container, session_id in sessions.items():
                    inside = elsewhere.intersection(self._pids_in(container))
                    found.update(dict.fromkeys(inside, session_id))
        except FAILED as e:
            raise EngineSilent(f"the Docker engine does not say whose processes use the GPUs: {e}") from e
        return found

    def _pids_in(self, container: str) -> list[int]:
        try:
            top = self.client.top(container, ps_args="-eo pid")
        except APIError:
            return []
        return [int(row[0]) for row in top.get("Processes") or () if row[0].isdigit()]

    def _named(self, entry: dict[str, Any]) -> tuple[int, int] | None:
        """Return session and attempt of a container that is ours by name and labels, else None."""
        labels = entry.get("Labels") or {}
        named = session_and_attempt((entry.get("Names") or ["/"])[0].removeprefix("/"), self.installation)
        said = labels.get(f"{LABEL}.session"), labels.get(f"{LABEL}.attempt")
        if said == (None, None) and labels.get(f"{LABEL}.{WARM}") == self.installation:
            return named
        return named if named is not None and said == (str(named[0]), str(named[1])) else None

    async def _state(self, name: str) -> dict[str, Any] | None:
        """Return a container's state, {} if it is unknown, None if there is none.

        The engine must confirm an end: something that answers in its place would accept every command.
        """
        try:
            return checked_state(await self.call(self.client.inspect_container, name))
        except NotFound:
            return None
        except FAILED as e:
            log.warning("The state of container %s is unknown: %s", name, e)
            return {}

    async def end_session(self, session: Session, *, now: bool) -> bool:
        """End the containers of every attempt of a session; return whether none is known to run.

        An ended container holds no GPU, CPU or memory. Its removal takes longer and goes on in the background;
        `removed` is called for each.
        """
        names = names_of(self.installation, session)
        return all(await asyncio.gather(*(self._stopped(name, now=now) for name in names)))

    async def _stopped(self, name: str, *, now: bool) -> bool:
        stop = functools.partial(self.client.stop, name, timeout=0 if now else self.stop_timeout_s)
        try:
            # Takes as long as the server, in threads of its own.
            await self._in(self._stoppers, stop)
        except FAILED:
            # There is none, or it must be forced, for example a paused one.
            gone = await self.remove_named(name, now=True)
            self.removed()
            return gone
        state = await self._state(name)
        if state is not None and state.get("Running", True):
            return False
        if name not in self._in_removal:
            going = self._in_removal[name] = asyncio.create_task(self.remove_named(name, now=True))

            def is_removed(_: object) -> None:
                # If that failed, `look` reports it again from now on.
                del self._in_removal[name]
                self.removed()

            going.add_done_callback(is_removed)
        return True


def numbers_are_the_hosts() -> bool:
    """Whether process numbers are the same here as for the engine; not so inside a container."""
    try:
        return os.readlink("/proc/self/ns/pid") == HOSTS_PROCESSES
    except OSError:
        return False


def _cgroup_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return None


def container_ids(cgroup: str) -> list[str]:
    """Return the container ids in a process's ``/proc/PID/cgroup``, version 1 or 2, outermost first."""
    return re.findall(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", cgroup)
