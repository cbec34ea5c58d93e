"""What a viewer may know of other users."""

from __future__ import annotations

from dataclasses import replace

from worlds import ADMIN, ALICE, Build, node

from fgpu_scheduler import Placement
from fgpuspawner.isolation.choice import StoredChoice
from fgpuspawner.service.api.capacity import capacity_object, queue_object
from fgpuspawner.service.model import why_not_parked


def test_users_see_their_groups_and_administrators_all() -> None:
    world = Build(node(), node("n2", "class")).world()
    names = [g["name"] for g in capacity_object(world, ADMIN)["groups"]]
    assert names == ["default", "class"]
    assert [g["name"] for g in capacity_object(world, ALICE)["groups"]] == ["default"]
    assert capacity_object(world, ADMIN)["allocatable_overall"]["fgpu"] == "2"


def test_users_get_no_names_or_ids_of_others() -> None:
    world = Build().running("alice", 500).running("bob", 500).pending("bob", 2000, server="x").world()
    queue = queue_object("default", world, ALICE)
    assert [(e["mine"], e["id"], e["user"]) for e in queue["entries"]] == [(False, None, None)]
    capacity = capacity_object(world, ALICE)
    assert capacity.model_dump()["groups"][0]["devices"][0]["shares"] == [
        {"fgpu": "0.5", "mine": True, "session_id": 1},
        {"fgpu": "0.5", "mine": False, "session_id": None},
    ]
    assert "bob" not in str((queue, capacity))
    assert [e["user"] for e in queue_object("default", world, ADMIN)["entries"]] == ["bob"]


def test_only_a_session_with_a_gpu_can_be_parked() -> None:
    world = Build().running("alice", 500).running("alice", 500, server="cpu").world()
    world = replace(world, isolation=(StoredChoice("n1", "interposer", "libfgpu holds memory"),))
    first, second = world.snapshot.sessions
    assert why_not_parked(first, world) is None
    without = replace(second, placement=Placement("n1", ()))
    assert why_not_parked(without, world) == "It has no GPU."
