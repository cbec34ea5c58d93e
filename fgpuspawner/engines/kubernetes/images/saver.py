"""Sessions saved as images of a registry: what has changed in a pod, as one layer on top of the image that it runs.

No engine commits pods, and none is needed: the registry has all other layers, and takes them over by their digests. What
has changed is found beside a pod of the same image in which nobody works. Both list their files; on one node they share
those of the image, down to the instant of their last change.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fgpu_scheduler import MIB, PrivateImage
from fgpuspawner.concurrency.waiting import to_the_end
from fgpuspawner.engines import marks
from fgpuspawner.engines.base import CannotSave, EngineSilent, SavedImage, SaveSpec
from fgpuspawner.engines.kubernetes import endings
from fgpuspawner.engines.kubernetes.api import Api, Exited, Manifest, Refused
from fgpuspawner.engines.kubernetes.images import changes as changed
from fgpuspawner.engines.kubernetes.images.changes import Changes, Who
from fgpuspawner.engines.kubernetes.images.layer import Layer, wanted
from fgpuspawner.engines.kubernetes.images.registry import (
    DIGEST,
    INDEXES,
    LAYERS,
    REPOSITORY,
    Access,
    Name,
    Registries,
)
from fgpuspawner.engines.kubernetes.pods import CONTAINER, owned
from fgpuspawner.images.recipe import (
    DPKG,
    MOST_BYTES,
    Base,
    not_written,
    packages_changed,
    read_changes,
    written,
)
from fgpuspawner.images.saved import instant, is_server_apart, labels_of, own_labels

log = logging.getLogger("fgpu.images")

INSIDE = Path(__file__).with_name("inside.py").read_text()
SH = "/bin/sh"
SHELL = """
python=$(command -v /opt/fgpu/bin/python3 || command -v python3 || command -v python) || exit 127
if [ "$0" = root ] && sudo -n true 2>/dev/null; then exec sudo -n env HOME="$HOME" "$python" -I -S -c "$@"; fi
exec "$python" -I -S -c "$@"
"""
"""The server's own Python first, and nothing else by a search path: its folders are the session's, and the list of the
image is believed. Where somebody else's image has put a shell of its own is not looked."""
MOST_LIST_BYTES = 2**29
LISTED_WITHIN_S = 600.0
SILENT_S = 120.0
UP_WITHIN_S = 120.0
MOST_AT_ONCE = 4
HELPER_S = 1800
"""A pod that a killed Hub has left ends after so long; it is gone with the session's."""
LOOK_EVERY_S = 0.3
NOT_FOUND, CONFLICT = 404, 409
MARK = "fgpu.save"
KEPT_OF_POD = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "tolerations",
)
"""What the pod beside a session's has of it: where it runs, as whom, and how it is kept apart, as there may be programs
of a user who was root in its image. No volume, no token; and no GPU, of which an image may ask for all."""


@dataclass(frozen=True, slots=True)
class _Base:
    """The image that a session runs, as its registry has it."""

    name: Name
    kind: str
    manifest: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def layers(self) -> list[dict[str, Any]]:
        """Its layers, as its manifest has them."""
        return list(self.manifest["layers"])


def target_of(repository: str) -> Name | None:
    """Return what the setting names: a repository with its registry's host; None where it names nothing of the kind."""
    host, slash, path = repository.partition("/")
    plain = slash and REPOSITORY.fullmatch(path) and (set(".:") & set(host) or host == "localhost")
    return Name(host, path) if plain else None


def reference_of(repository: str, image_id: str) -> str:
    """Return what a pod calls a saved image: by its digest, so a new name makes no difference."""
    return f"{repository}@{image_id}"


