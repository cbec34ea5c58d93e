"""What another machine says of its GPUs, when it means harm or is broken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fgpuspawner.engines.docker.remote_machine import RemoteDriver
from fgpuspawner.isolation.nvml_reader import NvmlUnknown

GPU = {"uuid": "GPU-1f", "model": "NVIDIA A100", "memory_mib": 40960}


def driver(answer: Any, monkeypatch: pytest.MonkeyPatch) -> RemoteDriver:
    client: Any = object()
    found = RemoteDriver(lambda: client, installation="abc", node_id="far", images=list)
    monkeypatch.setattr(found, "_ensure", lambda: None)
    monkeypatch.setattr(found, "_run", lambda question: (0, json.dumps(answer).encode()))
    return found


def test_valid_devices_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = driver({"devices": [GPU]}, monkeypatch).devices()
    assert (found.uuid, found.memory_mib) == ("GPU-1f", 40960)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"devices": None},
        {"devices": ["GPU-1f"]},
        {"devices": [{**GPU, "memory_mib": "much"}]},
        {"devices": [{**GPU, "memory_mib": float("inf")}]},
        {"devices": [{**GPU, "memory_mib": 2**70}]},
        {"devices": [{**GPU, "memory_mib": -1}]},
        {"devices": [{**GPU, "model": "x" * 10_000}]},
        {"devices": [{**GPU, "uuid": "GPU-1f memory_mib=1\ndevice=GPU-2"}]},
        {"devices": [{**GPU, "uuid": "../../x"}]},
    ],
)
def test_invalid_devices_are_unknown(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NvmlUnknown):
        driver(answer, monkeypatch).devices()
