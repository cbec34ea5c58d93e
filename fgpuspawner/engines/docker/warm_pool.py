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
import json
import logging
import os
import posixpath
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
from fgpuspawner.engines.docker.containers import LABEL, WARM, Containers
from fgpuspawner.engines.docker.errors import FAILED
from fgpuspawner.engines.docker.homes import CannotMount, Home, Homes, NotReached, source_of
from fgpuspawner.engines.docker.shared_network import ENABLE_ICC
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
LARGEST_FILE_BYTES = 64 * 1024
MOST_DIFFERENT = 3

CHANGEABLE = ("Memory", "MemorySwap", "CpuPeriod", "CpuQuota", "NanoCpus", "PidsLimit", "CpuShares")
"""Keys of a container's HostConfig that the engine can change while it runs."""
FOLDER, WORDS = "{folder}", "{words}"
"""Placeholders for the session's folder and for its lending folder."""

FORESEEN = (FGPUError, OSError, *FAILED)

Key = tuple[str, str, tuple[str, ...]]
"""Image, node, and requested real GPUs."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the engine is asked for, without what can be changed later.

    ``kwargs`` are docker-py's, with placeholders for the session's own paths. ``targets`` are the paths of homes.
    """

    image_id: str
    kwargs: Mapping[str, Any]
    targets: tuple[str, ...]

    def text(self) -> str:
        """Return a text that is equal for equal shapes."""
        return json.dumps([self.image_id, self.kwargs, self.targets], sort_keys=True)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A shape, and the files of a session's folder before its limits are written."""

    shape: Shape
    files: tuple[tuple[str, int, str | None], ...]
    """Path in the folder, mode, and content (None for a folder)."""
    shared_memory_bytes: int = 0
    """Size of ``/dev/shm``. A larger one does no harm: its content counts as the session's memory."""

    def covers(self, other: Recipe) -> bool:
        """Return whether a container made like this suits a session that would be started like ``other``."""
        same = (self.shape.text(), self.files) == (other.shape.text(), other.files)
        return same and self.shared_memory_bytes >= other.shared_memory_bytes


_NOTES = TypeAdapter(list[tuple[Key, Recipe]])


@dataclass(frozen=True, slots=True)
class Warm:
    """A waiting container."""

    name: str
    id: str
    recipe: Recipe
    mounted: tuple[tuple[str, int, int], ...]
    """Host files and folders mounted in it when it was made: path, device and inode."""


class Unpoolable(Exception):
    """The reason why a session starts cold."""


def shape_of(
    kwargs: Mapping[str, Any], *, image_id: str, told: Mapping[str, str], folders: Mapping[str, Path | None]
) -> tuple[Shape, tuple[Home, ...]]:
    """Return the shape of a container that is about to be made, and its homes. Pure.

    ``folders`` are the session's own, by placeholder.

    Raises:
        Unpoolable: it has something that a running container cannot be given.
    """
    host = dict(kwargs.get("host_config") or {})
    if kwargs.get("networking_config"):
        raise Unpoolable("its network is configured in another way")
    homes, binds = [], []
    for bind in host.pop("Binds", None) or []:
        source, target, mode = (*bind.split(":"), "rw", "rw")[:3]
        if mode == "rw":
            homes.append(Home(source, posixpath.normpath(target)))
        else:
            binds.append(bind)
    targets = [*(home.target for home in homes), *_targets(host, binds)]
    for home in homes:
        # The home's mount would hide it.
        if any(target.startswith(home.target.rstrip("/") + "/") for target in targets):
            raise Unpoolable(f"something else is mounted within {home.target}")
    for name in (*CHANGEABLE, "NetworkMode", "ShmSize"):
        host.pop(name, None)
    environment = {k: v for k, v in (kwargs.get("environment") or {}).items() if k not in told}
    labels = {k: v for k, v in (kwargs.get("labels") or {}).items() if not k.startswith(f"{LABEL}.")}
    own = {
        k: v for k, v in kwargs.items() if k not in ("name", "command", "host_config", "networking_config")
    }
    shaped = {**own, "environment": environment, "labels": labels, "host_config": {**host, "Binds": binds}}
    try:
        text = json.dumps(shaped, sort_keys=True)
    except TypeError:
        raise Unpoolable("its configuration has values that are no JSON") from None
    for word, folder in ((w, f) for w, f in folders.items() if f is not None):
        text = text.replace(f'"{folder}/', f'"{word}/').replace(f'"{folder}"', f'"{word}"')
    return Shape(image_id, json.loads(text), tuple(h.target for h in homes)), tuple(homes)


