"""A container on another machine through which the Hub asks that machine's GPU driver."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest

from fgpu_scheduler import FoundDevice
from fgpuspawner.engines.docker import remote_files
from fgpuspawner.engines.docker.exec import run_in
from fgpuspawner.engines.docker.gpu_requests import all_gpus
from fgpuspawner.isolation import nvml_child
from fgpuspawner.isolation.nvml_reader import NVML, NvmlReader, NvmlUnknown
from fgpuspawner.settings.traits import LARGEST_MIB

AT = "/fgpu"
MACHINE_AT = "/machine"
ASK = 'python=/opt/fgpu/bin/python; [ -x "$python" ] || python=python3; printf "%s\\n" "$1" | "$python" -I -S "$0" "$2"'
MOST_BYTES = 1 << 20
NOBODY = "65534:65534"
UUID = re.compile(r"(?:GPU|MIG)-[!-~]{1,91}")
LONGEST_MODEL = 96
"""As long as NVML's own limit."""


class NoRemoteDriver(NvmlUnknown):
    """No container could be made there; the message is for the log."""


class RemoteDriver:
    """Asks the driver of one node on another machine. Every call blocks."""

    def __init__(
        self,
        client: Callable[[], docker.APIClient],
        *,
        installation: str,
        node_id: str,
        images: Callable[[], Sequence[str]],
        machine: Path | None = None,
    ) -> None:
        self._client = client
        self._installation = installation
        self.name = f"fgpu-{installation}-outpost-{node_id}"
        self._images = images
        #: Folder of the simulated machine, if the node's GPUs are simulated.
        self._machine = machine
        self._making = threading.Lock()

    def devices(self) -> tuple[FoundDevice, ...]:
        """Return the machine's GPUs, as its driver reports them; raises NvmlUnknown if there is no valid answer."""
        answer = self.ask({"do": "devices"})
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

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one question; see nvml_child.py; raises NvmlUnknown if there is none."""
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

    def remove(self) -> None:
        with contextlib.suppress(NotFound):
            self._client().remove_container(self.name, v=True, force=True)

    def _run(self, question: str) -> tuple[int, bytes]:
        library = f"{MACHINE_AT}/libnvidia-ml.so.1" if self._machine else NVML
        words = ["/bin/sh", "-c", ASK, f"{AT}/nvml_child.py", question, library]
        answer = run_in(self._client(), self.name, words, most_bytes=MOST_BYTES)
        return (1 if answer.status is None else answer.status), answer.output

    def _ensure(self) -> None:
        """Ensure a running container with this version's program."""
        client = self._client()
        packed, digest = _packed()
        with contextlib.suppress(NotFound):
            found = client.inspect_container(self.name)
            if (
                found["State"]["Running"]
                and found["Config"]["Labels"].get(f"{remote_files.LABEL}.of") == digest
            ):
                return
            client.remove_container(self.name, v=True, force=True)
        image = self._image(client)
        binds: dict[str, Mapping[str, str]] = {}
        if self._machine is not None:
            volume = remote_files.ship_machine(
                client, image=image, installation=self._installation, folder=self._machine
            )
            binds[volume] = {"bind": MACHINE_AT, "mode": "rw"}
        client.create_container(
            image,
            entrypoint=["/bin/sh", "-c", "while :; do sleep 3600; done"],
            command=[],
            name=self.name,
            user=NOBODY,
            environment={"NVIDIA_DRIVER_CAPABILITIES": "utility"},
            labels={remote_files.LABEL: self._installation, f"{remote_files.LABEL}.of": digest},
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
                device_requests=None if self._machine else [self._gpus(client)],
            ),
        )
        client.put_archive(self.name, "/", packed)
        client.start(self.name)

    @staticmethod
    def _gpus(client: docker.APIClient) -> DeviceRequest:
        request = all_gpus(client.info())
        if request is None:
            raise NoRemoteDriver("the engine has no NVIDIA runtime and no CDI devices")
        return request

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


class RemoteReader(NvmlReader):
    """Asks through the container on the other machine."""

    def __init__(self, driver: RemoteDriver) -> None:
        super().__init__(driver.name)
        self._driver = driver

    def ask_here(self, question: Mapping[str, Any]) -> dict[str, Any]:
        return self._driver.ask(question)

    def close(self) -> None:
        """Keep the container for the next Hub."""


def _packed() -> tuple[bytes, str]:
    source = Path(nvml_child.__file__).read_bytes()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        folder = tarfile.TarInfo(AT[1:])
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
        info = tarfile.TarInfo(f"{AT[1:]}/nvml_child.py")
        info.size, info.mode = len(source), 0o644
        tar.addfile(info, io.BytesIO(source))
    return packed.getvalue(), hashlib.sha256(source).hexdigest()[:16]
