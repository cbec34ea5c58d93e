"""A request for several GPU models gets the most preferred one that fits now, and does not wait for a better one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from property_worlds import requests, worlds
from simulator import World
from simulator.order_checks import less_liked
from simulator.world import decided, request, world

from fgpu_scheduler.core.model import Placement, Quota, QuotaScope, Request, Snapshot
from fgpu_scheduler.core.placement import best_fit, free, place, placements
from fgpu_scheduler.core.placer import Placer
from fgpu_scheduler.core.planner import Reservation, plan
from fgpu_scheduler.core.policies import GroupPolicy, Policy
from fgpu_scheduler.core.preemption import victims
from fgpu_scheduler.core.quota import Ledger
from fgpu_scheduler.core.reservations import least_missing_place
from fgpu_scheduler.core.shares import shares_of
from fgpu_scheduler.core.shortage import shortage

exact = settings(derandomize=True, database=None, deadline=None, max_examples=150)


def models_of(where: Placement, lab: Snapshot) -> list[str]:
    model = {d.uuid: d.model for node in lab.nodes for d in node.devices}
    return [model[share.device_uuid] for share in where.shares]


@exact
@given(worlds(), requests(), st.permutations(("m", "other")))
def test_most_preferred_fitting_model_is_chosen(lab: World, asked: Request, liked: list[str]) -> None:
    asked = replace(asked, gpu_models=tuple(liked))
    left = free(lab)
    fits = [
        model
        for model in liked
        if any(True for node in left for _ in placements(node, replace(asked, gpu_models=(model,))))
    ]
    for where in (
        (place(asked, left, score=best_fit) or (None,))[0],
        Placer(left, score=best_fit).place(asked),
    ):
        assert (where is not None) == bool(fits)
        if where is not None and where.shares:
            # All of one model, even if two models together would fit it.
            assert {*models_of(where, lab)} == {fits[0]}


LAB = world(devices=0).node("a", devices=2, model="A").node("b", devices=2, model="B").node("c", model="C")
A_B, B_A = ("A", "B"), ("B", "A")


def asking(lab: World, user: str, fgpu: str, *models: str, priority: int = 0) -> World:
    """Return the world with another pending request, for one of these models."""
    return lab.pending(user, fgpu).having(user, gpu_models=models, priority=priority)


def on(lab: World, user: str, fgpu: str, model: str, time_limit_s: int | None = None) -> World:
    """Return the world with another session running on this model."""
    return lab.holding(replace(request(user, fgpu), gpu_models=(model,), time_limit_s=time_limit_s))


def liking(fgpu: str, *models: str) -> Request:
    return replace(request("u", fgpu), gpu_models=models)


def in_words(lab: World) -> list[str]:
    return decided(lab, plan(lab, Policy()))


def test_less_preferred_model_is_used_at_once_and_unlisted_models_never() -> None:
    lab = asking(asking(asking(LAB, "one", "2", *A_B), "two", "2", *A_B), "three", "1", *A_B)
    assert in_words(lab.pending("four", "1")) == [
        "one: GPU-a-0 + GPU-a-1",
        "two: GPU-b-0 + GPU-b-1",
        "three waits: RESOURCES",
        "four: GPU-c-0",
    ]
    assert not list(less_liked(lab, plan(lab, Policy())))
    assert in_words(asking(LAB, "u", "1", *B_A)) == ["u: GPU-b-0"]


def test_preference_check_detects_a_less_preferred_choice() -> None:
    wrong = plan(asking(LAB, "u", "1", *B_A), Policy())
    assert list(less_liked(asking(LAB, "u", "1", *A_B), wrong)) == [
        "session 1 is put on {'B'}, and A, which it likes more, is free"
    ]
    assert list(less_liked(asking(LAB, "u", "1", "A", "C"), wrong)) == [
        "session 1 asked for one of ('A', 'C'), and is put on {'B'}"
    ]


def test_gpus_of_one_session_have_one_model() -> None:
    mixed = world(devices=0).node("n", model="A")
    (n,) = mixed.nodes
    (device,) = n.devices
    node = replace(n, devices=(device, replace(device, uuid="GPU-n-1", index=1, model="B")))
    left = free(replace(mixed, nodes=(node,)))
    assert place(liking("2"), left, score=best_fit) is not None
    assert place(liking("2", *A_B), left, score=best_fit) is None
    # The check of a commit refuses it independently of the planner.
    assert shares_of(liking("2", *A_B), node.devices) is None


def test_wait_reason_names_every_preferred_model() -> None:
    full = free(LAB.running("x", "2").running("y", "2").running("z", "1"))
    assert shortage(liking("1", *A_B), full) == "all GPUs are busy"
    assert (
        shortage(liking("1", "D", "E"), full)
        == "no machine with a GPU of model 'D' or 'E' takes sessions now"
    )
    # One free GPU of each model does not make two of one model.
    halves = free(on(on(LAB, "x", "2", "A"), "y", "1", "B"))
    assert shortage(liking("2", *A_B), halves) == (
        "2 fGPU needs 2 free GPUs on one machine: at most 1 is free on one"
    )


def test_reservation_is_on_the_model_that_is_free_first() -> None:
    policy = Policy(default=GroupPolicy())
    for a_s, b_s, kept_on in ((9000, 600, "b"), (600, 9000, "a"), (600, 600, "a")):
        lab = on(on(LAB, "x", "2", "A", a_s), "y", "2", "B", b_s)
        (kept,) = (
            d for d in plan(asking(lab, "head", "2", *A_B), policy).decisions if isinstance(d, Reservation)
        )
        assert kept.placement.node_id == kept_on


def test_reservation_prefers_the_preferred_model_when_equal_capacity_is_missing() -> None:
    lab = on(on(LAB, "x", "2", "A"), "y", "2", "B")
    left = {node.node.id: node for node in free(lab)}
    for models, kept_on in ((A_B, "a"), (B_A, "b")):
        kept = least_missing_place(asking(lab, "head", "2", *models).sessions[-1], left, 0)
        assert kept is not None
        assert kept.placement.node_id == kept_on


def test_backfill_beside_a_reservation_uses_the_most_preferred_model() -> None:
    """A session that would not end in time uses the spare part of the reserved node if it prefers that model."""
    lab = world(devices=0).node("a", devices=4, model="A").node("b", model="B")
    for user in ("x", "y"):
        lab = on(lab, user, "1", "A", 600)
    policy = Policy(default=GroupPolicy())
    waits = asking(asking(lab, "head", "3", "A"), "next", "1", *A_B)
    assert decided(waits, plan(waits, policy)) == ["head waits: RESERVED", "next: GPU-a-3"]


def test_model_over_the_quota_is_skipped() -> None:
    """The same GPU memory is a larger fraction of a smaller GPU, and can be over the quota only there."""
    lab = world(devices=0).node("a", memory_mib=4096, model="A").node("b", memory_mib=8192, model="B")
    lab = lab.pending("u", "0").having("u", gpu_memory_mib=2048, gpu_models=A_B)
    assert in_words(lab) == ["u: GPU-a-0"]
    quota = Quota(QuotaScope.USER, "*", max_fgpu_milli=300)
    assert in_words(replace(lab, quotas=(quota,))) == ["u: GPU-b-0"]


def test_preemption_ends_the_fewest_sessions_on_any_listed_model() -> None:
    lab = on(on(on(LAB, "x", "1", "A"), "y", "1", "A"), "z", "2", "B")
    lab = asking(lab.running("w", "1"), "high", "2", *A_B, priority=5)
    ended = victims(lab, plan(lab, Policy()), Ledger(lab), groups=["default"], ending=())
    assert [session.request.user for session in lab.sessions if session.id in ended] == ["z"]
