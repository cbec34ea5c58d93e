"""All Docker daemons of an installation, used concurrently: a silent one delays no other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fgpu_scheduler import BadSettings, Observed, Seen, Session
from fgpuspawner.engines.base import EngineSilent, ImageStore
from fgpuspawner.engines.docker.client import FAILED
from fgpuspawner.engines.docker.create import UNNAMED
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.images.labels import PRIVATE, SLUG
from fgpuspawner.images.model import FoundImage
from fgpuspawner.settings.nodes import MachineFacts

log = logging.getLogger("fgpu.docker")

LATE_AFTER_S = 1.0
"""How long the answers of the other daemons wait for a late one."""
SWEEP_VOLUMES_EVERY_S = 600.0


class Fleet:
    """The daemons, this machine's own first. Look-ups raise EngineSilent for nodes no longer configured."""

    def __init__(self, daemons: Sequence[Daemon]) -> None:
        self.daemons = tuple(daemons)
        self._by_node = {node_id: daemon for daemon in daemons for node_id in daemon.address.node_ids}
        #: Observations that have not answered in time.
        self._late: dict[Daemon, asyncio.Task[Seen]] = {}
        #: Daemons that answered late the last time: the next observation waits for them.
        self._slow: set[Daemon] = set()
        #: Logged containers that a daemon reported of another machine's node.
        self._not_believed: set[str] = set()

    def connect(self) -> None:
        """Connect to all daemons. Blocks. Those of other machines may be silent.

        Raises:
            BadSettings: this machine's own does not answer.
        """

        def try_to(daemon: Daemon) -> BadSettings | None:
            try:
                daemon.connect()
            except BadSettings as e:
                return e
            return None

        with ThreadPoolExecutor(max(1, len(self.daemons))) as threads:
            troubles = list(threads.map(try_to, self.daemons))
        for daemon, trouble in zip(self.daemons, troubles, strict=True):
            if trouble is not None and not daemon.address.url:
                raise trouble
            if trouble is not None:
                log.error("%s; its nodes take no sessions until it does", trouble)

    def survey(self) -> dict[str, MachineFacts | None]:
        asked = [daemon for daemon in self.daemons if daemon.address.url]
        with ThreadPoolExecutor(max(1, len(asked))) as threads:
            machines = list(threads.map(Daemon.machine, asked))
        return {
            node_id: machine
            for daemon, machine in zip(asked, machines, strict=True)
            for node_id in daemon.address.node_ids
        }

    @property
    def answering(self) -> tuple[Daemon, ...]:
        return tuple(daemon for daemon in self.daemons if daemon.answers)

    def find(self, node_id: str) -> Daemon | None:
        return self._by_node.get(node_id)

    def of_node(self, node_id: str) -> Daemon:
        """Return a node's daemon."""
        daemon = self._by_node.get(node_id)
        if daemon is None:
            raise EngineSilent(f"node {node_id} is no longer configured")
        return daemon

    def of(self, session: Session) -> Daemon:
        """Return the daemon of a placed session."""
        assert session.placement is not None
        return self.of_node(session.placement.node_id)

    def answering_for(self, session: Session) -> Daemon | None:
        """Return the session's daemon; None if it is silent, or its node is no longer configured."""
        assert session.placement is not None
        daemon = self.find(session.placement.node_id)
        return daemon if daemon is not None and daemon.answers else None

    async def observe(self) -> Seen:
        """Return all containers, and the nodes of daemons that answered or are late."""
        tasks: dict[Daemon, asyncio.Task[Seen]] = {}
        for daemon in self.daemons:
            # An observation that started before this call is stale; use only whether the daemon answered.
            if daemon not in self._late:
                tasks[daemon] = asyncio.create_task(daemon.observe())
        patiently = len(self.daemons) == 1 or not self._slow.isdisjoint(tasks)
        if tasks:
            await asyncio.wait(tasks.values(), timeout=None if patiently else LATE_AFTER_S)
        self._slow = set()
        for daemon, task in tasks.items():
            if not task.done():
                self._late[daemon] = task
                task.add_done_callback(functools.partial(self._has_answered, daemon))
        seen = {daemon: task.result() for daemon, task in tasks.items() if task.done()}
        return Seen(
            [
                thing
                for daemon, one in seen.items()
                for thing in one.things
                if self._may_report(daemon, thing)
            ],
            [node_id for one in seen.values() for node_id in one.nodes],
            [node_id for daemon in self._late for node_id in daemon.address.node_ids],
        )

    def _may_report(self, daemon: Daemon, thing: Observed) -> bool:
        """Return whether a daemon may report this: none can report what another machine runs."""
        own = self._by_node.get(thing.node_id, daemon)
        if own is not daemon and thing.handle not in self._not_believed:
            self._not_believed.add(thing.handle)
            words = "%s says that it runs %s of node %s, which is another machine's; that is not believed"
            log.error(words, daemon.address, thing.handle, thing.node_id)
        return own is daemon

    def _has_answered(self, daemon: Daemon, task: asyncio.Task[Seen]) -> None:
        """Ask for a new observation of a daemon that was late, and wait for that one: the daemon may always be slow."""
        del self._late[daemon]
        if task.cancelled() or task.exception() is not None:
            return
        self._slow.add(daemon)
        daemon.changed()

    async def remove(self, observed: Observed) -> bool:
        """Stop and remove one container; return whether it is certainly gone."""
        daemon = next((d for d in self.daemons if d.containers.has_seen(observed)), None)
        if daemon is None:
            return False
        return await daemon.containers.remove_named(observed.handle, now=False)

    def sessions_of(self, pids: Sequence[int], node_id: str | None) -> Mapping[int, int]:
        if node_id is not None:
            return self.of_node(node_id).containers.sessions_of(pids)
        found: dict[int, int] = {}
        for daemon in self.daemons:
            if not daemon.address.is_elsewhere:
                found.update(daemon.containers.sessions_of(pids))
        return found

    def close(self) -> None:
        for daemon in self.daemons:
            daemon.close()