def _gpus_held(session: Session) -> tuple[str, ...]:
    shares = session.placement.shares if session.placement is not None else ()
    return tuple(sorted(share.device_uuid for share in shares))


def _targets(host: Mapping[str, Any], binds: Sequence[str]) -> list[str]:
    mounts = [str(mount.get("Target", "")) for mount in host.get("Mounts") or []]
    named = [bind.split(":")[1] for bind in binds]
    return [posixpath.normpath(path) for path in (*mounts, *named, *(host.get("Tmpfs") or {}))]


def files_of(folder: Path) -> tuple[tuple[str, int, str | None], ...]:
    """Return the content of a session's folder without its limits.

    Raises:
        Unpoolable: something in it cannot be recreated.
    """
    found: list[tuple[str, int, str | None]] = []
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode & 0o777
        name = str(path.relative_to(folder))
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise Unpoolable(f"{name} in its folder is a link")
        if path.is_dir():
            found.append((name, mode, None))
        elif name != "limits":
            if path.stat().st_size > LARGEST_FILE_BYTES:
                raise Unpoolable(f"{name} in its folder is large")
            found.append((name, mode, path.read_text("ascii")))
    return tuple(found)


def _words_in(shape: Shape) -> int:
    """Return the number of devices with a word in this shape."""
    mounts = shape.kwargs["host_config"].get("Mounts") or []
    return sum(str(mount.get("Source", "")).startswith(f"{WORDS}/") for mount in mounts)


