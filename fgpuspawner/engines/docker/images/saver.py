"""Saves sessions as images: makes, names and removes them, one at a time on each daemon, and sweeps after a crash.

1. ``docker commit`` copies a container's whole configuration: environment, labels and command line stay in the image
   even where they are emptied. So its result is only a carrier of the files, under a separate name.
2. The saved image has the configuration of the session's original image, and the carrier's layers. It is loaded from an
   archive that names these layers without their files: the engine recognises layers that it has by digest.
3. Its id is the digest of its configuration, which is known in advance, so the result can be checked.

The functions block. They raise DockerException if the engine refuses or does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import posixpath
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import docker
from docker.errors import APIError, ImageNotFound, NotFound

from fgpu_scheduler import MIB, PrivateImage, image_prefix_of
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import CannotSave, EngineSilent, HubSide, SavedImage, SaveSpec
from fgpuspawner.engines.docker.client import FAILED, archive_of, written_bytes
from fgpuspawner.engines.docker.containers import LABEL
from fgpuspawner.engines.docker.create import is_root
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.images.inspection import base_of, recorded
from fgpuspawner.images.labels import PRIVATE
from fgpuspawner.images.private import instant, is_server_apart, labels_of, own_labels

log = logging.getLogger("fgpu.images")

PAUSED_WITHIN_S = 600
"""How long a container that something else has paused is waited for; a Hub that died may have left it so."""
LOOK_EVERY_S = 0.5
PAUSE_TRIES = 20
"""On a loaded machine not all processes of a container freeze in time; runc then fails and thaws them."""


SWEEP_EVERY_S = 600.0
AGAIN_AFTER_S = 1.0
SILENT_S = 7200
"""A daemon on a machine that answers may be silent for this long while it copies all that a session wrote."""
DISK_FULL = "no space left"
CONFINED = ("no-new-privileges", "no-new-privileges:true", "no-new-privileges=true")


def carriers_of(installation: str) -> str:
    return f"fgpu-{installation}-carrier"


def helper_of(installation: str, image_id: int) -> str:
    return f"{carriers_of(installation)}-{image_id}"


def refuse_what_cannot_be_saved(container: Mapping[str, Any], *, under_id: str | None = None) -> None:
    """Refuse a container if its home would be in the image, or if it could not have changed anything.

    ``under_id`` is the recorded id of the private image that it was started from: another image may have the name by
    now.

    Raises:
        CannotSave: with words for the owner.
    """
    if not container["State"]["Running"]:
        raise CannotSave("the session has ended")
    if under_id is not None and container["Image"] != under_id:
        raise CannotSave("the session's image was renamed or deleted; start the session again to save it")
    if container["HostConfig"].get("ReadonlyRootfs"):
        raise CannotSave(
            "there is nothing to save: sessions here cannot write outside their volumes (read_only_root)"
        )
    home = _home_of(container)
    targets = [posixpath.normpath(mount["Destination"]) for mount in container.get("Mounts") or []]
    if not any(home == target or home.startswith(target.rstrip("/") + "/") for target in targets):
        raise CannotSave(
            f"the home folder {home} would be in the image, because it is no volume here; an administrator can make it "
            "one (c.FGPUSpawner.volumes)"
        )


def _home_of(container: Mapping[str, Any]) -> str:
    environment = dict(entry.partition("=")[::2] for entry in container["Config"].get("Env") or [])
    return posixpath.normpath(environment.get("HOME") or container["Config"].get("WorkingDir") or "/")


def keeps_its_server(container: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Return whether the server is as in the base: in a separate folder, and the session could not become root. Pure."""
    host = container["HostConfig"]
    confined = not set(CONFINED).isdisjoint(host.get("SecurityOpt") or [])
    as_root = host.get("Privileged") or is_root(str(container["Config"].get("User") or ""))
    return is_server_apart(base["Config"], home=_home_of(container)) and confined and not as_root