class ImageSaver:
    """The private images of one installation, in one repository."""

    def __init__(
        self,
        api: Api,
        *,
        pods: str,
        installation: str,
        target: Name,
        access: Access,
        architecture_of: Callable[[str], str],
    ) -> None:
        self._api = api
        self._pods = pods
        self._installation = installation
        self._target = target
        self._access = access
        self._architecture_of = architecture_of
        self._room = asyncio.Semaphore(MOST_AT_ONCE)

    def _tagged(self, image: PrivateImage) -> Name:
        return self._target.at(f"{self._installation}-{image.id}")

    def _registries(self, *others: Name) -> Registries:
        pull = [f"repository:{name.repository}:pull" for name in others]
        return Registries(self._access, [f"repository:{self._target.repository}:pull,push,delete", *pull])

    # -- making one -----------------------------------------------------------------------------------

    async def save(self, spec: SaveSpec) -> SavedImage:
        """See `Engine.save_image`."""
        async with self._room:
            return await self._made(spec)

    async def _made(self, spec: SaveSpec) -> SavedImage:
        session = spec.session
        try:
            name = marks.name_of(self._installation, session.id, session.attempt)
            pod = await self._api.ask("GET", f"{self._pods}/{name}")
            container, status = _container(pod), _status(pod)
            if endings.how_it_ended(pod) is not None or not endings.is_running(pod):
                raise CannotSave("the session has ended")
            source = _source(container, status, under_id=spec.under_id)
            async with self._registries(source) as registries:
                base = await _base_of(
                    registries, source, str(status["imageID"]), self._architecture_of(pod["spec"]["nodeName"])
                )
                # Before anything is looked for: a registry that takes nothing says so at once.
                await registries.digest_of(self._tagged(spec.image))
                return await self._saved(spec, pod, base, registries)
        except Refused as e:
            raise CannotSave(f"the cluster refuses: {e}", may_pass=e.status >= 500) from e

    async def _saved(self, spec: SaveSpec, pod: Manifest, base: _Base, registries: Registries) -> SavedImage:
        session = f"{self._pods}/{pod['metadata']['name']}"
        as_root = may_become_root(_container(pod))
        await asyncio.to_thread(spec.note, "what has changed is being looked for")
        async with self._helper(spec.image, pod) as helper:
            who, found = await self._changes(pod, helper, session, as_root=as_root)
            recipe = await self._recipe(spec, base, helper, session, found)
        await asyncio.to_thread(spec.check, found.size_bytes)
        target = self._tagged(spec.image)
        await asyncio.to_thread(spec.note, "the registry takes over what the session was started from")
        for below in base.layers:
            await _have(registries, target, base.name, below)
        await asyncio.to_thread(
            spec.note, f"{max(1, -(-found.size_bytes // MIB))} MiB are being sent to the registry"
        )
        layer = Layer(found)
        content = self._content(session, found, as_root=as_root)
        async with contextlib.aclosing(content):
            await registries.upload(target, layer.pieces(content), lambda: layer.digest)
        labels = labels_of(spec.image, self._installation, int(time.time()))
        config = configuration(base.config, layer.diff_id, labels=labels, made_at_s=int(time.time()))
        digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
        await registries.upload(target, _once(config), lambda: digest)
        manifest = manifest_of(base, config=(digest, len(config)), layer=(layer.digest, layer.packed_bytes))
        await registries.put(target, manifest, base.kind)
        kept = (
            not as_root and who.user != 0 and is_server_apart(base.config.get("config") or {}, home=who.home)
        )
        return SavedImage(f"sha256:{hashlib.sha256(manifest).hexdigest()}", found.size_bytes, recipe, kept)

    async def _changes(
        self, pod: Manifest, helper: str, session: str, *, as_root: bool
    ) -> tuple[Who, Changes]:
        mounts = [str(mount["mountPath"]) for mount in _container(pod).get("volumeMounts") or ()]
        skipped = sorted({*changed.SKIPPED, *(mount.rstrip("/") or "/" for mount in mounts)})
        # On disk: a large image has hundreds of thousands of files.
        with tempfile.TemporaryFile() as before, tempfile.TemporaryFile() as now:
            await self._listed(helper, skipped, before, as_root=as_root)
            await self._listed(session, skipped, now, as_root=as_root)
            return await asyncio.to_thread(_compared, before, now, skipped)

    async def _listed(self, pod: str, skipped: Sequence[str], file: BinaryIO, *, as_root: bool) -> None:
        status = None
        try:
            async with asyncio.timeout(LISTED_WITHIN_S):
                pieces = self._api.printed(pod, CONTAINER, _command("list", *skipped, as_root=as_root))
                async with contextlib.aclosing(pieces):
                    async for piece in pieces:
                        if isinstance(piece, Exited):
                            status = piece.status
                        else:
                            file.write(piece)
                        if file.tell() > MOST_LIST_BYTES:
                            raise CannotSave("the session has more files than are looked at; remove some")
        except TimeoutError as e:
            raise CannotSave("the session's files could not be looked at in time", may_pass=True) from e
        if status != 0:
            raise CannotSave(
                "the session's files could not be looked at: its image needs sh and Python", may_pass=True
            )
        file.seek(0)

    async def _content(self, session: str, found: Changes, *, as_root: bool) -> AsyncGenerator[bytes]:
        files = await asyncio.to_thread(lambda: json.dumps(list(wanted(found))).encode("ascii"))
        if not any(entry.has_content for entry in found.entries):
            return
        said = b"%d\n%s" % (len(files), files)
        pieces = self._api.printed(session, CONTAINER, _command("pack", as_root=as_root), said=said)
        async with contextlib.aclosing(pieces):
            while True:
                try:
                    async with asyncio.timeout(SILENT_S):
                        piece = await anext(pieces, None)
                except TimeoutError as e:
                    raise CannotSave("the session does not give its files", may_pass=True) from e
                if isinstance(piece, bytes):
                    yield piece
                elif isinstance(piece, Exited) and piece.status == 0:
                    return
                else:
                    raise CannotSave(
                        f"the session's files could not all be read{_last(piece)}", may_pass=True
                    )

    async def _recipe(self, spec: SaveSpec, base: _Base, helper: str, session: str, found: Changes) -> str:
        config = base.config.get("config") or {}
        named = Base(str(base.name), base.name.which, str(config.get("User") or "root"), pinned=True)
        try:
            apt: tuple[dict[str, str], list[str]] = ({}, [])
            if DPKG in found.kinds:
                apt = packages_changed(*[await self._file(pod, DPKG) for pod in (helper, session)])
            plain = {path.encode("utf-8", "replace").decode(): kind for path, kind in found.kinds.items()}
            told = await asyncio.to_thread(read_changes, plain, *apt)
            return written(told, named, name=spec.image.name, before=spec.recipe)
        except ValueError as e:
            return not_written(e, named, name=spec.image.name, before=spec.recipe)

    async def _file(self, pod: str, path: str) -> bytes:
        command = _command("read", path, str(MOST_BYTES + 1), as_root=False)
        answer = await self._api.run(pod, CONTAINER, command, most_bytes=MOST_BYTES)
        if answer.status != 0 or len(answer.output) > MOST_BYTES:
            raise ValueError(f"{path} cannot be read, or is larger than {MOST_BYTES} bytes")
        return answer.output

    # -- the pod beside it ----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _helper(self, image: PrivateImage, pod: Manifest) -> AsyncIterator[str]:
        """Have a pod of the session's image, on its node; give its path."""
        name = f"fgpu-{self._installation}-save-{image.id}"
        path = f"{self._pods}/{name}"
        await self._gone(path)
        try:
            await to_the_end(self._api.ask("POST", self._pods, body=owned(helper_pod(name, pod), pod)))
            until = time.monotonic() + UP_WITHIN_S
            while True:
                found = await self._api.ask("GET", path)
                if endings.is_running(found):
                    break
                trouble, ended = endings.why_not_up(found), endings.how_it_ended(found)
                why = trouble.message if trouble else ended.message if ended else "it does not come up"
                if ended or time.monotonic() > until:
                    raise CannotSave(
                        f"no pod of the session's image could be started beside it: {why}", may_pass=True
                    )
                await asyncio.sleep(LOOK_EVERY_S)
            if _status(found)["imageID"] != _status(pod)["imageID"]:
                raise CannotSave(
                    "the session's node has another image under its name by now; start the session again"
                )
            yield path
        finally:
            with contextlib.suppress(Refused, EngineSilent):
                await to_the_end(self._delete(path))

    async def _delete(self, path: str) -> None:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 1}
        await self._api.ask("DELETE", path, body=body)

    async def _gone(self, path: str) -> None:
        """Have no such pod: a Hub that was killed may have left one."""
        with contextlib.suppress(Refused):
            await self._delete(path)
            until = time.monotonic() + UP_WITHIN_S
            while time.monotonic() < until:
                await self._api.ask("GET", path)
                await asyncio.sleep(LOOK_EVERY_S)

    # -- ends -----------------------------------------------------------------------------------------

    async def delete(self, image: PrivateImage) -> None:
        """See `Engine.delete_image`."""
        name = self._tagged(image)
        try:
            async with self._registries() as registries:
                digest = image.image_id or await registries.digest_of(name)
                if digest is not None and not await registries.delete(name.at(digest)):
                    log.warning(
                        "Image %s stays in the registry, which deletes none: %s", image.name, name.at(digest)
                    )
        except CannotSave as e:
            raise EngineSilent(str(e)) from e


