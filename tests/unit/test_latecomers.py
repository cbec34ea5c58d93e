"""Machines that did not answer when the Hub started: they are asked until what they have is offered."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Collection, Mapping

import pytest

from fgpu_scheduler import Node, StoreUnavailable
from fgpuspawner.hub import late_nodes as latecomers
from fgpuspawner.hub.late_nodes import take_in
from fgpuspawner.settings.nodes import Machine

AWAY = Node("away", "default", 1000, 1024, ())
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "error", [FULL, StoreUnavailable("the database does not answer"), ValueError("no JSON")]
)
async def test_a_machine_that_cannot_be_taken_in_is_asked_again_and_that_is_said_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(latecomers, "ASK_EVERY_S", 0.001)
    monkeypatch.setattr(latecomers.log, "propagate", True)
    caplog.set_level(logging.INFO, "fgpu")
    silent, failing, taken = [error], [error, error], []

    def survey(nodes: Collection[str]) -> Mapping[str, Machine | None]:
        if silent:
            raise silent.pop()
        return {node_id: Machine(1000, 1024, ()) for node_id in nodes}

    async def take(node: Node) -> None:
        if failing:
            raise failing.pop()
        taken.append(node)

    async with asyncio.timeout(60):
        await take_in(["away"], survey, lambda machines: [AWAY], take)
    assert taken == [AWAY]
    said = [r.getMessage() for r in caplog.records if r.name == "fgpu"]
    assert said == [
        "Nodes away cannot be asked now",
        f"Node away answers, and cannot be used yet: {error}",
        "Node away answers: 0 GPUs",
    ]
