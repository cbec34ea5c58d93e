"""Whose processes use the GPUs, where process numbers here may not be the engine's."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fgpuspawner.engines.docker import containers
from fgpuspawner.engines.docker.containers import Containers

ID = "a" * 64


class Engine:
    """One container of session 7, in which the machine's process with this test's number runs."""

    asked = 0

    def containers(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        labels = {"fgpu.installation": "abc", "fgpu.session": "7", "fgpu.attempt": "1"}
        return [{"Id": ID, "Names": ["/fgpu-abc-7-1"], "Labels": labels}]

    def top(self, container: str, ps_args: str) -> dict[str, Any]:
        self.asked += 1
        return {"Processes": [[str(os.getpid())]]}


@pytest.mark.parametrize(("same", "found", "asked"), [(True, {}, 0), (False, {os.getpid(): 7}, 1)])
def test_a_number_that_means_another_process_here_is_asked_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, same: bool, found: dict[int, int], asked: int
) -> None:
    monkeypatch.setattr(containers, "numbers_are_the_hosts", lambda: same)
    engine: Any = Engine()
    assert Containers(engine, installation="abc").sessions_of([os.getpid()]) == found
    assert engine.asked == asked