def may_become_root(container: Mapping[str, Any]) -> bool:
    """Return whether a session's programs may be root's, where its pod does not say otherwise. Pure."""
    context = container.get("securityContext") or {}
    return context.get("allowPrivilegeEscalation") is not False or bool(context.get("privileged"))


def helper_pod(name: str, pod: Manifest) -> dict[str, Any]:
    """Return a pod of a session's image, on its node and as its user, in which nothing runs. Pure."""
    given, own = _container(pod), pod["spec"]
    digest = _status(pod)["imageID"].rpartition("@")[2]
    image = str(given["image"])
    if DIGEST.fullmatch(digest) and "@" in _status(pod)["imageID"]:
        image = str(Name.read(image).at(digest))
    environment = [e for e in given.get("env") or () if e["name"] in ("HOME", "PATH") and "value" in e]
    environment.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    # Policies of the network go by labels. By its marks it would be a session's.
    ours = (marks.INSTALLATION, marks.SESSION, marks.ATTEMPT)
    labels = {k: v for k, v in (pod["metadata"].get("labels") or {}).items() if k not in ours}
    container = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [SH, "-c", f"exec /bin/sleep {HELPER_S}"],
        "env": environment,
        "resources": {
            "limits": {"cpu": "1", "memory": "512Mi"},
            "requests": {"cpu": "0", "memory": "0"},
        },
        **({"securityContext": given["securityContext"]} if given.get("securityContext") else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {**labels, MARK: "true"}},
        "spec": {
            **{key: own[key] for key in KEPT_OF_POD if own.get(key)},
            "restartPolicy": "Never",
            "activeDeadlineSeconds": HELPER_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
        },
    }


