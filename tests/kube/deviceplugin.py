"""A device plugin for tests: the kubelet has its cards as ``nvidia.com/gpu``, and pods get them as of NVIDIA's runtime.

The messages of the kubelet's API (v1beta1) are few, and are written here by hand: fields of bytes, each with its number.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

RESOURCE = "nvidia.com/gpu"
SOCKET = "fgpu-test.sock"
PLUGINS = "var/lib/kubelet/device-plugins"
"""Where every kubelet has its socket, whatever its own folder is; tests/kube/cluster.sh has that below its ``own``."""
MEMORY_MIB = 8192
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
KIND = "k8s.device-plugin.nvidia.com/gpu"
# In a container NVIDIA's own program sees the container's cards alone: the first is 0, whichever it is.
SMI = f"""#!/bin/sh
[ -e "/run/cards/$NVIDIA_VISIBLE_DEVICES" ] || {{ echo "No devices were found"; exit 6; }}
echo "0, $NVIDIA_VISIBLE_DEVICES, Test GPU, {MEMORY_MIB}"
"""


def field(number: int, value: bytes | str) -> bytes:
    """Return one field of a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    """Return a number as messages have it."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a message that has none but of bytes."""
    at = 0
    while at < len(message):
        key, at = number(message, at)
        assert key & 7 == 2, "a field of bytes"
        length, at = number(message, at)
        yield key >> 3, message[at : at + length]
        at += length


def number(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place of a message, and the place after it."""
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not message[at - 1] & 0x80:
            return value, at


class DevicePlugin:
    """Cards of one node, in ``folder``, which pods can read. They come and go while it runs.

    With ``cdi`` it names devices of its own CDI specification, as NVIDIA's does with "cdi-cri", and sets no variable.
    Pods then also get the files of ``driver``, a simulated machine, and can write its ledger.
    """

    def __init__(
        self, folder: Path, cards: Sequence[str], *, cdi: bool = False, driver: Path | None = None
    ) -> None:
        self._driver = driver
        own = Path(os.environ["FGPU_TEST_KUBECONFIG"]).parent / "own" / PLUGINS
        self._plugins = Path(os.environ.get("FGPU_TEST_DEVICE_PLUGINS", own))
        self._cdi = own.parents[3] / "cdi" if cdi else None
        self._cards = dict.fromkeys(cards, HEALTHY)
        self._there = folder / "cards"
        self._smi = folder / "nvidia-smi"
        self._news = threading.Condition()
        self._over = False
        self._there.mkdir(parents=True)
        self._smi.write_text(SMI)
        self._smi.chmod(0o755)
        for card in cards:
            (self._there / card).touch()
        # Pods' users are not the test's.
        for path in (folder, *folder.parents[:3]):
            path.chmod(path.stat().st_mode | 0o055)
        self._server: grpc.Server | None = None

    def _specify(self, folder: Path) -> None:
        """Write the CDI specifications: the plugin's own, and the toolkit's for programs that manage GPUs."""
        folder.mkdir(exist_ok=True)
        devices = []
        for card in self._cards:
            smi = self._smi.with_name(f"nvidia-smi-{card}")
            smi.write_text(SMI.replace("$NVIDIA_VISIBLE_DEVICES", card))
            smi.chmod(0o755)
            mounts = [(smi, "/usr/bin/nvidia-smi"), (self._there, "/run/cards")]
            edits: list[dict[str, Any]] = [
                {"hostPath": str(path), "containerPath": at} for path, at in mounts
            ]
            for path in () if self._driver is None else sorted(self._driver.iterdir()):
                options = ["rbind", "rw" if path.name in ("ledger", "log") else "ro"]
                edits.append(
                    {"hostPath": str(path), "containerPath": f"{LIBRARIES}/{path.name}", "options": options}
                )
            variables = ["NVIDIA_VISIBLE_DEVICES=void"]
            devices.append({"name": card, "containerEdits": {"env": variables, "mounts": edits}})
        for name, spec in (
            ("plugin", {"kind": KIND, "devices": devices}),
            ("management", {"kind": "management.nvidia.com/gpu", "devices": [{**devices[0], "name": "all"}]}),
        ):
            (folder / f"{name}.json").write_text(json.dumps(spec))

    def start(self) -> DevicePlugin:
        """Serve, and tell the kubelet."""
        if self._cdi is not None:
            self._specify(self._cdi)
        (self._plugins / SOCKET).unlink(missing_ok=True)
        self._over = False
        self._server = grpc.server(ThreadPoolExecutor(8))
        one = grpc.unary_unary_rpc_method_handler
        served = {
            "GetDevicePluginOptions": one(lambda asked, context: b""),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list),
            "Allocate": one(self._allocate),
            "PreStartContainer": one(lambda asked, context: b""),
        }
        handler = grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", served)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(f"unix:{self._plugins / SOCKET}")
        self._server.start()
        with grpc.insecure_channel(f"unix:{self._plugins / 'kubelet.sock'}") as channel:
            register = channel.unary_unary("/v1beta1.Registration/Register")
            register(
                field(1, "v1beta1") + field(2, SOCKET) + field(3, RESOURCE), timeout=10, wait_for_ready=True
            )
        return self

    def stop(self) -> None:
        """End, as a plugin that is updated does: its node has no card then."""
        with self._news:
            self._over = True
            self._news.notify_all()
        if self._server is not None:
            self._server.stop(1).wait(10)
        (self._plugins / SOCKET).unlink(missing_ok=True)

    def add(self, card: str) -> None:
        """Have one more card."""
        (self._there / card).touch()
        self._tell(card, HEALTHY)

    def call_unhealthy(self, card: str) -> None:
        """Report a GPU as unhealthy while its driver still answers."""
        self._tell(card, UNHEALTHY)

    def lose(self, card: str) -> None:
        """Have a card fall off: neither the plugin nor the driver knows it."""
        (self._there / card).unlink()
        self._tell(card, None)

    def _tell(self, card: str, health: str | None) -> None:
        with self._news:
            self._cards.pop(card, None)
            if health is not None:
                self._cards[card] = health
            self._news.notify_all()

    def _list(self, asked: bytes, context: Any) -> Iterator[bytes]:
        while True:
            with self._news:
                if self._over:
                    return
                cards = dict(self._cards)
            yield b"".join(field(1, field(1, card) + field(2, health)) for card, health in cards.items())
            with self._news:
                self._news.wait_for(lambda told=cards: self._over or self._cards != told)

    def _allocate(self, asked: bytes, context: Any) -> bytes:
        answer = b""
        for _, container in fields(asked):
            cards = [card.decode() for _, card in fields(container)]
            if self._cdi is not None:
                devices = ",".join(f"{KIND}={card}" for card in cards)
                note = field(1, "nvidia.cdi.k8s.io/nvidia-device-plugin") + field(2, devices)
                answer += field(1, field(4, note))
                continue
            given = ",".join(cards)
            variable = field(1, field(1, "NVIDIA_VISIBLE_DEVICES") + field(2, given))
            mounts = (("/usr/bin/nvidia-smi", self._smi), ("/run/cards", self._there))
            # The last is a number: read-only.
            mounted = b"".join(
                field(2, field(1, at) + field(2, str(path)) + b"\x18\x01") for at, path in mounts
            )
            answer += field(1, variable + mounted)
        return answer
