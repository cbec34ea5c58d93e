"""Properties of every plan, forecast and admission."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from property_worlds import GROUPS, nodes, requests, worlds
from simulator import World, lasting
from simulator.checks import badly_placed, mixed_modes, over_capacity, wrongly_held

from fgpu_scheduler.core.admission import MIN_MEMORY_MIB, Caps, admit, amounts_that_fit
from fgpu_scheduler.core.expected_starts import SOON_S
from fgpu_scheduler.core.forecast import forecast, outlook
from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    Node,
    NodeState,
    Quota,
    QuotaScope,
    Request,
    Session,
    SessionState,
    Snapshot,
)
from fgpu_scheduler.core.placement import best_fit, claimed, free, place, placements, released, untouched
from fgpu_scheduler.core.planner import Policy, plan
from fgpu_scheduler.core.request_forecast import forecast_request, largest_now
from fgpu_scheduler.core.shares import shape

POLICY = Policy()
exact = settings(derandomize=True, database=None, deadline=None, max_examples=150)
TYPICAL_S = st.sampled_from((1, 600, 3600))


@exact
@given(worlds())
def test_a_plan_overcommits_nothing_leaves_no_session_that_fits_and_lets_none_pass(lab: World) -> None:
    found = plan(lab, POLICY)
    planned = lab.placed(found)
    before = {s.id: s for s in lab.sessions}
    complaints = [*over_capacity(lab, planned), *wrongly_held(planned), *badly_placed(before, planned)]
    assert [*complaints, *mixed_modes(planned)] == []
    waiting = [s for s in lab.sessions if s.state is SessionState.PENDING]
    in_order = sorted(waiting, key=lambda s: (s.request.resource_group, s.id))
    assert [d.session_id for d in found.decisions] == [s.id for s in in_order]
    assert plan(planned, POLICY).placed == (), "one pass is enough"
    placed, stuck = {p.session_id for p in found.placed}, set()
    for session in waiting:
        if session.id in placed:
            assert shape(session.request) not in stuck, "it has passed an earlier request of the same shape"
        elif not session.held:
            stuck.add(shape(session.request))


@exact
@given(worlds(), requests())
def test_free_capacity_is_what_holders_leave_and_an_ended_session_returns_its_own(
    lab: World, asked: Request
) -> None:
    left = {node.id: untouched(node) for node in lab.nodes}
    for session in lab.sessions:
        where = session.placement
        if session.state in HOLDING and where is not None and where.node_id in left:
            left[where.node_id] = claimed(left[where.node_id], session.request, where)
    assert free(lab) == tuple(left.values())
    for node in free(lab):
        for where, leaves in placements(node, asked):
            assert released(leaves, asked, where) == node


@exact
@given(worlds(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_input_order(lab: World, rng: object) -> None:
    sessions, nodes_ = list(lab.sessions), [replace(n, devices=tuple(reversed(n.devices))) for n in lab.nodes]
    rng.shuffle(sessions)  # type: ignore[attr-defined]
    rng.shuffle(nodes_)  # type: ignore[attr-defined]
    other = Snapshot(lab.now_s, lab.version, tuple(nodes_), tuple(sessions))
    assert plan(other, POLICY) == plan(lab, POLICY)


def expected_end(session: Session, now_s: int, typical_length_s: int) -> int:
    if session.state is SessionState.TERMINATING:
        return now_s + 1
    end = (now_s if session.started_at_s is None else session.started_at_s) + typical_length_s
    return end if end > now_s else now_s + SOON_S


@exact
@given(worlds())
def test_forecast_starts_now_exactly_the_placed_sessions(lab: World) -> None:
    told = forecast(lab, POLICY, lasting(None))
    placed = [p.session_id for p in plan(lab, POLICY).placed]
    assert [f.session_id for f in told if f.position == 0] == placed
    assert [f.session_id for f in told if f.text == "starts now"] == placed
    for group in GROUPS:
        groups = {s.id: s.request.resource_group for s in lab.sessions}
        positions = [f.position for f in told if f.position and groups[f.session_id] == group]
        assert positions == list(range(1, len(positions) + 1))


QUOTAS = st.builds(
    Quota,
    st.sampled_from((QuotaScope.USER, QuotaScope.ALL)),
    st.just("*"),
    max_fgpu_milli=st.sampled_from((None, 500, 2000, 6000)),
    max_sessions=st.sampled_from((None, 1, 3)),
)


@exact
@given(worlds(most=8), requests(), st.integers(1, 4), TYPICAL_S, st.lists(QUOTAS, max_size=2))
def test_request_forecast_matches_what_then_happens(
    lab: World, asked: Request, count: int, typical_length_s: int, quotas: list[Quota]
) -> None:
    lab = replace(lab, quotas=tuple(quotas))
    told = forecast_request(asked, count, lab, POLICY, lasting(typical_length_s))
    first = max((s.id for s in lab.sessions), default=0) + 1
    new = [Session(first + n, asked, SessionState.PENDING, lab.now_s) for n in range(count)]
    submitted = lab.with_sessions((*lab.sessions, *new))
    placed = [p.session_id for p in plan(submitted, POLICY).placed if p.session_id >= first]
    assert told.startable_now == len(placed)
    found = forecast(submitted, POLICY, lasting(typical_length_s))
    last = next(f for f in found if f.session_id == new[-1].id)
    if len(placed) < count:
        expected = last.position, last.expected_start_at_s, last.basis
        assert (told.position, told.expected_start_at_s, told.basis) == expected
        if count == 1:
            known = outlook(lab, POLICY, lambda _: lasting(typical_length_s))
            told = forecast_request(asked, 1, lab, POLICY, lasting(typical_length_s), ahead=known)
            assert (told.position, told.expected_start_at_s, told.basis) == expected


@exact
@given(worlds(most=8), requests())
def test_largest_amount_now_starts_and_larger_ones_do_not(lab: World, asked: Request) -> None:
    caps = Caps(fgpu_step_milli=100)
    left = free(lab.placed(plan(lab, POLICY)))
    own = [n for n in lab.nodes if n.resource_group == asked.resource_group]
    plain = replace(asked, gpu_memory_mib=None, compute_percent=None)
    others = [replace(plain, fgpu_milli=amount) for amount in amounts_that_fit(own, caps)]
    largest = largest_now(others, 1, lab, POLICY)
    for other in others:
        fits = place(other, left, score=best_fit) is not None
        if other == largest:
            assert fits
        elif largest is None or other.fgpu_milli > largest.fgpu_milli:
            assert not fits


def caps() -> Iterator[Caps]:
    for step in (1, 10, 50, 100, 300, 500):
        for most in (None, 100, 1000, 2500):
            yield Caps(fgpu_step_milli=step, max_fgpu_milli=most)


@exact
@given(nodes(at_least=1), st.sampled_from(list(caps())), st.sampled_from(GROUPS))
def test_every_amount_listed_as_fitting_is_admitted(lab: tuple[Node, ...], limits: Caps, group: str) -> None:
    own = [n for n in lab if n.resource_group == group]
    amounts = amounts_that_fit(own, limits)
    assert list(amounts) == sorted(set(amounts))
    for amount in (*amounts[:5], *amounts[len(amounts) // 2 :][:5], *amounts[-5:]):
        asked = Request("u", "", "image", group, amount, 10, MIN_MEMORY_MIB)
        assert admit(asked, 1, lab, limits) == ()


@exact
@given(nodes(at_least=1), requests(), st.integers(0, 10))
def test_admitted_requests_start_on_empty_nodes_and_refusals_give_a_reason(
    lab: tuple[Node, ...], asked: Request, count: int
) -> None:
    refusals = admit(asked, count, lab, Caps(fgpu_step_milli=100))
    if not refusals:
        ready = World(0, 1, tuple(replace(n, state=NodeState.READY) for n in lab))
        assert place(asked, free(ready), score=best_fit) is not None
    for refusal in refusals:
        assert refusal.message.startswith(f"{refusal.field}: ")