def configuration(
    base: Mapping[str, Any], diff_id: str, *, labels: Mapping[str, str], made_at_s: int
) -> bytes:
    """Return an image's configuration: the base's, with one layer more. Nothing of a session is in it. Pure."""
    own = dict(base.get("config") or {})
    own["Labels"] = own_labels(own.get("Labels") or {}) | dict(labels)
    step = {"created": instant(made_at_s), "created_by": "saved from a session", "comment": "fgpuspawner"}
    found = {
        **{key: base[key] for key in ("architecture", "os", "variant", "os.version") if key in base},
        "created": instant(made_at_s),
        "config": own,
        "rootfs": {"type": "layers", "diff_ids": [*base["rootfs"]["diff_ids"], diff_id]},
        "history": [*(base.get("history") or ()), step],
    }
    return json.dumps(found, sort_keys=True).encode()


def manifest_of(base: _Base, *, config: tuple[str, int], layer: tuple[str, int]) -> bytes:
    """Return the manifest of an image: the base's, with one layer more. Pure."""
    kinds = {"schemaVersion": 2, "mediaType": base.kind}
    described = {"mediaType": base.manifest["config"]["mediaType"], "digest": config[0], "size": config[1]}
    last = {"mediaType": LAYERS[base.kind], "digest": layer[0], "size": layer[1]}
    return json.dumps({**kinds, "config": described, "layers": [*base.layers, last]}, sort_keys=True).encode()


