"""What a node on another machine needs there: copies of its sessions' files, and a container that asks its GPU driver.

A container can only mount what is on its own machine. So a session's files are copied into a volume there, and mounted
from the folder in which the engine keeps the volume. What the sessions of a node share (a simulated machine's ledger)
is in a volume of the node, named after its content. Everything blocks. The functions raise `DockerException` if the
engine fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines.docker.client import archive_of, run_in
from fgpuspawner.engines.docker.create import all_gpus
from fgpuspawner.isolation import nvml_child
from fgpuspawner.isolation.base import Mount
from fgpuspawner.isolation.native import WRITTEN_BY_SESSIONS
from fgpuspawner.isolation.nvml_reader import NVML, NvmlReader, NvmlUnknown
from fgpuspawner.settings.traits import LARGEST_MIB

LABEL = "fgpu.files"
"""Not a label that identifies sessions."""
NODE = "fgpu.node"
AT = "/fgpu"
SUFFIX = "-files"


# --- Files ---


def containers_of_volumes(client: docker.APIClient, installation: str) -> dict[str, str]:
    """Return the containers for which files were copied, whether or not they exist, with their nodes."""
    listed = client.volumes(filters={"label": f"{LABEL}={installation}"})["Volumes"] or ()
    return {
        v["Name"].removesuffix(SUFFIX): (v.get("Labels") or {}).get(NODE, "")
        for v in listed
        if v["Name"].endswith(SUFFIX)
    }


def copy_files(
    client: docker.APIClient,
    *,
    container: str,
    image: str,
    installation: str,
    node: str,
    mounts: Sequence[Mount],
    shared: Path,
) -> tuple[Mount, ...]:
    """Copy the sources of ``mounts`` to the engine and return the mounts with their paths there.

    What is below ``shared`` goes into the node's volume, if that is new. ``image`` is any image there: files get into a
    volume through a container of it, which is never started.
    """
    common = [m for m in mounts if m.source.is_relative_to(shared)]
    own = [m for m in mounts if m not in common]
    labels = {LABEL: installation, NODE: node}
    files = {str(n): m.source for n, m in enumerate(own)}
    place = _filled(client, f"{container}{SUFFIX}", image, labels, files)
    found = {m.target: replace(m, source=place / str(n)) for n, m in enumerate(own)}
    if common:
        volume = copy_machine(client, image=image, installation=installation, folder=shared)
        place = Path(client.inspect_volume(volume)["Mountpoint"])
        found |= {m.target: replace(m, source=place / m.source.relative_to(shared)) for m in common}
    return tuple(found[m.target] for m in mounts)


def copy_machine(client: docker.APIClient, *, image: str, installation: str, folder: Path) -> str:
    """Copy a simulated machine to the engine if it is missing, and return its volume."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name not in WRITTEN_BY_SESSIONS:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    volume = f"fgpu-{installation}-machine-{folder.name}-{digest.hexdigest()[:12]}"
    _filled(client, volume, image, {LABEL: installation}, {".": folder})
    return volume


def remove_files(client: docker.APIClient, container: str) -> None:
    """Remove the files of a container that is gone; idempotent."""
    volume = f"{container}{SUFFIX}"
    _remove_container(client, _carrier(volume))
    with contextlib.suppress(NotFound):
        client.remove_volume(volume, force=True)


def _carrier(volume: str) -> str:
    return f"{volume}-carrier"


def _remove_container(client: docker.APIClient, name: str) -> None:
    with contextlib.suppress(NotFound):
        client.remove_container(name, v=True, force=True)


def _filled(
    client: docker.APIClient, volume: str, image: str, labels: dict[str, str], files: dict[str, Path]
) -> Path:
    """Return the engine's folder of a volume with these files; a complete one is reused."""
    carrier = _carrier(volume)
    with contextlib.suppress(NotFound):
        found = client.inspect_volume(volume)
        if _is_complete(client, carrier):
            return Path(found["Mountpoint"])
        client.remove_volume(volume, force=True)
    client.create_volume(volume, labels=labels)
    _remove_container(client, carrier)
    client.create_container(
        image,
        command=["true"],
        name=carrier,
        labels=labels,
        volumes=[AT],
        host_config=client.create_host_config(
            binds={volume: {"bind": AT, "mode": "rw,nocopy"}}, network_mode="none"
        ),
    )
    client.put_archive(carrier, AT, archive_of(files))
    # The carrier's absence marks the volume as complete.
    _remove_container(client, carrier)
    return Path(client.inspect_volume(volume)["Mountpoint"])


def _is_complete(client: docker.APIClient, carrier: str) -> bool:
    try:
        client.inspect_container(carrier)
    except NotFound:
        return True
    except APIError:
        return False
    return False


# --- The GPU driver ---


