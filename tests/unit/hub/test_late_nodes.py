"""Machines that did not answer when the Hub started: they are asked until what they have is offered."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Collection, Mapping

import pytest

from fgpu_scheduler import Node, StoreUnavailable
from fgpuspawner.concurrency.background import Background
from fgpuspawner.hub import late_nodes as module
from fgpuspawner.hub.late_nodes import LateNodes
from fgpuspawner.settings.nodes import Machine

AWAY = Node("away", "default", 1000, 1024, ())
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error", [FULL, StoreUnavailable("the database does not answer"), ValueError("no JSON")]
)
async def test_a_machine_that_cannot_be_taken_in_is_asked_again_and_that_is_said_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.001)
    monkeypatch.setattr(module.log, "propagate", True)
    caplog.set_level(logging.INFO, "fgpu")
    silent, failing, taken = [error, error], [error, error], asyncio.Event()

    def survey(nodes: Collection[str]) -> Mapping[str, Machine | None]:
        if silent:
            raise silent.pop()
        return {node_id: Machine(1000, 1024, ()) for node_id in nodes}

    async def take(node: Node) -> None:
        if failing:
            raise failing.pop()
        assert node == AWAY
        taken.set()

    background = Background(module.log)
    LateNodes(["away"], survey, lambda machines: [AWAY], take).begin(background)
    async with asyncio.timeout(60):
        await taken.wait()
    await background.close()
    why = str(error) if isinstance(error, StoreUnavailable) else repr(error)
    said = [r.getMessage() for r in caplog.records if r.name == "fgpu"]
    assert said == [
        f"Nodes away cannot be asked now: {why}",
        f"Node away answers, and cannot be used yet: {why}",
        "Node away answers: 0 GPUs",
    ]
