"""Saves sessions as images: makes, names and removes them, one at a time on each daemon, and sweeps after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from typing import Any

import docker
from docker.errors import APIError

from fgpu_scheduler import PrivateImage
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import CannotSave, EngineSilent, HubSide, SavedImage, SaveSpec
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.errors import FAILED
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.images import commit, recipe

log = logging.getLogger("fgpu.images")

SWEEP_EVERY_S = 600.0
AGAIN_AFTER_S = 1.0
SILENT_S = 7200
"""A daemon on a machine that answers may be silent for this long while it copies all that a session wrote."""
DISK_FULL = "no space left"


class ImageSaver:
    """The private images of one installation, on every daemon."""

    def __init__(self, fleet: Fleet, installation: str) -> None:
        self._fleet = fleet
        self._installation = installation
        self._sweeps: dict[Daemon, asyncio.Event] = {}

    async def save(self, spec: SaveSpec) -> SavedImage:
        daemon = self._fleet.find(spec.image.node_id)
        if daemon is None:
            raise CannotSave("the machine that the session was on is not configured any more")
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
        with contextlib.closing(daemon.another_client(timeout_s=SILENT_S)) as client:
            found = client.inspect_container(name)
            commit.refuse_what_cannot_be_saved(found, under_id=spec.under_id)
            spec.check(commit.written_bytes(client, found["Id"]))
            spec.note("what was installed is being recorded")
            text = self._recorded(client, found, spec)
            return commit.commit(
                client,
                name,
                spec.image,
                installation=self._installation,
                recipe=text,
                check=spec.check,
                note=spec.note,
                again=spec.again,
                made_at_s=int(time.time()),
            )

    def _recorded(self, client: Any, container: dict[str, Any], spec: SaveSpec) -> str:
        reference = spec.base.reference if spec.base is not None else str(container["Config"]["Image"])
        base = recipe.base_of(client.inspect_image(container["Image"]), reference)
        helper = commit.helper_of(self._installation, spec.image.id)
        return recipe.recorded(
            client, container["Id"], base, name=spec.image.name, helper=helper, before=spec.recipe
        )

    async def rename(self, image: PrivateImage, reference: str) -> bool:
        """See `Engine.rename_image`. Daemons that know only the old name get a copy when they need it."""
        has = False
        for daemon in self._fleet.answering:
            async with daemon.image_lock:
                has |= await self._call(daemon, commit.add_tag, image, reference)
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
                if not await self._call(daemon, commit.remove, image.reference):
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
                failed=f"Private images that nobody has any more stay on {daemon.address}",
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
        commit.remove_helpers(client, self._installation)
        for name in commit.left_behind(client, self._installation, hub.kept_images):
            log.info("Image %s belongs to nobody any more, and is removed", name)
            commit.remove(client, name)
