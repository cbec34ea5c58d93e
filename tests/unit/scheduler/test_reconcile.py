"""What heals the difference between the store and the engines, when both move while one looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from simulator import World, world

from fgpu_scheduler.core.model import EndCause, SessionState
from fgpu_scheduler.core.reconcile import Ended, Finish, Healing, Observed, Remove, Stop, reconcile

S = SessionState
LAB = world(devices=4).node("n2", devices=4)


def of(
    session_id: int, *, attempt: int = 1, node: str = "n1", alive: bool = True, **more: object
) -> Observed:
    return Observed(node, session_id, attempt, f"c{session_id}-{attempt}", alive, **more)  # type: ignore[arg-type]


def healed(
    lab: World,
    *observed: Observed,
    later: World | None = None,
    reachable: Sequence[str] = ("n1", "n2"),
    launching: Sequence[int] = (),
) -> tuple[Healing, ...]:
    return reconcile(lab, later or lab, observed, reachable=reachable, launching=launching)


def a(state: SessionState) -> World:
    """Return a world of one session in this state; it is session 1, on node n1."""
    if state is S.PENDING:
        return LAB.pending("a", "1")
    return LAB.running("a", "1", on="GPU-n1-0", state=state)


def test_where_all_agree_there_is_nothing_to_heal() -> None:
    lab = a(S.RUNNING).running("b", "1", on="GPU-n2-0").pending("c", "1")
    assert healed(lab, of(1), of(2, node="n2")) == ()


def test_a_running_session_whose_container_is_gone_is_ended_and_keeps_its_share_until_then() -> None:
    message = "the session's container or process was removed outside JupyterHub"
    assert healed(a(S.RUNNING)) == (Ended(1, 1, EndCause.EXITED, message),)


def test_a_running_session_whose_container_has_died_ends_for_the_engines_reason() -> None:
    died = of(1, alive=False, end_cause=EndCause.OOM, message="out of memory")
    assert healed(a(S.RUNNING), died) == (Ended(1, 1, EndCause.OOM, "out of memory"),)
    silent = of(1, alive=False)
    assert healed(a(S.RUNNING), silent) == (Ended(1, 1, EndCause.EXITED, "the session's process ended"),)


def test_an_earlier_attempts_container_does_not_stand_for_the_session() -> None:
    lab = replace(a(S.RUNNING), sessions=(replace(a(S.RUNNING).of("a"), attempt=2),))
    ended, removed = healed(lab, of(1, attempt=1))
    assert isinstance(ended, Ended)
    why = "it is of attempt 1, and its session is at attempt 2"
    assert removed == Remove(of(1, attempt=1), why)


def test_a_terminating_session_is_finished_only_when_nothing_of_it_is_left() -> None:
    assert healed(a(S.TERMINATING)) == (Finish(1),)
    assert healed(a(S.TERMINATING), of(1)) == (Stop(1, of(1)),)
    assert healed(a(S.TERMINATING), of(1, alive=False)) == (Stop(1, of(1, alive=False)),)


def test_every_container_of_a_terminating_session_is_stopped_whatever_its_attempt() -> None:
    first, second = of(1, attempt=1), of(1, attempt=2)
    assert healed(a(S.TERMINATING), second, first) == (Stop(1, first), Stop(1, second))


def test_of_a_node_that_does_not_answer_nothing_is_concluded() -> None:
    assert healed(a(S.RUNNING), reachable=["n2"]) == ()
    assert healed(a(S.TERMINATING), reachable=["n2"]) == ()


@pytest.mark.parametrize("state", [S.PENDING, S.SCHEDULED, S.PREPARING, S.PULLING])
def test_what_has_not_started_is_not_missing(state: SessionState) -> None:
    assert healed(a(state)) == ()


def test_a_session_that_started_after_the_first_reading_is_not_missing() -> None:
    assert healed(a(S.PULLING), later=a(S.RUNNING)) == ()


def test_a_session_that_began_to_end_after_the_first_reading_is_not_finished() -> None:
    """Its container may have come up after the engine was asked."""
    assert healed(a(S.PREPARING), later=a(S.TERMINATING)) == ()


def test_a_session_that_is_at_another_attempt_by_now_is_left_alone() -> None:
    anew = replace(LAB, sessions=(replace(a(S.RUNNING).of("a"), attempt=2),))
    assert healed(a(S.RUNNING), later=anew) == ()


def test_a_session_that_ended_meanwhile_needs_nothing() -> None:
    assert healed(a(S.RUNNING), later=LAB) == ()
    assert healed(a(S.TERMINATING), later=LAB) == ()


def test_a_launch_under_way_keeps_an_unseen_session_from_being_finished() -> None:
    """The engine was asked for a container and then the user left: it may come after the observation."""
    assert healed(a(S.TERMINATING), launching=[1]) == ()
    assert healed(a(S.TERMINATING), of(1), launching=[1]) == (Stop(1, of(1)),)
    assert healed(a(S.TERMINATING), launching=[2]) == (Finish(1),)


def test_a_container_without_a_session_is_a_ghost() -> None:
    assert healed(LAB, of(9)) == (Remove(of(9), "its session has ended or never was"),)


def test_a_container_that_was_launched_after_the_first_reading_is_no_ghost() -> None:
    assert healed(LAB, of(1), later=a(S.PREPARING)) == ()
    assert healed(a(S.SCHEDULED), of(1), later=a(S.PREPARING)) == ()
    assert healed(a(S.SCHEDULED), of(1), later=a(S.RUNNING)) == ()


@pytest.mark.parametrize("state", [S.PENDING, S.SCHEDULED])
def test_a_container_of_a_session_that_has_launched_nothing_is_a_ghost(state: SessionState) -> None:
    assert healed(a(state), of(1)) == (Remove(of(1), f"its session is {state} and has launched nothing"),)


@pytest.mark.parametrize("state", [S.PREPARING, S.PULLING, S.RUNNING, S.TERMINATING])
def test_a_container_on_another_node_than_its_session_is_a_ghost(state: SessionState) -> None:
    healings = healed(a(state), of(1), of(1, node="n2"))
    assert [h for h in healings if h != Stop(1, of(1))] == [
        Remove(of(1, node="n2"), "its session is on node n1")
    ]


def test_what_another_node_runs_neither_keeps_a_session_nor_its_share() -> None:
    there = of(1, node="n2")
    ghost = Remove(there, "its session is on node n1")
    ended = Ended(1, 1, EndCause.EXITED, "the session's container or process was removed outside JupyterHub")
    assert healed(a(S.RUNNING), there) == (ended, ghost)
    assert healed(a(S.TERMINATING), there) == (Finish(1), ghost)


@pytest.mark.parametrize("state", [S.PREPARING, S.PULLING])
def test_a_dead_container_of_a_launch_is_the_launchers_business(state: SessionState) -> None:
    assert healed(a(state), of(1, alive=False)) == ()


def test_a_ghost_of_a_session_that_has_just_begun_to_end_is_left_for_the_next_time() -> None:
    assert healed(a(S.RUNNING), of(1), later=a(S.TERMINATING)) == ()


def test_healings_come_in_order_whatever_the_order_of_the_observation() -> None:
    lab = LAB.running("a", "1", state=S.TERMINATING).running("b", "1").running("c", "1", state=S.TERMINATING)
    things = [of(9), of(8), of(3), of(1)]
    healings = healed(lab, *things)
    assert healings == healed(lab, *reversed(things))
    assert [type(h).__name__ for h in healings] == ["Stop", "Ended", "Stop", "Remove", "Remove"]