def _compared(before: BinaryIO, now: BinaryIO, skipped: Sequence[str]) -> tuple[Who, Changes]:
    who = changed.who(before)
    changed.who(now)
    without = [*skipped, who.home]
    return who, changed.compared(who, changed.records(before, without), changed.records(now, without))


def _command(*words: str, as_root: bool) -> list[str]:
    return [SH, "-c", SHELL, "root" if as_root else "user", INSIDE, *words]


async def _once(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


def _last(exited: Exited | None) -> str:
    """Return the last line that a command wrote, which is the session's: one line, and not long."""
    lines = (exited.words if exited is not None else "").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ": " + "".join(c if c.isprintable() else "?" for c in last) if last else ""


def _container(pod: Manifest) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(c for c in pod["spec"]["containers"] if c["name"] == CONTAINER)
    return found


def _status(pod: Manifest) -> Mapping[str, Any]:
    every = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((s for s in every if s["name"] == CONTAINER), {"imageID": ""})


def _source(container: Mapping[str, Any], status: Mapping[str, Any], *, under_id: str | None) -> Name:
    """Return what the session runs, by its registry's name, and by its digest where its node knows that."""
    digest = str(status["imageID"]).rpartition("@")[2]
    if under_id is not None and digest != under_id:
        raise CannotSave(
            "the image that the session runs has another name, or is gone; start it again to save it"
        )
    name = Name.read(str(container["image"]))
    return name.at(digest) if "@" in str(status["imageID"]) and DIGEST.fullmatch(digest) else name


async def _base_of(registries: Registries, name: Name, running: str, architecture: str) -> _Base:
    """Return what a registry has of an image that runs.

    Raises:
        CannotSave: it has none of that name, another one, or of a kind to which no layer can be added.
    """
    digest, manifest, kind = await registries.manifest(name)
    if kind in INDEXES:
        chosen = [
            one
            for one in manifest.get("manifests") or ()
            if (one.get("platform") or {}).get("os") == "linux"
            and (one.get("platform") or {}).get("architecture") == architecture
        ]
        if not chosen:
            raise CannotSave(f"{name} has no image for {architecture} machines")
        digest, manifest, kind = await registries.manifest(name.at(str(chosen[0]["digest"])))
    try:
        if kind not in LAYERS:
            raise CannotSave(f"{name} is of the kind {kind[:100]}, to which no layer can be added")
        own = str(manifest["config"]["digest"])
        config = json.loads(await registries.blob(name, own))
        layers = manifest["layers"]
        if len(layers) != len(config["rootfs"]["diff_ids"]):
            raise ValueError("layers")
        if any(not DIGEST.fullmatch(layer["digest"]) for layer in layers):
            raise ValueError("digests")
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise CannotSave(f"{name} is no image in its registry") from e
    # One that did not come from a registry is known to its node by its configuration.
    if "@" not in running and running.rpartition("//")[2] != own:
        raise CannotSave(
            f"the session runs another image than {name} in its registry; push it, and start the session again"
        )
    return _Base(name.at(digest), kind, manifest, config)


async def _have(registries: Registries, target: Name, source: Name, layer: Mapping[str, Any]) -> None:
    """Have a repository have a layer; of what may be had elsewhere only it takes nothing."""
    digest = str(layer["digest"])
    if layer.get("urls") or await registries.has_blob(target, digest):
        return
    if source.host != target.host or not await registries.mount(target, digest, source):
        await registries.copy(target, digest, source)
