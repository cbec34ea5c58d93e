"""What heals the difference between the store and the engines, when both move while one looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from simulator import World, world

from fgpu_scheduler.core.model import EndCause, SessionState
from fgpu_scheduler.core.reconcile import Finish, Healing, Observed, ProcessGone, Remove, Stop, reconcile

S = SessionState
LAB = world(devices=4).node("n2", devices=4)
EARLY = (S.PENDING, S.SCHEDULED, S.PREPARING, S.PULLING)


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


ANEW = replace(LAB, sessions=(replace(a(S.RUNNING).of("a"), attempt=2),))
"""The session is at its second attempt."""


@pytest.mark.parametrize(
    ("lab", "observed", "more"),
    [
        pytest.param(a(S.RUNNING).pending("c", "1"), [of(1)], {}, id="all agree"),
        pytest.param(a(S.RUNNING), [], {"reachable": ["n2"]}, id="the node of a running session is silent"),
        pytest.param(
            a(S.TERMINATING), [], {"reachable": ["n2"]}, id="the node of an ending session is silent"
        ),
        *(pytest.param(a(state), [], {}, id=f"{state} has not started") for state in EARLY),
        pytest.param(a(S.PULLING), [], {"later": a(S.RUNNING)}, id="it started after the first reading"),
        # Its container may have come up after the engine was asked.
        pytest.param(
            a(S.PREPARING), [], {"later": a(S.TERMINATING)}, id="it began to end after the first reading"
        ),
        pytest.param(a(S.RUNNING), [], {"later": ANEW}, id="it is at another attempt by now"),
        pytest.param(a(S.RUNNING), [], {"later": LAB}, id="it ran and has ended since"),
        pytest.param(a(S.TERMINATING), [], {"later": LAB}, id="its end is over"),
        # The engine was asked for a container and then the user left: it may come after the observation.
        pytest.param(a(S.TERMINATING), [], {"launching": [1]}, id="its launch is under way"),
        pytest.param(LAB, [of(1)], {"later": a(S.PREPARING)}, id="it was submitted and launched since"),
        pytest.param(a(S.SCHEDULED), [of(1)], {"later": a(S.PREPARING)}, id="it was launched since"),
        pytest.param(a(S.SCHEDULED), [of(1)], {"later": a(S.RUNNING)}, id="it was launched and runs since"),
        pytest.param(a(S.PREPARING), [of(1, alive=False)], {}, id="the launcher clears a dead container"),
        pytest.param(a(S.PULLING), [of(1, alive=False)], {}, id="the launcher clears it during a pull, too"),
        pytest.param(a(S.RUNNING), [of(1)], {"later": a(S.TERMINATING)}, id="the next round stops it"),
    ],
)
def test_nothing_is_healed_that_may_heal_itself(
    lab: World, observed: list[Observed], more: dict[str, Any]
) -> None:
    assert healed(lab, *observed, **more) == ()


def test_a_running_session_whose_container_is_gone_is_ended_and_keeps_its_share_until_then() -> None:
    message = "the session's container or process was removed outside JupyterHub"
    assert healed(a(S.RUNNING)) == (ProcessGone(1, 1, EndCause.EXITED, message),)


def test_a_running_session_whose_container_has_died_ends_for_the_engines_reason() -> None:
    died = of(1, alive=False, end_cause=EndCause.OOM, message="out of memory")
    assert healed(a(S.RUNNING), died) == (ProcessGone(1, 1, EndCause.OOM, "out of memory"),)
    silent = of(1, alive=False)
    assert healed(a(S.RUNNING), silent) == (
        ProcessGone(1, 1, EndCause.EXITED, "the session's process ended"),
    )


def test_an_earlier_attempts_container_does_not_stand_for_the_session() -> None:
    ended, removed = healed(ANEW, of(1, attempt=1))
    assert isinstance(ended, ProcessGone)
    why = "it is of attempt 1, and its session is at attempt 2"
    assert removed == Remove(of(1, attempt=1), why)


def test_a_terminating_session_is_finished_only_when_nothing_of_it_is_left() -> None:
    assert healed(a(S.TERMINATING)) == (Finish(1),)
    assert healed(a(S.TERMINATING), of(1)) == (Stop(1, of(1)),)
    assert healed(a(S.TERMINATING), of(1, alive=False)) == (Stop(1, of(1, alive=False)),)


def test_every_container_of_a_terminating_session_is_stopped_whatever_its_attempt() -> None:
    first, second = of(1, attempt=1), of(1, attempt=2)
    assert healed(a(S.TERMINATING), second, first) == (Stop(1, first), Stop(1, second))


def test_a_launch_under_way_does_not_keep_a_container_or_another_session() -> None:
    assert healed(a(S.TERMINATING), of(1), launching=[1]) == (Stop(1, of(1)),)
    assert healed(a(S.TERMINATING), launching=[2]) == (Finish(1),)


def test_a_container_without_a_session_is_a_ghost() -> None:
    assert healed(LAB, of(9)) == (Remove(of(9), "its session has ended or never was"),)


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
    ended = ProcessGone(
        1, 1, EndCause.EXITED, "the session's container or process was removed outside JupyterHub"
    )
    assert healed(a(S.RUNNING), there) == (ended, ghost)
    assert healed(a(S.TERMINATING), there) == (Finish(1), ghost)


def test_healings_come_in_order_whatever_the_order_of_the_observation() -> None:
    lab = LAB.running("a", "1", state=S.TERMINATING).running("b", "1").running("c", "1", state=S.TERMINATING)
    things = [of(9), of(8), of(3), of(1)]
    healings = healed(lab, *things)
    assert healings == healed(lab, *reversed(things))
    assert [type(h).__name__ for h in healings] == ["Stop", "ProcessGone", "Stop", "Remove", "Remove"]