def commit(client: Any, container: str, spec: SaveSpec, *, installation: str, recipe: str) -> SavedImage:
    """Make the image under its reference. After a crash it starts over and overwrites what was left.

    The session is paused while the written bytes are checked and the engine copies them, as it could write more in
    between. If this is another try, a Hub that died may have left it paused.

    Raises:
        CannotSave: with words for the owner.
    """
    image, note, made_at_s = spec.image, spec.note, int(time.time())
    found = client.inspect_container(container)
    refuse_what_cannot_be_saved(found)
    base = client.inspect_image(found["Image"])
    carrier = f"{carriers_of(installation)}:{image.id}"
    repository, tag = carrier.split(":")
    if not spec.again:
        _until_not_paused(client, found["Id"])
    with _paused(client, found["Id"], note):
        size = written_bytes(client, found["Id"]) or 0
        spec.check(size)
        note(f"the session is paused while {max(1, -(-size // MIB))} MiB are written")
        client.commit(found["Id"], repository=repository, tag=tag, pause=False)
    try:
        note("the session goes on; its image is put together")
        layers = client.inspect_image(carrier)["RootFS"]["Layers"]
        labels = labels_of(image, installation, made_at_s)
        config = configuration(base, client.history(base["Id"]), layers, labels=labels, made_at_s=made_at_s)
        engines_id = f"sha256:{hashlib.sha256(config).hexdigest()}"
        _load(client, config, layers, image.reference)
        made = client.inspect_image(image.reference)
        if made["Id"] != engines_id:
            raise CannotSave(
                "the Docker engine made another image than it was asked for; ask an administrator"
            )
        size_bytes = max(0, int(made["Size"]) - int(base["Size"]))
        return SavedImage(engines_id, size_bytes, recipe, keeps_its_server(found, base))
    finally:
        # The image has the layers by now. noprune: the base may be kept by the session alone and must stay.
        with contextlib.suppress(ImageNotFound, NotFound):
            client.remove_image(carrier, noprune=True)


def _until_not_paused(client: Any, container: str) -> None:
    deadline = time.monotonic() + PAUSED_WITHIN_S
    while client.inspect_container(container)["State"]["Paused"]:
        if time.monotonic() > deadline:
            client.unpause(container)
        time.sleep(LOOK_EVERY_S)


@contextlib.contextmanager
def _paused(client: Any, container: str, note: Callable[[str], None]) -> Iterator[None]:
    for tries_left in reversed(range(PAUSE_TRIES)):
        if client.inspect_container(container)["State"]["Paused"]:
            break
        try:
            client.pause(container)
            break
        except APIError as e:
            if not tries_left or not e.is_server_error():
                raise
            note("the engine could not pause the session; trying again")
            time.sleep(LOOK_EVERY_S)
    try:
        yield
    finally:
        with contextlib.suppress(APIError):
            client.unpause(container)


def configuration(
    base: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    layers: Sequence[str],
    *,
    labels: Mapping[str, str],
    made_at_s: int,
) -> bytes:
    """Return the image's configuration: the base's, with these layers and labels. Pure."""
    config = {k: v for k, v in base["Config"].items() if k not in ("Hostname", "Domainname", "Image")}
    config["Labels"] = own_labels(config.get("Labels") or {}) | dict(labels)
    created = instant(made_at_s)
    steps = _steps(history, len(base["RootFS"]["Layers"]))
    more = len(layers) - len(base["RootFS"]["Layers"])
    saved = {"created": created, "created_by": "saved from a session", "comment": "fgpuspawner"}
    found = {
        "architecture": base["Architecture"],
        "os": base["Os"],
        "created": created,
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": list(layers)},
        "history": [*steps, *([saved] * more)],
    }
    if base.get("Variant"):
        found["variant"] = base["Variant"]
    return json.dumps(found, sort_keys=True).encode()


