"""The warm pool: containers that have imported the server's modules and wait to become a session's.

1. A warm container has no token, no user's files, no network, and limits that allow no GPU memory.
2. An image's last cold start is its shape: what the engine was asked for, except what can be changed in a running
   container: name, CPU, memory and process limits, network, limits file, homes (`homes.py`).
3. A session with the same shape takes a warm container. It gets all of that first, and then its identity. Any other
   session starts cold. No container is used twice.
4. The request for real GPUs is part of the shape, because it cannot be changed later. So there is a pool for each
   image, node and choice of GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, ImageNotFound, NotFound
from pydantic import TypeAdapter

from fgpu_scheduler import LAUNCHING, FGPUError, Session
from fgpuspawner.concurrency.background import Failures
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own, to_the_end
from fgpuspawner.engines.base import HubSide
from fgpuspawner.engines.docker import handover
from fgpuspawner.engines.docker.client import FAILED, post
from fgpuspawner.engines.docker.containers import LABEL, WARM, Containers
from fgpuspawner.engines.docker.homes import CannotMount, Homes, NotReached, source_of
from fgpuspawner.engines.docker.networks import ENABLE_ICC
from fgpuspawner.engines.docker.warm_shape import (
    CHANGEABLE,
    FOLDER,
    WORDS,
    Recipe,
    Unpoolable,
    files_of,
    shape_of,
    with_sources,
)
from fgpuspawner.isolation.files import write_whole

log = logging.getLogger("fgpu.warm")

AUTO = "auto"
AUTO_MOST = 8
AUTO_WINDOW_S = 300
AUTO_PAST_S = 3600
READY_WITHIN_S = 120
TAKEN_WITHIN_S = 10
LOOK_EVERY_S = 15.0
QUIET_EVERY_S = 0.5
AGAIN_AFTER_S = 30.0
"""After a warm container could not be made."""
WAITING = b"fgpu-start waits for its session"
"""Printed by labextension/jupyterlab_fgpu/start.py."""
CPU_SHARES = 64
"""While it imports: a sixteenth of a session's."""
USUAL_CPU_SHARES = 1024
MOST_DIFFERENT = 3
"""After as many sessions in a row with other shapes no containers are made for the known one."""
FORESEEN = (FGPUError, OSError, *FAILED)

Key = tuple[str, str, tuple[str, ...]]
"""Image, node, and requested real GPUs."""
_NOTES = TypeAdapter(list[tuple[Key, Recipe]])


@dataclass(frozen=True, slots=True)
class Warm:
    """A waiting container."""

    name: str
    id: str
    recipe: Recipe
    mounted: tuple[tuple[str, int, int], ...]
    """Host files and folders mounted in it when it was made: path, device and inode."""


def _gpus_held(session: Session) -> tuple[str, ...]:
    shares = session.placement.shares if session.placement is not None else ()
    return tuple(sorted(share.device_uuid for share in shares))


def busiest(started_at_s: Sequence[int], *, window_s: int) -> int:
    """Return the highest number of starts within one window."""
    ordered = sorted(started_at_s)
    return max(
        (sum(first <= t < first + window_s for t in ordered[n:]) for n, first in enumerate(ordered)),
        default=0,
    )


