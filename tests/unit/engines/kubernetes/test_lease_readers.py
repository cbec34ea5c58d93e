"""What lease pods say of their GPUs: a failure is never read as an unused GPU."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from fgpuspawner.engines.kubernetes import lease_readers
from fgpuspawner.engines.kubernetes.lease_readers import PROGRAM, LeasePodsReader
from fgpuspawner.isolation.nvml_reader import DeviceUse, NvmlUnknown

GPU = "GPU-1"
POD = {"metadata": {"name": "lease-0", "uid": "u1"}, "spec": {"hostPID": True}}
USES = {"devices": {GPU: {"processes": [[7, 1024, 5.0, 5, 7, "python"]], "seen_us": 1, "energy_mj": None}}}
SESSION = "0b9d6c1e-6c2f-4f5e-9d53-111111111111"
OTHER = "0b9d6c1e-6c2f-4f5e-9d53-222222222222"


class Channel:
    """A channel to a program that answers each question as ``say`` does."""

    def __init__(self, say: Callable[[dict[str, Any]], list[tuple[int, bytes]]]) -> None:
        self.say = say
        self.sent: list[bytes] = []
        self.pieces: list[tuple[int, bytes]] = []
        self.closed = False

    async def send_bytes(self, data: bytes) -> None:
        assert data[:1] == b"\0", "stdin"
        self.sent.append(data[1:])
        if data[1:] != PROGRAM:
            self.pieces = self.say(json.loads(data[1:]))

    async def receive(self) -> aiohttp.WSMessage:
        if not self.pieces:
            return aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None)
        stream, piece = self.pieces.pop(0)
        return aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, bytes([stream]) + piece, None)

    async def close(self) -> None:
        self.closed = True


class FakeApi:
    def __init__(self) -> None:
        self.say: Callable[[dict[str, Any]], list[tuple[int, bytes]]] = lambda asked: [line(USES)]
        self.channels: list[Channel] = []

    async def channel(self, pod: str, container: str, words: list[str], *, stdin: bool) -> Channel:
        assert (pod, container, stdin) == ("/pods/lease-0", "lease", True)
        self.channels.append(Channel(self.say))
        return self.channels[-1]


def line(answer: object) -> tuple[int, bytes]:
    return 1, json.dumps(answer).encode() + b"\n"


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


@pytest.fixture
def pods() -> dict[str, Any]:
    return {GPU: POD}


@pytest.fixture
def reader(api: FakeApi, pods: dict[str, Any]) -> Iterator[LeasePodsReader]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield LeasePodsReader("gpu1", api=api, path="/pods", pods=lambda: pods, loop=loop)  # type: ignore[arg-type]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_one_process_in_the_pod_answers_all_questions(api: FakeApi, reader: LeasePodsReader) -> None:
    for _ in range(3):
        use = reader.device_uses([GPU], {})[GPU]
        assert isinstance(use, DeviceUse)
        assert use.processes[0].used_bytes == 1024
    (channel,) = api.channels
    assert channel.sent[0] == PROGRAM


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([(2, b"sh: python3: not found"), (3, b"{}")], "python3: not found"),
        ([], "the connection ended"),
        ([(1, b"x" * 600), (1, b"x" * 600)], "an answer without an end"),
        ([(1, b"no json\n")], "the lease pod lease-0: "),
        ([line({"error": "NVML failed"})], "NVML failed"),
        ([line({"devices": {}})], GPU),
    ],
    ids=["no Python", "cut", "flood", "nonsense", "error", "another device"],
)
def test_a_failing_lease_pod_gives_a_reason_and_is_asked_again_from_the_start(
    api: FakeApi, reader: LeasePodsReader, monkeypatch: pytest.MonkeyPatch, pieces: Any, words: str
) -> None:
    monkeypatch.setattr(lease_readers, "LONGEST_LINE_BYTES", 1000)
    api.say = lambda asked: list(pieces)
    said = reader.device_uses([GPU], {})[GPU]
    assert isinstance(said, str)
    assert words in said
    api.say = lambda asked: [line(USES)]
    for channel in api.channels:
        channel.say = api.say
    assert isinstance(reader.device_uses([GPU], {})[GPU], DeviceUse)


def test_a_lease_that_does_not_see_processes_is_not_asked(
    api: FakeApi, reader: LeasePodsReader, pods: dict[str, Any]
) -> None:
    pods[GPU] = {**POD, "spec": {}}
    assert "was made without measure_gpus" in str(reader.device_uses([GPU], {})[GPU])
    assert "no lease pod holds GPU GPU-9" in str(reader.device_uses(["GPU-9"], {})["GPU-9"])
    assert api.channels == []
    pods.clear()
    with pytest.raises(NvmlUnknown, match="are not there"):
        reader.pods_of([7])


def test_the_outermost_pod_of_a_cgroup_counts(api: FakeApi, reader: LeasePodsReader) -> None:
    systemd = SESSION.replace("-", "_")
    texts = {
        "7": f"0::/../../kubepods-burstable-pod{systemd}.slice/cri-containerd-1.scope\n",
        "8": f"4:memory:/kubepods/burstable/pod{SESSION}/1/pod{OTHER}\n",
        "9": "0::/system.slice/sshd.service\n",
    }
    api.say = lambda asked: [line({"cgroups": {pid: texts[str(pid)] for pid in asked["pids"]}})]
    assert reader.pods_of([7, 8, 9]) == {7: SESSION, 8: SESSION}