def _stamps(shape: Shape) -> tuple[tuple[str, int, int], ...]:
    """Return path, device and inode of the host's files in this shape, without the session's own."""
    sources = [str(mount.get("Source", "")) for mount in shape.kwargs["host_config"].get("Mounts") or []]
    sources += [bind.split(":")[0] for bind in shape.kwargs["host_config"]["Binds"]]
    found = []
    for source in sorted({s for s in sources if s.startswith("/")}):
        seen = os.stat(source)
        found.append((source, seen.st_dev, seen.st_ino))
    return tuple(found)


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
        self._recipes: dict[Key, Recipe] = {}
        self._ready: dict[Key, list[Warm]] = {}
        self._different: dict[Key, int] = {}
        self._said: set[tuple[str, str]] = set()
        self._failures: dict[Key, Failures] = {}
        self._homes: Homes | None = Homes(containers.installation)
        self._reached = True
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="fgpu-warm")
        self._wake = asyncio.Event()
        self._opened = False
        self._number = int(time.time())
        self._naming = threading.Lock()
        self.network = f"fgpu-{containers.installation}-warm"

    @property
    def _client(self) -> docker.APIClient:
        return self._containers.client

    @property
    def _brings_homes(self) -> bool:
        return self._homes is not None and self._reached

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
        told: Mapping[str, str],
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
        try:
            shape, homes = shape_of(
                kwargs,
                image_id=image_id,
                told=told,
                folders={FOLDER: folder, WORDS: self._isolation.words_folder(str(session.id))},
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
            self._say(key, f"sessions start cold: {e}")
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
                self._reached = False
            await self._drop([warm.name, kwargs["name"]])
            return None
        except asyncio.CancelledError:
            # Under its old name nothing would remove it; under the new one the session's end does.
            await self._drop([warm.name])
            raise
        log.info("Session %d takes the warm container %s", session.id, warm.name)
        return warm.id

    def _matching(self, key: Key, wanted: Recipe) -> list[Warm]:
        recipe, ready = self._recipes.get(key), self._ready.setdefault(key, [])
        shape = wanted.shape
        if recipe is None or recipe.shape.image_id != shape.image_id:
            self._different.pop(key, None)
            return []
        if recipe.shape.text() == shape.text():
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
        if _stamps(warm.recipe.shape) != warm.mounted:
            raise CannotMount("files of this host have changed since the container was made")
        state = self._client.inspect_container(warm.id)["State"]
        if not state["Running"]:
            raise CannotMount(f"the warm container {warm.name} has ended")
        if homes:
            assert self._homes is not None
            self._homes.bring(warm.name, homes, pid=state["Pid"])
        self._isolation.adopt(session.id, warm.name)
        host = kwargs.get("host_config") or {}
        limits = {name: host[name] for name in CHANGEABLE if host.get(name)}
        self._update(warm.id, {"CpuShares": USUAL_CPU_SHARES, **limits})
        self._client.connect_container_to_network(warm.id, network)
        with self._naming:
            if homes:
                assert self._homes is not None
                self._homes.rename(warm.name, kwargs["name"])
            self._client.rename(warm.id, kwargs["name"])

    def _update(self, container: str, limits: Mapping[str, Any]) -> None:
        # docker-py's own method leaves out the process limit.
        client: Any = self._client
        answer = client._post_json(client._url("/containers/{0}/update", container), data=dict(limits))
        client._raise_for_status(answer)

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
        if self._sizes or (self._homes is not None and self._homes.names()):
            await self._fill()

    def close(self) -> None:
        """Remove all waiting containers. Blocks; for the Hub's end."""
        self._opened = False
        self._ready.clear()
        if self._sizes:
            with contextlib.suppress(OSError, *FAILED):
                self._remove(self._waiting())
                self._client.remove_network(self.network)
                self._sweep_homes()
            if self._homes is not None:
                self._homes.close()

    def _open(self) -> None:
        self._remove(self._waiting())
        self._isolation.forget_warm()
        if self._homes is not None and self._sizes:
            try:
                self._homes.open()
            except CannotMount as e:
                log.warning("Sessions with homes start cold: %s", e)
                self._homes = None
        if self._homes is not None:
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

    def _waiting(self) -> list[str]:
        return [name for name in self._names() if name.startswith(self._prefix)]

    def _names(self) -> list[str]:
        filters = {"label": f"{LABEL}.{WARM}={self._containers.installation}"}
        listed = self._client.containers(all=True, filters=filters)
        # A container in removal may have no name.
        return [entry["Names"][0].removeprefix("/") for entry in listed if entry.get("Names")]

    async def _fill(self) -> None:
        """Fill every pool. One that cannot be filled does not stop the others."""
        await self._run(self._sweep_homes)
        for key, recipe in list(self._recipes.items()):
            failures = self._failures.setdefault(
                key,
                Failures(
                    log,
                    f"A warm container of image {key[0]} on {key[1]} could not be made",
                    foreseen=(Unpoolable, *FORESEEN),
                ),
            )
            try:
                await self._fill_one(key, recipe)
                failures.worked()
            except ImageNotFound as e:
                # The next session's launch teaches the new image.
                failures.failed(e)
                self._recipes.pop(key, None)
                await self._run(self._write_notes)
            except Exception as e:
                failures.failed(e)

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
        try:
            folder = self._isolation.make_warm(name, recipe.files, words=_words_in(recipe.shape))
            places = [] if self._homes is None else self._homes.places(name, len(recipe.shape.targets))
            text = json.dumps(dict(recipe.shape.kwargs))
            text = text.replace(f'"{FOLDER}', f'"{folder}')
            text = text.replace(f'"{WORDS}', f'"{self._isolation.words_folder(name)}')
            kwargs = json.loads(text)
            # By id: the name may belong to another image by now.
            kwargs["image"] = recipe.shape.image_id
            host = kwargs["host_config"]
            host |= {
                "NetworkMode": self.network,
                "CpuShares": CPU_SHARES,
                "ShmSize": recipe.shared_memory_bytes,
            }
            host["Mounts"] = [
                *(host.get("Mounts") or []),
                *(
                    {
                        "Type": "bind",
                        "Source": str(place),
                        "Target": target,
                        "BindOptions": {"Propagation": "rslave"},
                    }
                    for place, target in zip(places, recipe.shape.targets, strict=True)
                ),
            ]
            # Otherwise a home's mount point would get an anonymous volume.
            kwargs["volumes"] = [
                v for v in kwargs.get("volumes") or [] if v not in recipe.shape.targets
            ] or None
            labels = {
                f"{LABEL}.installation": self._containers.installation,
                f"{LABEL}.{WARM}": self._containers.installation,
                f"{LABEL}.image": key[0],
                f"{LABEL}.node": key[1],
            }
            kwargs |= {
                "name": name,
                "labels": {**kwargs["labels"], **labels},
                "command": handover.waiting((handover.SERVER,), within_s=None),
            }
            made = self._client.create_container(**kwargs)["Id"]
            self._client.start(made)
            self._wait_until_ready(made)
            self._client.disconnect_container_from_network(made, self.network)
            mounted = _stamps(recipe.shape)
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
                if self._homes is not None and name in self._homes.names():
                    self._homes.remove([name])

    def _sweep_homes(self) -> None:
        if self._homes is None:
            return
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

    def _say(self, key: Key, words: str) -> None:
        if (key[0], words) not in self._said:
            self._said.add((key[0], words))
            log.warning("Image %s on %s: %s", *key[:2], words)

    async def _run(self, function: Any, *args: Any) -> Any:
        return await to_the_end(asyncio.get_running_loop().run_in_executor(self._threads, function, *args))
