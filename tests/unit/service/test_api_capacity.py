"""The API's capacity, from worlds built here."""

from __future__ import annotations

from dataclasses import replace

from worlds import ADMIN, ALICE, Build, shown

from fgpuspawner.isolation.choice import StoredChoice
from fgpuspawner.service.api.capacity import capacity_object


def test_only_administrators_see_the_state_of_each_node() -> None:
    chosen = (StoredChoice("n1", "interposer", "libfgpu holds memory and compute"),)
    world = replace(Build().world(), isolation=chosen)
    (told,) = capacity_object(world, ADMIN, fgpu_step_milli=100)["nodes"]
    assert told.model_dump() == {
        "name": "n1",
        "group": "default",
        "state": "READY",
        "isolation": "interposer",
        "reason": "libfgpu holds memory and compute",
    }
    assert "nodes" not in capacity_object(world, ALICE, fgpu_step_milli=100).model_dump()
    assert shown(world, ADMIN).machines == ((told, "takes sessions"),)
    assert shown(world, ALICE).machines == ()