class WarmPool:
    """The warm containers of this machine's engine."""

    def __init__(
        self,
        containers: Containers,
        hub: HubSide,
        *,
        sizes: Mapping[str, int | str],
        node_ids: Collection[str],
        data: Path,
        is_offered: Callable[[str], bool] = lambda slug: True,
        fetching: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """``node_ids`` are the engine's; ``fetching`` returns the sessions that wait for an image."""
        self._containers = containers
        self._hub = hub
        self._isolation = hub.isolation
        self._sizes = dict(sizes)
        self._node_ids = frozenset(node_ids)
        self._is_offered = is_offered
        self._fetching = fetching
        self._notes = data / "warm.json"
        #: How the last cold session of each kind was made.
        self._recipes: dict[Key, Recipe] = {}
        #: The waiting containers.
        self._ready: dict[Key, list[Warm]] = {}
        #: Sessions in a row with another shape than the recipe's.
        self._different: dict[Key, int] = {}
        #: Image and reason of logged cold starts.
        self._logged: set[tuple[str, str]] = set()
        self._failures: dict[Key, Failures] = {}
        self._homes = Homes(containers.installation)
        #: Whether this Hub can mount homes into running containers, as it has turned out until now.
        self._brings_homes = True
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="fgpu-warm")
        self._wake = asyncio.Event()
        self._opened = False
        #: Part of the last container's name; no earlier Hub has used the next one.
        self._number = int(time.time())
        #: Held while a container and the folder of its homes get another name.
        self._naming = threading.Lock()
        self.network = f"fgpu-{containers.installation}-warm"

    @property
    def _client(self) -> docker.APIClient:
        return self._containers.client

    def wake(self) -> None:
        """Check the pool soon: a session has ended."""
        self._wake.set()

    # -- taking one -----------------------------------------------------------------------------------

    async def take(
        self,
        session: Session,
        kwargs: Mapping[str, Any],
        *,
        image_id: str,
        slice_environment: Mapping[str, str],
        network: str,
    ) -> str | None:
        """Return the id of a warm container that becomes the session's, or None: it must start cold.

        ``kwargs`` are for `create_container`, after `handover.split`. The returned container runs under the session's
        name, with its limits, network and homes, and waits for its identity.
        """
        if session.request.image not in self._sizes or not self._opened:
            return None
        assert session.placement is not None
        gpus = _gpus_held(session) if (kwargs.get("host_config") or {}).get("DeviceRequests") else ()
        if len(gpus) > 1:
            # There are too many combinations of several GPUs to keep containers for each.
            return None
        key = session.request.image, session.placement.node_id, gpus
        folder = self._isolation.folder(session.id)
        folders = {FOLDER: folder, WORDS: self._isolation.words_folder(str(session.id))}
        try:
            shape, homes = shape_of(
                kwargs, image_id=image_id, slice_environment=slice_environment, folders=folders
            )
            if homes and not self._brings_homes:
                raise Unpoolable("it has homes, and this Hub cannot bring them into a running container")
            shared_memory_bytes = (kwargs.get("host_config") or {}).get("ShmSize", 0)
            recipe = Recipe(shape, await self._run(files_of, folder), shared_memory_bytes)
            ready = self._matching(key, recipe)
            if not ready:
                await self._run(self._learn, key, recipe)
                return None
            async with asyncio.timeout(TAKEN_WITHIN_S):
                # In a separate thread: a file server that hangs must only delay its own users.
                sources = await in_a_thread_of_its_own(
                    lambda: [(source_of(self._client, home), home.target) for home in homes]
                )
        except Unpoolable as e:
            if (key[0], str(e)) not in self._logged:
                self._logged.add((key[0], str(e)))
                log.warning("Image %s on %s: sessions start cold: %s", *key[:2], e)
            return None
        except (CannotMount, OSError, *FAILED) as e:
            log.info("Session %d starts cold: %s", session.id, str(e) or "its home does not answer")
            return None
        finally:
            self._wake.set()
        # No await between here and the removal from the list, so no other session takes it.
        warm = next((w for w in self._ready[key] if w in ready), None)
        if warm is None:
            return None
        self._ready[key].remove(warm)
        try:
            async with asyncio.timeout(TAKEN_WITHIN_S):
                await self._run(self._give, warm, session, dict(kwargs), sources, network)
        except (CannotMount, TimeoutError, *FORESEEN) as e:
            log.warning("Session %d starts cold: %s", session.id, e)
            if isinstance(e, NotReached):
                # It would fail for all, and each try costs a warm container.
                self._brings_homes = False
            await self._drop([warm.name, kwargs["name"]])
            return None
        except asyncio.CancelledError:
            # Under its old name nothing would remove it; under the new one the session's end does.
            await self._drop([warm.name])
            raise
        log.info("Session %d takes the warm container %s", session.id, warm.name)
        return warm.id

    def _matching(self, key: Key, wanted: Recipe) -> list[Warm]:
        """Return the waiting containers that suit a session; raises Unpoolable if each session differs."""
        recipe, ready = self._recipes.get(key), self._ready.setdefault(key, [])
        shape = wanted.shape
        if recipe is None or recipe.shape.image_id != shape.image_id or recipe.shape == shape:
            self._different.pop(key, None)
            # Files from the notes can be of another version of this program.
            return [warm for warm in ready if warm.recipe is recipe and recipe.covers(wanted)]
        self._different[key] = self._different.get(key, 0) + 1
        if self._different[key] >= MOST_DIFFERENT:
            known, own = recipe.shape.kwargs, shape.kwargs
            parts = [name for name in sorted({*known, *own}) if known.get(name) != own.get(name)]
            raise Unpoolable(f"they differ from one another in {', '.join(parts) or 'their homes'}")
        return []

    def _learn(self, key: Key, seen: Recipe) -> None:
        known = self._recipes.get(key)
        if known is None or not known.covers(seen):
            self._recipes[key] = seen
            self._write_notes()

    def _give(
        self,
        warm: Warm,
        session: Session,
        kwargs: dict[str, Any],
        homes: Sequence[tuple[Path, str]],
        network: str,
    ) -> None:
        """Turn a warm container into the session's. The name comes last: until then it belongs to no session."""
        if warm.recipe.shape.stamps() != warm.mounted:
            raise CannotMount("files of this host have changed since the container was made")
        state = self._client.inspect_container(warm.id)["State"]
        if not state["Running"]:
            raise CannotMount(f"the warm container {warm.name} has ended")
        if homes:
            self._homes.bring(warm.name, homes, pid=state["Pid"])
        self._isolation.adopt(session.id, warm.name)
        host = kwargs.get("host_config") or {}
        limits = {name: host[name] for name in CHANGEABLE if host.get(name)}
        # docker-py's own `update_container` leaves out the process limit.
        post(self._client, f"/containers/{warm.id}/update", {"CpuShares": USUAL_CPU_SHARES, **limits}).close()
        self._client.connect_container_to_network(warm.id, network)
        with self._naming:
            if homes:
                self._homes.rename(warm.name, kwargs["name"])
            self._client.rename(warm.id, kwargs["name"])

    # -- keeping it full ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Remove what the last run left, then keep the pool full."""
        self._hub.background.every(
            LOOK_EVERY_S,
            self._round,
            failed="The warm pool cannot be looked after",
            again_after_s=AGAIN_AFTER_S,
            wake=self._wake,
            foreseen=FORESEEN,
        )

    async def _round(self) -> None:
        if not self._opened:
            await self._run(self._open)
            self._opened = True
        # Also without a pool, as long as sessions have homes mounted here.
        if self._sizes or self._homes.names():
            await self._fill()

    def close(self) -> None:
        """Remove all waiting containers. Blocks; for the Hub's end."""
        self._opened = False
        self._ready.clear()
        if self._sizes:
            with contextlib.suppress(OSError, *FAILED):
                self._remove_waiting()
                self._client.remove_network(self.network)
                self._sweep_homes()
            self._homes.close()

    def _open(self) -> None:
        self._remove_waiting()
        self._isolation.forget_warm()
        if self._sizes:
            try:
                self._homes.open()
            except CannotMount as e:
                log.warning("Sessions with homes start cold: %s", e)
                self._brings_homes = False
        self._homes.remove([name for name in self._homes.names() if name.startswith(self._prefix)])
        if self._sizes:
            self._read_notes()
            try:
                self._client.inspect_network(self.network)
            except NotFound:
                self._client.create_network(
                    self.network,
                    driver="bridge",
                    internal=True,
                    options={ENABLE_ICC: "false"},
                    labels={f"{LABEL}.installation": self._containers.installation},
                )
        else:
            with contextlib.suppress(NotFound):
                self._client.remove_network(self.network)

    @property
    def _prefix(self) -> str:
        return f"fgpu-{self._containers.installation}-{WARM}-"

    def _names(self) -> list[str]:
        """Return the containers that are or were warm; those of sessions have the session's name."""
        filters = {"label": f"{LABEL}.{WARM}={self._containers.installation}"}
        listed = self._client.containers(all=True, filters=filters)
        # A container in removal may have no name.
        return [entry["Names"][0].removeprefix("/") for entry in listed if entry.get("Names")]

    def _remove_waiting(self) -> None:
        self._remove([name for name in self._names() if name.startswith(self._prefix)])

    async def _fill(self) -> None:
        """Fill every pool. One that cannot be filled does not stop the others."""
        await self._run(self._sweep_homes)
        for key, recipe in list(self._recipes.items()):
            failed = f"A warm container of image {key[0]} on {key[1]} could not be made"
            new = Failures(log, failed, foreseen=(Unpoolable, *FORESEEN))
            failures = self._failures.setdefault(key, new)
            try:
                await self._fill_one(key, recipe)
                failures.worked()
            except Exception as e:
                failures.failed(e)
                if isinstance(e, ImageNotFound):
                    # The next session's launch teaches the new image.
                    self._recipes.pop(key, None)
                    await self._run(self._write_notes)

    async def _fill_one(self, key: Key, recipe: Recipe) -> None:
        useless = recipe.shape.targets and not self._brings_homes
        size = 0 if useless else await self._size(key)
        ready = self._ready.setdefault(key, [])
        stale = [warm for warm in ready if warm.recipe is not recipe] + ready[size:]
        if stale:
            self._ready[key] = ready = [warm for warm in ready if warm not in stale]
            await self._drop([warm.name for warm in stale])
        while (
            len(ready) < size
            and self._recipes.get(key) is recipe
            and self._different.get(key, 0) < MOST_DIFFERENT
        ):
            # Launches of sessions here come first.
            async for _ in self._hub.queue.changes(at_least_every_s=QUIET_EVERY_S):
                if not await self._is_launching():
                    break
            ready.append(await self._run(self._make, key, recipe))
            log.info("A warm container for %s on %s is ready: %d of %d", *key[:2], len(ready), size)

    async def _is_launching(self) -> bool:
        """Return whether a session is starting on this engine, other than waiting for its image."""
        fetching = self._fetching()
        return any(
            s.state in LAUNCHING
            and s.id not in fetching
            and s.placement is not None
            and s.placement.node_id in self._node_ids
            for s in await self._hub.queue.live()
        )

    async def _size(self, key: Key) -> int:
        image, _, gpus = key
        size = self._sizes.get(image, 0) if self._is_offered(image) else 0
        if size != AUTO:
            return int(size)
        since_s = int(time.time()) - AUTO_PAST_S
        ended = await asyncio.to_thread(self._hub.ended, 500)
        started = [
            s.started_at_s
            for s in (*await self._hub.queue.live(), *ended)
            if s.request.image == image
            and s.started_at_s is not None
            and s.started_at_s >= since_s
            and (not gpus or gpus == _gpus_held(s))
        ]
        return min(AUTO_MOST, busiest(started, window_s=AUTO_WINDOW_S))

    def _make(self, key: Key, recipe: Recipe) -> Warm:
        self._number += 1
        name = f"{self._prefix}{self._number}"
        shape, isolation = recipe.shape, self._isolation
        try:
            own = {
                FOLDER: str(isolation.make_warm(name, recipe.files, words=shape.lent_devices())),
                WORDS: str(isolation.words_folder(name)),
            }
            places = self._homes.places(name, len(shape.targets)) if shape.targets else []
            bind = {"Type": "bind", "BindOptions": {"Propagation": "rslave"}}
            homes = [
                {**bind, "Source": str(place), "Target": target}
                for place, target in zip(places, shape.targets, strict=True)
            ]
            kwargs = dict(shape.kwargs)
            kwargs |= {
                "name": name,
                # By id: the name may belong to another image by now.
                "image": shape.image_id,
                "command": handover.waiting((handover.SERVER,), within_s=None),
                "labels": {
                    **kwargs["labels"],
                    f"{LABEL}.installation": self._containers.installation,
                    f"{LABEL}.{WARM}": self._containers.installation,
                    f"{LABEL}.image": key[0],
                    f"{LABEL}.node": key[1],
                },
                # Otherwise a home's mount point would get an anonymous volume.
                "volumes": [v for v in kwargs.get("volumes") or [] if v not in shape.targets] or None,
                "host_config": {
                    **kwargs["host_config"],
                    "NetworkMode": self.network,
                    "CpuShares": CPU_SHARES,
                    "ShmSize": recipe.shared_memory_bytes,
                    "Mounts": [*with_sources(shape.mounts, own), *homes],
                },
            }
            made = self._client.create_container(**kwargs)["Id"]
            self._client.start(made)
            self._wait_until_ready(made)
            self._client.disconnect_container_from_network(made, self.network)
            mounted = shape.stamps()
        except BaseException:
            self._remove([name])
            raise
        return Warm(name, made, recipe, mounted)

    def _wait_until_ready(self, container: str) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while WAITING not in self._client.logs(container, tail=20):
            if not self._client.inspect_container(container)["State"]["Running"]:
                said = self._client.logs(container, tail=5).decode("utf-8", "replace").strip()
                raise Unpoolable(f"it ended: {said[-300:]}")
            if time.monotonic() > deadline:
                raise Unpoolable(f"it was not ready within {READY_WITHIN_S} seconds")
            time.sleep(0.1)

    # -- removing -------------------------------------------------------------------------------------

    async def _drop(self, names: Sequence[str]) -> None:
        with contextlib.suppress(OSError, *FAILED):
            await self._run(self._remove, list(names))

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._client.remove_container(name, v=True, force=True)
            except NotFound:
                pass
            except APIError as e:
                log.warning("The warm container %s could not be removed: %s", name, e.explanation)
                continue
            if name.startswith(self._prefix):
                self._isolation.forget_warm(name)
                if name in self._homes.names():
                    self._homes.remove([name])

    def _sweep_homes(self) -> None:
        with self._naming:
            # In this order: between the two a container may become a session's, with its folder.
            taken = [name for name in self._homes.names() if not name.startswith(self._prefix)]
            there = set(self._names()) if taken else set()
            self._homes.remove([name for name in taken if name not in there])

    # -- notes ----------------------------------------------------------------------------------------

    def _write_notes(self) -> None:
        write_whole(self._notes, _NOTES.dump_json(list(self._recipes.items())), mode=0o600)

    def _read_notes(self) -> None:
        try:
            found = _NOTES.validate_json(self._notes.read_bytes())
            hosts = [r.shape.kwargs["host_config"] for _, r in found if "labels" in r.shape.kwargs]
            if len(hosts) < len(found) or not all({"Binds", "Tmpfs"} <= host.keys() for host in hosts):
                raise ValueError("it is not what a container is made with")
            self._recipes.update(found)
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError) as e:
            # The first line only: the others repeat the file's content.
            why = str(e).partition("\n")[0]
            log.warning("%s is of no use, what is in it is learnt again: %s", self._notes, why)

    async def _run(self, function: Any, *args: Any) -> Any:
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, function, *args))