def _steps(history: Sequence[Mapping[str, Any]], layers: int) -> list[dict[str, Any]]:
    """Return the base's history with one step for each layer; the engine does not say which steps have one."""
    steps: list[dict[str, Any]] = []
    for entry in reversed(history):
        step: dict[str, Any] = {
            "created": instant(int(entry.get("Created") or 0)),
            "created_by": str(entry.get("CreatedBy") or ""),
        }
        if not entry.get("Size"):
            step["empty_layer"] = True
        steps.append(step)
    if sum("empty_layer" not in step for step in steps) == layers:
        return steps
    return [{"created_by": "a layer of the image that the session ran"} for _ in range(layers)]


def _load(client: Any, config: bytes, layers: Sequence[str], reference: str) -> None:
    name = hashlib.sha256(config).hexdigest()
    # Not in the archive: the engine looks for a layer's file only if it lacks the layer.
    files = [f"{layer.removeprefix('sha256:')}/layer.tar" for layer in layers]
    manifest = [{"Config": f"{name}.json", "RepoTags": [reference], "Layers": files}]
    archive = archive_of({f"{name}.json": config, "manifest.json": json.dumps(manifest).encode()})
    for line in client.load_image(archive, quiet=True):
        if "error" in line:
            raise CannotSave(f"the Docker engine did not take the image: {str(line['error'])[:200]}")


# -- names, and what a crash has left --------------------------------------------------------------------


def _id_of(client: Any, reference: str) -> str | None:
    try:
        return str(client.inspect_image(reference)["Id"])
    except (ImageNotFound, NotFound):
        return None


def add_tag(client: Any, image: PrivateImage, reference: str) -> bool:
    """Give an image another name beside its own, if the engine has it; return whether it has."""
    found = _id_of(client, image.reference) or _id_of(client, reference)
    if found is None or found != image.image_id:
        return False
    repository, tag = reference.rsplit(":", 1)
    client.tag(found, repository, tag=tag, force=True)
    return True


def remove(client: Any, reference: str) -> bool:
    """Remove an image's name, and what only that keeps; return whether it is gone."""
    try:
        client.remove_image(reference, noprune=True)
    except (ImageNotFound, NotFound):
        return True
    except APIError as e:
        log.warning("Image %s cannot be removed now: %s", reference, e.explanation)
        return False
    return True


def remove_helpers(client: Any, installation: str) -> None:
    """Remove containers that a killed Hub left while it saved a session."""
    own = re.compile(rf"/{re.escape(carriers_of(installation))}-[0-9]+")
    # The engine's filter matches anywhere in a name.
    for found in client.containers(all=True, filters={"name": carriers_of(installation)}):
        if any(own.fullmatch(name) for name in found.get("Names") or ()):
            log.info("Container %s was left by a Hub that ended, and is removed", found["Id"][:12])
            try:
                client.remove_container(found["Id"], force=True, v=True)
            except APIError as e:
                log.warning("Container %s cannot be removed now: %s", found["Id"][:12], e.explanation)


def left_behind(client: Any, installation: str, known: Callable[[], Collection[str]]) -> list[str]:
    """Return our images without a row in the database: by name, or by id if they have none.

    ``known`` is asked after the engine, so images made in between stay.
    """
    ours = image_prefix_of(installation), f"{carriers_of(installation)}:"
    names = [name for image in client.images(all=False) for name in image.get("RepoTags") or ()]
    nameless = [
        image_id
        for label in (LABEL, PRIVATE)
        for image_id in client.images(
            filters={"dangling": True, "label": f"{label}.installation={installation}"}, quiet=True
        )
    ]
    wanted = known()
    return [*(name for name in names if name.startswith(ours) and name not in wanted), *nameless]


