"""What quotas let start, let wait and let last."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import World, world
from simulator.quota_checks import names
from simulator.world import request

from fgpu_scheduler.core.admission import Caps, Refusal, pending_refusals
from fgpu_scheduler.core.model import (
    Placement,
    Quota,
    QuotaScope,
    Request,
    Session,
    SessionState,
    Share,
    ShareMode,
)
from fgpu_scheduler.core.quota import (
    Ledger,
    QuotaRemaining,
    least_milli,
    over_pending,
    quota_words,
)
from fgpuspawner.service.api.forecast import quota_object

USER, GROUP, ALL = QuotaScope.USER, QuotaScope.GROUP, QuotaScope.ALL


def asked(user: str, fgpu: str = "0.5", *groups: str, group: str = "default") -> Request:
    return replace(request(user, fgpu, group=group), groups=groups)


def waits(user: str, fgpu: str = "0.5", *groups: str, group: str = "default", id_: int = 99) -> Session:
    return Session(id_, asked(user, fgpu, *groups, group=group), SessionState.PENDING, 0)


def lab(*quotas: Quota, runs: tuple[tuple[str, str, tuple[str, ...]], ...] = ()) -> World:
    found = world(devices=8)
    for user, fgpu, groups in runs:
        found = found.running(user, fgpu)
        last = found.sessions[-1]
        new = replace(last, request=replace(last.request, groups=groups))
        found = replace(found, sessions=(*found.sessions[:-1], new))
    return replace(found, quotas=quotas)


def test_started_session_counts_until_it_is_given_back() -> None:
    ledger = Ledger(lab(Quota(USER, "a", max_fgpu_milli=1000)))
    first, second = waits("a", "0.6", id_=1), waits("a", "0.6", id_=2)
    ledger.take(first)
    assert not ledger.allows(second)
    ledger.give_back(first)
    assert ledger.allows(second)


def test_named_quota_does_not_loosen_the_star_quota() -> None:
    quotas = Quota(USER, "*", max_sessions=1), Quota(USER, "a", max_sessions=5)
    ledger = Ledger(lab(*quotas, runs=(("a", "0.5", ()),)))
    assert ledger.stops(waits("a")) == quotas[0]


@pytest.mark.parametrize("state", list(SessionState))
def test_a_session_counts_while_it_holds_its_share(state: SessionState) -> None:
    found = lab(Quota(USER, "a", max_sessions=1), runs=(("a", "0.5", ()),))
    found = replace(found, sessions=(replace(found.sessions[0], state=state),))
    holds = ("SCHEDULED", "PREPARING", "PULLING", "RUNNING", "PARKED", "RESUMING", "TERMINATING")
    assert Ledger(found).allows(waits("a")) is (state not in holds)


def test_a_session_without_gpu_is_under_the_number_of_sessions_only() -> None:
    ledger = Ledger(lab(Quota(USER, "a", max_fgpu_milli=1000), runs=(("a", "1", ()), ("a", "1", ()))))
    assert ledger.allows(waits("a", "0"))
    assert not Ledger(lab(Quota(USER, "a", max_sessions=0))).allows(waits("a", "0"))


def test_the_shortest_lifetime_is_the_limit() -> None:
    ledger = Ledger(
        lab(
            Quota(USER, "*", max_lifetime_s=9000),
            Quota(GROUP, "class", max_lifetime_s=3600),
            Quota(USER, "b", max_lifetime_s=60),
            Quota(USER, "a", max_sessions=1),
        )
    )
    assert ledger.limit_s(asked("a", "1", "class")) == 3600
    assert ledger.limit_s(asked("a")) == 9000


def explicit(memory_mib: int, compute_percent: int | None = None, models: tuple[str, ...] = ()) -> Request:
    return replace(
        request("a", "0"), gpu_memory_mib=memory_mib, compute_percent=compute_percent, gpu_models=models
    )


MIXED = (
    world(devices=0)
    .node("n1", memory_mib=8192, model="Small")
    .node("n2", memory_mib=16384, fgpu_per_gpu=4, model="Large")
)


@pytest.mark.parametrize(
    ("request_", "milli"),
    [
        (explicit(4096), 500),
        (explicit(4096, 75), 750),
        (explicit(12288), 3000),
        (explicit(4096, models=("Large",)), 1000),
        (explicit(128), 15),
        (explicit(32768), 0),
        (asked("a", "0.7"), 700),
    ],
)
def test_an_explicit_request_counts_as_the_least_it_could_be_worth(request_: Request, milli: int) -> None:
    assert least_milli(request_, MIXED.nodes) == milli


def test_a_placed_explicit_request_counts_by_its_shares() -> None:
    one = Session(1, explicit(4096), SessionState.PENDING, 0)
    full = replace(MIXED, quotas=(Quota(USER, "a", max_fgpu_milli=900),))
    ledger = Ledger(full)
    device = full.nodes[1].devices[0]
    share = Share(device.uuid, 1000, 4096, 0, ShareMode.MEMORY)
    placed = replace(full.running("b", "1", on=device.uuid).sessions[0].placement, shares=(share,))  # type: ignore[type-var]
    assert placed is not None
    assert ledger.allows(one)
    assert not ledger.allows(one, placed)
    ledger.take(one)
    assert not ledger.allows(replace(one, id=2))
    held = replace(one, state=SessionState.RUNNING, placement=placed)
    assert not Ledger(replace(full, sessions=(held,))).allows(waits("a", "0.1"))


def test_pending_quota_message_names_the_waiting_requests() -> None:
    quota = Quota(GROUP, "class", resource_group="default", max_pending=3)
    waiting = [asked("a", "1", "class"), asked("b", "1", "class"), asked("c", "1"), asked("b", group="other")]
    found = over_pending((quota,), waiting, [asked("c", "1", "class"), asked("d", "1", "class")])
    assert found is not None
    assert found.message == (
        "the quota of group 'class' in resource group 'default' is 3 requests waiting: "
        "2 wait already, and this would add 2"
    )
    assert over_pending((quota,), waiting, [asked("c", "1", "class"), asked("d", "1")]) is None
    assert over_pending((quota,), waiting * 9, [asked("d", "1")]) is None


def test_refusal_over_the_pending_quota_says_how_many_may_wait() -> None:
    caps = Caps(fgpu_step_milli=100, max_pending_per_user=3)
    quotas = (Quota(GROUP, "class", max_pending=2),)
    there = [asked("a"), asked("a"), asked("b", "1", "class")]
    assert pending_refusals(asked("a"), 1, there, caps, quotas) == ()
    assert pending_refusals(asked("c"), 3, there, caps, quotas) == ()
    assert pending_refusals(asked("a"), 2, there, caps, quotas) == (
        Refusal(
            "count",
            "too_many_pending",
            "count: at most 3 of your requests may wait at a time; 2 wait already",
            "3",
            "1",
        ),
    )
    for count, nearest in ((2, "1"), (4, "1")):
        found = pending_refusals(asked("c", "1", "class"), count, there, caps, quotas)
        assert [(r.code, r.limit, r.nearest) for r in found if r.code == "over_quota"] == [
            ("over_quota", "2", nearest)
        ]
        assert len(found) == (2 if count > 3 else 1)
    (refused,) = pending_refusals(asked("a"), 1, [*there, asked("a")], caps, quotas)
    assert refused.nearest is None


def test_pending_star_quota_counts_each_user_separately() -> None:
    quota = Quota(USER, "*", max_pending=1)
    assert over_pending((quota,), [asked("a")], [asked("b"), asked("c")]) is None
    found = over_pending((quota,), [asked("a")], [asked("b"), asked("b")])
    assert found is not None
    assert (found.counted, found.waiting, found.more) == ("b", 0, 2)


@pytest.mark.parametrize(
    ("quota", "words"),
    [
        (Quota(USER, "a"), "user 'a'"),
        (Quota(USER, "*"), "each user"),
        (Quota(GROUP, "*", "lab"), "each group in resource group 'lab'"),
        (Quota(GROUP, "class"), "group 'class'"),
        (Quota(ALL, "*"), "everybody together"),
    ],
)
def test_a_quota_is_named_in_words(quota: Quota, words: str) -> None:
    assert quota_words(quota) == words


AMOUNTS = st.sampled_from(("0.1", "0.5", "1", "2"))
QUOTAS = st.builds(
    lambda who, **limits: Quota(*who, **limits),
    st.sampled_from(
        ((USER, "a"), (USER, "b"), (USER, "*"), (GROUP, "x"), (GROUP, "y"), (GROUP, "*"), (ALL, "*"))
    ),
    resource_group=st.sampled_from((None, "default", "other")),
    max_fgpu_milli=st.one_of(st.none(), st.integers(0, 3000)),
    max_sessions=st.one_of(st.none(), st.integers(0, 3)),
)
WAITING = st.builds(
    asked,
    st.sampled_from(("a", "b", "c")),
    AMOUNTS,
    st.sampled_from(("x", "z")),
    st.sampled_from(("y", "v")),
    group=st.sampled_from(("default", "other")),
)


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(QUOTAS, max_size=4), st.lists(WAITING, max_size=12))
def test_allowed_sessions_never_exceed_any_quota(quotas: list[Quota], waiting: list[Request]) -> None:
    ledger = Ledger(lab(*quotas))
    taken: list[Request] = []
    for number, one in enumerate(waiting):
        session = Session(number, one, SessionState.PENDING, 0)
        fits = all(_within(quota, [*taken, one], one) for quota in quotas)
        assert ledger.allows(session) is fits
        running = tuple(_held(number, request) for number, request in enumerate(taken))
        assert Ledger(replace(lab(*quotas), sessions=running)).allows(session) is fits
        if fits:
            ledger.take(session)
            taken.append(one)


def _held(number: int, one: Request) -> Session:
    where = Placement("n1", (Share("GPU-n1-0", one.fgpu_milli, 128, 1),))
    return Session(number, one, SessionState.RUNNING, 0, placement=where)


def _within(quota: Quota, held: list[Request], newest: Request) -> bool:
    for name in names(quota, newest):
        own = [r for r in held if name in names(quota, r)]
        if quota.max_sessions is not None and len(own) > quota.max_sessions:
            return False
        if quota.max_fgpu_milli is not None and sum(r.fgpu_milli for r in own) > quota.max_fgpu_milli:
            return False
    return True


def test_remaining_amount_is_that_of_the_strictest_quota() -> None:
    each, together = (
        Quota(USER, "*", max_fgpu_milli=1400, max_sessions=3),
        Quota(ALL, "*", max_fgpu_milli=2000),
    )
    found = lab(each, together, runs=(("a", "0.5", ()), ("b", "1", ())))
    assert Ledger(found).left(asked("a")) == QuotaRemaining(500, together, 2, each)
    assert Ledger(found).left(asked("b")) == QuotaRemaining(400, each, 2, each)
    assert Ledger(lab()).left(asked("a")) == QuotaRemaining(None, None, None, None)
    # A lower quota than is held leaves nothing, and not less.
    assert (
        Ledger(lab(Quota(USER, "a", max_sessions=0), runs=(("a", "1", ()),))).left(asked("a")).sessions == 0
    )


def test_remaining_amount_names_its_quota() -> None:
    each, together = (
        Quota(USER, "*", max_fgpu_milli=2000, max_sessions=2),
        Quota(ALL, "*", max_fgpu_milli=2000),
    )
    runs: tuple[tuple[str, str, tuple[str, ...]], ...] = (("a", "0.5", ()), ("b", "1", ()))
    assert quota_object(lab(each, runs=runs), asked("a")).model_dump() == {
        "fgpu_left": "1.5",
        "sessions_left": 1,
        "text": "1.5 fGPU and 1 session left of your quota",
    }
    assert quota_object(lab(each, together, runs=runs), asked("a"))["text"] == (
        "0.5 fGPU left of the quota of everybody together; 1 session left of your quota"
    )
    assert quota_object(lab(runs=runs), asked("a")).model_dump() == {
        "fgpu_left": None,
        "sessions_left": None,
        "text": None,
    }
