"""The sessions page beside its table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import ALICE, SITE, Build, node, shown

from fgpu_scheduler import (
    NodeState,
)
from fgpuspawner.service.api.capacity import capacity_object
from fgpuspawner.service.api.session_objects import sessions_object
from fgpuspawner.service.model import Viewer
from fgpuspawner.service.pages.sessions_view import new_session_url


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (["READY", "READY"], ""),
        (["READY", "CORDONED"], ""),
        (
            ["LOST"],
            "The machine of this group does not answer. What runs there keeps its share; what waits starts elsewhere, or "
            "when it is back.",
        ),
        (
            ["READY", "LOST", "READY"],
            "1 of the 3 machines of this group does not answer. What runs there keeps its share; what waits starts "
            "elsewhere, or when it is back.",
        ),
        (
            ["GONE", "LOST", "READY"],
            "2 of the 3 machines of this group do not answer. What runs there keeps its share; what waits starts "
            "elsewhere, or when it is back.",
        ),
    ],
)
def test_users_are_told_of_lost_machines(states: list[str], words: str) -> None:
    nodes = [replace(node(f"n{i}"), state=NodeState(state)) for i, state in enumerate(states)]
    world = Build(*nodes).world()
    assert shown(world, ALICE).lost == words
    (group,) = capacity_object(world, ALICE, fgpu_step_milli=100)["groups"]
    assert group["nodes_lost"] == sum(state in ("LOST", "GONE") for state in states)


def test_new_session_takes_the_first_free_server() -> None:
    def url(*servers: str) -> str | None:
        build = Build()
        for server in servers:
            build.pending("alice", 100, server=server)
        world = build.world()
        live = sessions_object(world.snapshot.sessions, world, ALICE, SITE)["sessions"]
        return new_session_url(live, ALICE, "/")

    assert url() == "/hub/spawn"
    assert url("gpu-1") == "/hub/spawn"
    assert url("") == "/hub/spawn/alice/gpu-1"
    assert url("", "gpu-1", "gpu-3") == "/hub/spawn/alice/gpu-2"
    assert new_session_url([], Viewer(None), "/") is None
