"""The table of legal changes, and the fields that follow from a change."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest

from fgpu_scheduler.core import lifecycle
from fgpu_scheduler.core.lifecycle import (
    ENDED,
    HOLDING,
    LEGAL,
    LIVE,
    MOVED_BY,
    SERVING,
    final_state,
    holds_shares,
    moved,
    returned_to_queue,
)
from fgpu_scheduler.core.model import (
    EndCause,
    Placement,
    RefusedNode,
    Request,
    Session,
    SessionState,
    Share,
    Size,
    WaitReason,
)
from fgpu_scheduler.errors import InvalidTransition

S = SessionState

REQUEST = Request("alice", "", "image", "lab", 500, 1000, 1024)
PLACEMENT = Placement("n1", (Share("GPU-0", 500, 4096, 50),))


def session(state: S, **changes: object) -> Session:
    """Return a session in ``state`` with every other field set, so that each change shows."""
    base = Session(
        id=7,
        request=REQUEST,
        state=state,
        submitted_at_s=1,
        held=True,
        attempt=3,
        placement=PLACEMENT,
        wait_reason=WaitReason.RESOURCES,
        scheduled_at_s=2,
        started_at_s=3,
        ended_at_s=None,
        end_cause=None,
        message=None,
        launched="container",
        replaces=5,
        refused=(RefusedNode("n0", 1, 1, "no room"),),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def changed(old: Session, new: Session) -> dict[str, object]:
    names = [field.name for field in fields(Session)]
    return {name: getattr(new, name) for name in names if getattr(new, name) != getattr(old, name)}


NO_REASON: dict[str, object] = {"wait_reason": None}
OVER = {**NO_REASON, "held": False, "ended_at_s": 9}
ENDS = {**NO_REASON, "end_cause": EndCause.IDLE}
PARKED = {**NO_REASON, "parked_at_s": 9}
BACK: dict[str, object] = {"placement": None, "scheduled_at_s": None}

# Written out once more, from the design: each legal change, and the fields that it changes. The code's table is tested.
DESIGNED: dict[tuple[S, S], dict[str, object]] = {
    (S.PENDING, S.SCHEDULED): {**NO_REASON, "scheduled_at_s": 9},
    (S.PENDING, S.CANCELLED): {**OVER, **ENDS},
    (S.SCHEDULED, S.PREPARING): NO_REASON,
    (S.SCHEDULED, S.PENDING): BACK,
    (S.SCHEDULED, S.CANCELLED): {**OVER, **ENDS},
    (S.PREPARING, S.PULLING): NO_REASON,
    (S.PREPARING, S.RUNNING): NO_REASON,
    (S.PREPARING, S.TERMINATING): ENDS,
    (S.PREPARING, S.PENDING): BACK,
    (S.PREPARING, S.PARKED): PARKED,
    (S.PULLING, S.PENDING): BACK,
    (S.PULLING, S.RUNNING): NO_REASON,
    (S.PULLING, S.TERMINATING): ENDS,
    (S.PULLING, S.PARKED): PARKED,
    (S.RUNNING, S.TERMINATING): ENDS,
    (S.RUNNING, S.PARKED): PARKED,
    (S.PARKED, S.RESUMING): {**NO_REASON, "sizes": (Size(9, 0, 0, 0, 0),)},
    (S.PARKED, S.TERMINATING): ENDS,
    (S.RESUMING, S.RUNNING): NO_REASON,
    (S.RESUMING, S.PARKED): PARKED,
    (S.RESUMING, S.TERMINATING): ENDS,
    (S.TERMINATING, S.TERMINATED): OVER,
    (S.TERMINATING, S.ERROR): OVER,
}


@pytest.mark.parametrize(("current", "to"), list(product(S, S)))
def test_a_change_is_legal_exactly_as_designed_and_changes_only_the_fields_that_follow(
    current: S, to: S
) -> None:
    old = session(current)
    cause = EndCause.IDLE if to in (S.TERMINATING, S.CANCELLED) else None
    if (current, to) not in DESIGNED:
        with pytest.raises(InvalidTransition) as raised:
            moved(old, to, now_s=9, cause=cause)
        assert str(raised.value).startswith(f"session 7: {current} -> {to} is not legal (legal: ")
        return
    expected = {"state": to, **DESIGNED[current, to]}
    if to not in (S.PENDING, S.SCHEDULED, S.PREPARING, S.PULLING):
        # A session that runs, is parked or ends forgets which nodes were refused.
        expected["refused"] = ()
    assert changed(old, moved(old, to, now_s=9, cause=cause)) == expected


def test_an_illegal_change_names_the_legal_ones() -> None:
    with pytest.raises(InvalidTransition, match=r"legal: RUNNING, PARKED, PENDING, TERMINATING\)"):
        moved(session(S.PULLING), S.SCHEDULED, now_s=9)
    with pytest.raises(InvalidTransition, match="legal: none: it has ended"):
        moved(session(S.ERROR), S.RUNNING, now_s=9)


@pytest.mark.parametrize(("current", "to"), [(S.RUNNING, S.TERMINATING), (S.PENDING, S.CANCELLED)])
def test_an_end_needs_a_cause(current: S, to: S) -> None:
    with pytest.raises(InvalidTransition, match=f"session 7: {to} needs an end_cause"):
        moved(session(current), to, now_s=9)


def test_the_first_cause_and_message_stay() -> None:
    ending = moved(session(S.RUNNING), S.TERMINATING, now_s=9, cause=EndCause.OOM, message="out of memory")
    assert (ending.end_cause, ending.message) == (EndCause.OOM, "out of memory")
    ended = moved(ending, S.ERROR, now_s=10, cause=EndCause.USER, message="stopped")
    assert (ended.end_cause, ended.message) == (EndCause.OOM, "out of memory")


def test_a_session_that_got_its_gpu_back_says_no_longer_why_it_did_not() -> None:
    back = moved(session(S.RESUMING, message="the GPU could not be given back"), S.RUNNING, now_s=9)
    assert back.message is None


def test_the_message_of_an_end_takes_the_place_of_a_warning() -> None:
    warned = session(S.RUNNING, message="above its limit")
    ending = moved(warned, S.TERMINATING, now_s=9, cause=EndCause.ISOLATION_FAILED, message="was above it")
    assert ending.message == "was above it"
    assert moved(warned, S.TERMINATING, now_s=9, cause=EndCause.USER).message is None
    assert moved(ending, S.ERROR, now_s=10, message="later").message == "was above it"


def test_a_node_that_was_refused_is_left_out_for_twice_as_long_each_time_up_to_five_minutes() -> None:
    refused = session(S.PREPARING, refused=())
    for number, pause_s in enumerate((30, 60, 120, 240, 300, 300), 1):
        waits = returned_to_queue(
            replace(refused, state=S.PREPARING, placement=PLACEMENT), "no\n room", now_s=100
        )
        assert (waits.state, waits.wait_reason, waits.launched) == (S.PENDING, WaitReason.CLUSTER, None)
        assert waits.refused == (RefusedNode("n1", 100, number, "no room"),)
        assert waits.refusing_nodes(99 + pause_s) == waits.refused
        # Not after that, nor before it was refused: a clock that was set back leaves no node out for hours.
        assert waits.refusing_nodes(100 + pause_s) == waits.refusing_nodes(99) == ()
        refused = waits


def test_each_refused_node_is_known_by_itself_and_no_more_than_a_few_are_kept() -> None:
    waits = session(S.PREPARING, refused=())
    for number in range(lifecycle.MOST_REFUSED + 5):
        where = Placement(f"n{number}", PLACEMENT.shares)
        waits = returned_to_queue(
            replace(waits, state=S.PREPARING, placement=where), "x" * 9999, now_s=number
        )
    assert [node.node_id for node in waits.refused] == [f"n{n}" for n in range(5, number + 1)]
    assert {len(node.words) for node in waits.refused} == {lifecycle.MOST_WORDS}


def test_shares_are_held_exactly_between_the_queue_and_the_end() -> None:
    held = {state for state in S if holds_shares(session(state))}
    assert held == {S.SCHEDULED, S.PREPARING, S.PULLING, S.RUNNING, S.RESUMING, S.TERMINATING, S.PARKED}
    assert set(HOLDING) == held
    assert not any(holds_shares(session(state, parked_at_s=5)) for state in S)


def test_a_session_starts_once_however_often_it_is_parked() -> None:
    started = moved(session(S.PREPARING, started_at_s=None), S.RUNNING, now_s=9)
    parked = moved(started, S.PARKED, now_s=10)
    wanted = replace(parked, wanted_at_s=11, parked_mib=512, idle_since_s=8)
    resuming = moved(wanted, S.RESUMING, now_s=12)
    assert (resuming.parked_at_s, resuming.wanted_at_s, resuming.idle_since_s) == (None, 11, None)
    again = moved(resuming, S.RUNNING, now_s=13)
    assert (again.started_at_s, again.wanted_at_s, again.parked_mib) == (9, None, 0)
    refused = moved(resuming, S.PARKED, now_s=13)
    assert (refused.parked_at_s, refused.wanted_at_s, refused.parked_mib) == (13, None, 512)


def test_a_session_on_demand_is_parked_from_its_placement_on() -> None:
    waits = session(S.PENDING, request=replace(REQUEST, on_demand=True), placement=None)
    placed = moved(waits, S.SCHEDULED, now_s=9)
    assert placed.parked_at_s == 9
    assert moved(placed, S.PENDING, now_s=10).parked_at_s is None


def test_the_oldest_amounts_of_a_session_become_one_with_the_same_sum() -> None:
    held = session(S.RUNNING, scheduled_at_s=0)
    for number in range(lifecycle.MOST_SIZES + 50):
        held = replace(
            held, sizes=lifecycle.with_size(held, Size(10 * number + 10, 1000 * (number % 2), 0, 0, 0))
        )
    assert len(held.sizes) == lifecycle.MOST_SIZES
    since = (0, *(size.until_s for size in held.sizes))
    used = sum(s.fgpu_milli * (s.until_s - begun) for s, begun in zip(held.sizes, since, strict=False))
    assert used == pytest.approx(1000 * 10 * 75, rel=0.01)


def test_every_state_is_live_or_ended_and_has_its_mover() -> None:
    assert sorted((*LIVE, *ENDED)) == sorted(S)
    assert set(ENDED) == {state for state in S if not LEGAL[state]}
    assert set(LEGAL) == set(MOVED_BY) == set(S)
    assert set(LIVE) - set(SERVING) == {S.TERMINATING}


def test_a_failure_ends_in_error_and_all_else_in_terminated() -> None:
    for cause in EndCause:
        assert final_state(cause) is (S.ERROR if cause in lifecycle.FAILURES else S.TERMINATED)
    assert final_state(None) is S.TERMINATED
    assert EndCause.USER not in lifecycle.FAILURES
