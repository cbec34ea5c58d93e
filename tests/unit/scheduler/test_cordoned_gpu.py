"""One GPU is cordoned: it keeps its sessions, and nothing decides for it or counts on it."""

from __future__ import annotations

from dataclasses import replace

from simulator import World, lasting, world
from simulator.world import request

from fgpu_scheduler.core.expected_starts import BASIS_NO_NODE, BlockingSessions
from fgpu_scheduler.core.forecast import forecast
from fgpu_scheduler.core.placement import could_ever_fit, free
from fgpu_scheduler.core.planner import plan
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.preemption import victims
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.reservations import least_missing_place
from fgpu_scheduler.core.shortage import shortage
from fgpu_scheduler.core.unblocking import unblocking

BROKEN = "GPU-n1-0"


def placed(lab: World) -> dict[str, list[str]]:
    """Return who starts now, and on which devices."""
    users = {s.id: s.request.user for s in lab.sessions}
    return {
        users[p.session_id]: [share.device_uuid for share in p.placement.shares]
        for p in plan(lab, Policy()).placed
    }


def test_sessions_on_a_cordoned_gpu_stay_and_free_nothing_for_others() -> None:
    lab = world().running("a", "0.5").cordoned_gpu(BROKEN).pending("b", "0.5")
    assert placed(lab) == {}
    assert placed(lab.ended("a")) == {}
    assert lab.device(BROKEN).shares == -1


def test_a_request_waits_for_it_and_is_not_refused() -> None:
    lab = world().cordoned_gpu(BROKEN)
    assert could_ever_fit(request("a", "1"), lab.nodes)
    assert "free" not in shortage(request("a", "0.5"), free(lab)).replace("not free", "")


def test_no_start_is_expected_there() -> None:
    lab = world().running("a", "0.5").cordoned_gpu(BROKEN).pending("b", "0.5")
    for typical_length_s in (3600, None):
        (found,) = forecast(lab, Policy(), lasting(typical_length_s))
        assert (found.expected_start_at_s, found.basis) == (None, BASIS_NO_NODE)
    assert unblocking(lab, Policy()) == unblocking(lab.ended("a"), Policy())


def test_sessions_on_a_cordoned_gpu_are_in_no_ones_way() -> None:
    lab = world(devices=2).running("a", "1", on=BROKEN).running("b", "1", on="GPU-n1-1")
    (found,) = forecast(lab.cordoned_gpu(BROKEN).pending("c", "1"), Policy(), lasting(3600))
    assert found.ahead == BlockingSessions(1, 1000, (lab.of("b").id,))


def test_cordoned_gpu_has_no_reservation_and_no_preemption() -> None:
    lab = world().running("low", "1").cordoned_gpu(BROKEN).pending("high", "1")
    lab = lab.having("high", priority=5)
    assert victims(lab, plan(lab, Policy()), Ledger(lab), groups=["default"], ending=()) == ()
    assert least_missing_place(lab.of("high"), {n.node.id: n for n in free(lab)}, lab.now_s) is None
    opened = replace(lab, nodes=tuple(node.opened() for node in lab.nodes))
    assert victims(opened, plan(opened, Policy()), Ledger(opened), groups=["default"], ending=()) == (1,)
