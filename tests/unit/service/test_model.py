"""What a viewer may know of others."""

from __future__ import annotations

from worlds import ADMIN, ALICE, Build, node

from fgpuspawner.service.api.capacity import Amounts, capacity_object, mine_in, queue_object
from fgpuspawner.service.model import Viewer, live_sessions


def test_an_administrator_sees_every_group_and_a_user_their_own() -> None:
    world = Build(node(), node("n2", "class")).world()
    names = [g["name"] for g in capacity_object(world, ADMIN, fgpu_step_milli=100)["groups"]]
    assert names == ["default", "class"]
    assert [g["name"] for g in capacity_object(world, ALICE, fgpu_step_milli=100)["groups"]] == ["default"]
    assert capacity_object(world, ADMIN, fgpu_step_milli=100)["allocatable_overall"]["fgpu"] == "2"


def test_an_ordinary_user_never_gets_names_or_ids_of_others() -> None:
    world = Build().running("alice", 500).running("bob", 500).pending("bob", 2000, server="x").world()
    queue = queue_object("default", world, ALICE)
    assert [(e["mine"], e["id"], e["user"]) for e in queue["entries"]] == [(False, None, None)]
    capacity = capacity_object(world, ALICE, fgpu_step_milli=100)
    assert capacity.model_dump()["groups"][0]["devices"][0]["shares"] == [
        {"fgpu": "0.5", "mine": True, "session_id": 1},
        {"fgpu": "0.5", "mine": False, "session_id": None},
    ]
    assert "bob" not in str((queue, capacity))
    assert [e["user"] for e in queue_object("default", world, ADMIN)["entries"]] == ["bob"]


def test_everybodys_sessions_are_for_administrators() -> None:
    world = Build().running("alice", 500).running("bob", 500).world()
    assert [s.id for s in live_sessions(world, ALICE, everybody=True)] == [1]
    assert [s.id for s in live_sessions(world, ADMIN, everybody=True)] == [1, 2]
    assert live_sessions(world, ADMIN, everybody=False) == ()


def test_another_service_owns_no_session() -> None:
    world = Build().running("alice", 500).world()
    assert live_sessions(world, Viewer(None), everybody=False) == ()
    assert mine_in(world, Viewer(None, admin=True), "default") == Amounts()