MACHINE_AT = "/machine"
ASK = 'python=/opt/fgpu/bin/python; [ -x "$python" ] || python=python3; printf "%s\\n" "$1" | "$python" -I -S "$0" "$2"'
MOST_BYTES = 1 << 20
NOBODY = "65534:65534"
UUID = re.compile(r"(?:GPU|MIG)-[!-~]{1,91}")
LONGEST_MODEL = 96
"""As long as NVML's own limit."""


class NoRemoteDriver(NvmlUnknown):
    """No container could be made there; the message is for the log."""


class RemoteDriver(NvmlReader):
    """Asks the driver of one node on another machine, through a container there, which stays for the next Hub."""

    def __init__(
        self,
        client: Callable[[], docker.APIClient],
        *,
        installation: str,
        node_id: str,
        images: Callable[[], Sequence[str]],
        machine: Path | None = None,
    ) -> None:
        self.name = f"fgpu-{installation}-outpost-{node_id}"
        super().__init__(self.name)
        self._client = client
        self._installation = installation
        self._images = images
        #: Folder of the simulated machine, if the node's GPUs are simulated.
        self._machine = machine
        self._making = threading.Lock()

    def devices(self) -> tuple[FoundDevice, ...]:
        """Return the machine's GPUs, as its driver reports them; raises NvmlUnknown if there is no valid answer."""
        answer = self.ask_here({"do": "devices"})
        try:
            found = tuple(
                FoundDevice(str(d["uuid"]), index, str(d["model"]), int(d["memory_mib"]))
                for index, d in enumerate(answer["devices"])
            )
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            raise NvmlUnknown(f"{self.name}: an answer that makes no sense ({e!r})") from e
        if not all(
            UUID.fullmatch(d.uuid) and len(d.model) <= LONGEST_MODEL and 0 < d.memory_mib <= LARGEST_MIB
            for d in found
        ):
            raise NvmlUnknown(f"{self.name}: GPUs that cannot be: {found}"[:500])
        return found

    def ask_here(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            with self._making:
                self._ensure()
            status, output = self._run(json.dumps(question))
            answer = json.loads(output)
        except (DockerException, OSError, ValueError) as e:
            raise NvmlUnknown(f"{self.name}: {e}") from e
        if status != 0 or not isinstance(answer, dict) or "error" in answer:
            raise NvmlUnknown(f"{self.name}: {answer}"[:500])
        return answer

    def close(self) -> None:
        """Keep the container for the next Hub."""

    def remove(self) -> None:
        _remove_container(self._client(), self.name)

    def _run(self, question: str) -> tuple[int | None, bytes]:
        library = f"{MACHINE_AT}/libnvidia-ml.so.1" if self._machine else NVML
        words = ["/bin/sh", "-c", ASK, f"{AT}/nvml_child.py", question, library]
        answer = run_in(self._client(), self.name, words, most_bytes=MOST_BYTES)
        return answer.status, answer.output

    def _ensure(self) -> None:
        """Ensure a running container with this version's program."""
        client = self._client()
        program = Path(nvml_child.__file__).read_bytes()
        labels = {
            LABEL: self._installation,
            f"{LABEL}.of": hashlib.sha256(program).hexdigest()[:16],
        }
        with contextlib.suppress(NotFound):
            found = client.inspect_container(self.name)
            if found["State"]["Running"] and labels.items() <= found["Config"]["Labels"].items():
                return
            _remove_container(client, self.name)
        image = self._image(client)
        binds: dict[str, Mapping[str, str]] = {}
        if self._machine is not None:
            volume = copy_machine(client, image=image, installation=self._installation, folder=self._machine)
            binds[volume] = {"bind": MACHINE_AT, "mode": "rw"}
        client.create_container(
            image,
            entrypoint=["/bin/sh", "-c", "while :; do sleep 3600; done"],
            command=[],
            name=self.name,
            user=NOBODY,
            environment={"NVIDIA_DRIVER_CAPABILITIES": "utility"},
            labels=labels,
            host_config=client.create_host_config(
                binds=binds,
                network_mode="none",
                # NVML reports process numbers as this container sees them, so it must see the machine's.
                pid_mode="host",
                # An engine with user namespaces allows the host's PID namespace only with the host's user namespace.
                userns_mode="host",
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                pids_limit=64,
                mem_limit="256m",
                device_requests=None if self._machine else [_gpus(client)],
            ),
        )
        client.put_archive(self.name, "/", archive_of({f"{AT[1:]}/nvml_child.py": program}))
        client.start(self.name)

    def _image(self, client: docker.APIClient) -> str:
        references = self._images()
        for reference in references:
            with contextlib.suppress(ImageNotFound, NotFound):
                client.inspect_image(reference)  # type: ignore[no-untyped-call]
                return reference
        raise NoRemoteDriver(
            f"{self.name}: none of the catalogue's images is on that engine yet; pull one there, such as "
            f"{references[0] if references else 'the default one'}"
        )


def _gpus(client: docker.APIClient) -> DeviceRequest:
    request = all_gpus(client.info())
    if request is None:
        raise NoRemoteDriver("the engine has no NVIDIA runtime and no CDI devices")
    return request