class VolumeSweep:
    """Removes anonymous volumes that a Hub or an engine left when it died. Volumes without our label stay."""

    def __init__(self, fleet: Fleet, installation: str) -> None:
        self._fleet = fleet
        self._installation = installation
        #: The volumes that were unused in the last sweep.
        self._before: dict[Daemon, frozenset[str]] = {}

    async def sweep(self) -> None:
        """Remove volumes that were unused in the last sweep too: a container in creation has its volumes first."""
        for daemon in self._fleet.answering:
            try:
                await daemon.containers.call(self._sweep, daemon)
            except FAILED as e:
                log.warning("Unused volumes are not removed from %s: %s", daemon.address, e)

    def _sweep(self, daemon: Daemon) -> None:
        filters = {"label": f"{UNNAMED}={self._installation}", "dangling": True}
        unused = frozenset(v["Name"] for v in daemon.client.volumes(filters=filters)["Volumes"] or ())
        left = unused & self._before.get(daemon, frozenset())
        for name in sorted(left):
            daemon.client.remove_volume(name)
        if left:
            log.info("Removed %d volumes that ended sessions had left on %s", len(left), daemon.address)
        self._before[daemon] = unused - left


def image_store(daemon: Daemon) -> ImageStore:
    """Return a daemon's images for administrators' commands, under the names of its nodes."""

    def found(one: Mapping[str, Any], labels: Mapping[str, str] | None) -> FoundImage:
        tags = [tag for tag in one.get("RepoTags") or () if tag != "<none>:<none>"]
        digests = [digest for digest in one.get("RepoDigests") or () if not digest.startswith("<none>")]
        return FoundImage(str(one["Id"]), tuple(sorted(tags)), tuple(sorted(digests)), dict(labels or {}))

    def find(reference: str) -> FoundImage | None:
        with contextlib.suppress(*FAILED):
            if daemon.answers:
                one = daemon.client.inspect_image(reference)  # type: ignore[no-untyped-call]
                return found(one, (one.get("Config") or {}).get("Labels"))
        return None

    def labelled() -> Sequence[FoundImage]:
        with contextlib.suppress(*FAILED):
            if daemon.answers:
                images = [
                    found(one, one.get("Labels")) for one in daemon.client.images(filters={"label": SLUG})
                ]
                images = [image for image in images if image.references and PRIVATE not in image.labels]
                return sorted(images, key=lambda image: image.references)
        return ()

    return ImageStore(", ".join(daemon.address.node_ids), find, labelled)