class ImageSaver:
    """The private images of one installation, on every daemon."""

    def __init__(self, fleet: Fleet, installation: str) -> None:
        self._fleet = fleet
        self._installation = installation
        self._sweeps: dict[Daemon, asyncio.Event] = {}

    async def save(self, spec: SaveSpec) -> SavedImage:
        daemon = self._fleet.find(spec.image.node_id)
        if daemon is None:
            raise CannotSave("the machine that the session was on is no longer configured")
        if not daemon.answers:
            raise EngineSilent(f"{daemon.address} does not answer")
        async with daemon.image_lock:
            try:
                return await in_a_thread_of_its_own(self._saved, daemon, spec)
            except APIError as e:
                text = " ".join(str(e.explanation or e).split())
                if DISK_FULL in text:
                    raise CannotSave("the disk of the session's machine is full; ask an administrator") from e
                raise CannotSave(f"the Docker engine did not save it: {text[:200]}", may_pass=True) from e
            except FAILED as e:
                raise EngineSilent(str(e)) from e

    def _saved(self, daemon: Daemon, spec: SaveSpec) -> SavedImage:
        name = daemon.containers.name(spec.session)
        helper = helper_of(self._installation, spec.image.id)
        with contextlib.closing(daemon.another_client(timeout_s=SILENT_S)) as any_client:
            client: Any = any_client
            found = client.inspect_container(name)
            refuse_what_cannot_be_saved(found, under_id=spec.under_id)
            spec.check(written_bytes(client, found["Id"]) or 0)
            spec.note("what was installed is being recorded")
            reference = spec.base.reference if spec.base is not None else str(found["Config"]["Image"])
            base = base_of(client.inspect_image(found["Image"]), reference)
            text = recorded(
                client, found["Id"], base, name=spec.image.name, helper=helper, before=spec.recipe
            )
            return commit(client, name, spec, installation=self._installation, recipe=text)

    async def rename(self, image: PrivateImage, reference: str) -> bool:
        """See `Engine.rename_image`. Daemons that know only the old name get a copy when they need it."""
        has = False
        for daemon in self._fleet.answering:
            async with daemon.image_lock:
                has |= await self._call(daemon, add_tag, image, reference)
        home = self._fleet.find(image.node_id)
        if not has or (home is not None and not home.answers):
            return False
        for event in self._sweeps.values():
            event.set()
        return True

    async def delete(self, image: PrivateImage) -> None:
        home = self._fleet.find(image.node_id)
        if home is not None and not home.answers:
            raise EngineSilent(f"{home.address} does not answer")
        for daemon in self._fleet.answering:
            async with daemon.image_lock:
                if not await self._call(daemon, remove, image.reference):
                    raise EngineSilent(f"{daemon.address} does not remove it yet")

    async def _call(self, daemon: Daemon, function: Any, *args: Any) -> Any:
        try:
            return await daemon.containers.call(function, daemon.client, *args)
        except FAILED as e:
            raise EngineSilent(str(e)) from e

    # -- what a crash has left, and what was deleted while its daemon was away --------------------------

    def open(self, hub: HubSide) -> None:
        """Sweep every daemon periodically and independently."""
        for daemon in self._fleet.daemons:
            # A rename during a sweep causes another one.
            wake = self._sweeps[daemon] = asyncio.Event()
            hub.background.every(
                SWEEP_EVERY_S,
                functools.partial(self._sweep, daemon, hub),
                failed=f"Deleted private images stay on {daemon.address}",
                again_after_s=AGAIN_AFTER_S,
                wake=wake,
                level=logging.INFO,
            )

    async def _sweep(self, daemon: Daemon, hub: HubSide) -> None:
        if not daemon.answers:
            raise EngineSilent("it does not answer")
        async with daemon.image_lock:
            await self._call(daemon, self._swept, hub)

    def _swept(self, client: docker.APIClient, hub: HubSide) -> None:
        # Helpers first, since their images cannot be removed before. The lock keeps them from being in use.
        remove_helpers(client, self._installation)
        for name in left_behind(client, self._installation, hub.kept_images):
            log.info("Image %s has no owner any longer, and is removed", name)
            remove(client, name)
