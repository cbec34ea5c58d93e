"""The contract of every queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from queue_lab import MOST_WAITING, NODE, Lab

from fgpu_scheduler.core.model import EndCause, Request, Session, SessionState, WaitReason
from fgpu_scheduler.errors import InvalidTransition, SessionExists, TooManyPending, UnknownSession
from fgpu_scheduler.queue import Requeued, SessionEnded

S = SessionState
pytestmark = pytest.mark.timeout(60)


def ask(user: str, server_name: str = "", *, fgpu_milli: int = 1000) -> Request:
    """Return a request for the whole GPU."""
    return Request(user, server_name, "image", "default", fgpu_milli, 1000, 1024)


async def submit(lab: Lab, user: str, **more: str) -> Session:
    (session,) = await lab.queue.submit([ask(user, **more)])
    return session


async def becomes(lab: Lab, session_id: int, state: S) -> Session:
    """Return the session once it is in this state, PENDING with a wait reason."""
    async for _ in lab.queue.changes(at_least_every_s=1):
        session = await lab.queue.session(session_id)
        if session.state is state and (state is not S.PENDING or session.wait_reason is not None):
            return session
    raise AssertionError("the queue tells of nothing any more")


async def waits(lab: Lab, session_id: int) -> Session:
    return await becomes(lab, session_id, S.PENDING)


async def places(lab: Lab) -> dict[int, int]:
    return {session_id: told.position for session_id, told in (await lab.queue.outlook()).forecasts.items()}


@asynccontextmanager
async def waiting_for(lab: Lab, session_id: int) -> AsyncIterator[asyncio.Task[Session]]:
    """Wait for a session as a spawn does; cancelling releases nothing."""
    task = asyncio.create_task(lab.queue.placed(session_id))
    async for _ in lab.queue.changes(at_least_every_s=0.05):
        if task.done() or not (await lab.queue.session(session_id)).held:
            break
    yield task
    task.cancel()
    with suppress(asyncio.CancelledError, SessionEnded):
        await task


async def test_session_starts_when_capacity_is_free_and_knows_its_placement(lab: Lab) -> None:
    new = await submit(lab, "alice")
    assert new.state in (S.PENDING, S.SCHEDULED)
    placed = await lab.queue.placed(new.id)
    assert placed.placement is not None
    assert (placed.state, placed.placement.node_id) == (S.SCHEDULED, NODE.id)
    runs = await lab.run(new.id)
    assert (runs.state, runs.attempt, runs.launched) == (S.RUNNING, 1, f"c{new.id}")
    assert await lab.queue.serving("alice", "") == runs == await lab.queue.session(new.id)
    assert await lab.queue.live() == (runs,)


async def test_pending_sessions_have_position_reason_and_forecast_in_submission_order(lab: Lab) -> None:
    await lab.run((await submit(lab, "alice")).id)
    bob, carol = [await submit(lab, user) for user in ("bob", "carol")]
    assert (await waits(lab, bob.id)).wait_reason is not None
    await waits(lab, carol.id)
    assert await places(lab) == {bob.id: 1, carol.id: 2}
    told = (await lab.queue.outlook()).forecasts[carol.id]
    assert told.text
    assert told.basis
    assert isinstance(told.reason, WaitReason)


async def test_requests_are_queued_together_or_not_at_all(lab: Lab) -> None:
    first, second = await lab.queue.submit([ask("alice", "a"), ask("alice", "b")])
    assert first.id < second.id
    before = await lab.queue.live()
    with pytest.raises(SessionExists):
        await lab.queue.submit([ask("bob"), ask("alice", "a")])
    with pytest.raises(TooManyPending):
        await lab.queue.submit([ask("carol", str(n)) for n in range(MOST_WAITING + 1)])
    assert [s.id for s in await lab.queue.live()] == [s.id for s in before]
    assert await lab.queue.serving("bob", "") is None


async def test_share_is_freed_once_an_ended_session_is_gone(lab: Lab) -> None:
    told: list[int] = []
    lab.queue.on_end = lambda session: told.append(session.id)
    alice = (await lab.run((await submit(lab, "alice")).id)).id
    bob = (await submit(lab, "bob")).id
    async with waiting_for(lab, bob) as spawn:
        with lab.queue.ending(alice):
            ends = await lab.queue.end(alice, EndCause.OOM, "out of memory")
            assert (ends.state, ends.end_cause, ends.message) == (
                S.TERMINATING,
                EndCause.OOM,
                "out of memory",
            )
            assert told == [alice]
            assert (await lab.queue.end(alice, EndCause.USER)).end_cause is EndCause.OOM
            await waits(lab, bob)
            assert not spawn.done()
            ended = await lab.clear(alice)
        assert (await spawn).state is S.SCHEDULED
    assert ended.state is S.ERROR
    assert (await lab.queue.gone(alice)).state is S.ERROR
    assert await lab.queue.serving("alice", "") is None


async def test_cancelled_pending_session_is_notified_and_leaves_the_queue(lab: Lab) -> None:
    await lab.run((await submit(lab, "alice")).id)
    bob, carol = [(await submit(lab, user)).id for user in ("bob", "carol")]
    async with waiting_for(lab, bob) as spawn:
        await waits(lab, bob)
        assert (await lab.queue.end(bob, EndCause.USER)).state is S.CANCELLED
        with pytest.raises(SessionEnded) as ended:
            await spawn
    assert ended.value.session.end_cause is EndCause.USER
    assert await places(lab) == {carol: 1}
    with pytest.raises(SessionEnded):
        await lab.queue.prepare(bob)


async def test_cancelled_wait_keeps_the_queue_position(lab: Lab) -> None:
    alice = (await lab.run((await submit(lab, "alice")).id)).id
    bob = (await submit(lab, "bob")).id
    async with waiting_for(lab, bob):
        await waits(lab, bob)
    assert await places(lab) == {bob: 1}
    await lab.queue.end(alice, EndCause.USER)
    await lab.clear(alice)
    assert (await lab.queue.placed(bob)).state is S.SCHEDULED


async def test_held_request_keeps_its_position_and_is_placed_only_when_awaited(lab: Lab) -> None:
    alice = (await lab.run((await submit(lab, "alice")).id)).id
    bob, carol = [(await submit(lab, user)).id for user in ("bob", "carol")]
    await lab.queue.hold(bob)
    await lab.queue.end(alice, EndCause.USER)
    await lab.clear(alice)
    assert (await lab.queue.placed(carol)).id == carol
    assert (await lab.queue.session(bob)).state is S.PENDING
    await lab.queue.end(carol, EndCause.USER)
    assert (await lab.queue.placed(bob)).state is S.SCHEDULED


async def test_replacing_request_ends_the_old_one_in_the_same_step(lab: Lab) -> None:
    await lab.run((await submit(lab, "alice")).id)
    old = await submit(lab, "bob")
    async with waiting_for(lab, old.id) as spawn:
        await waits(lab, old.id)
        (new,) = await lab.queue.submit([ask("bob", fgpu_milli=500)], replacing=old.id)
        with pytest.raises(SessionEnded):
            await spawn
    ended = await lab.queue.session(old.id)
    assert (ended.state, ended.end_cause) == (S.CANCELLED, EndCause.USER)
    serving = await lab.queue.serving("bob", "")
    assert serving is not None
    assert (serving.id, serving.request.fgpu_milli) == (new.id, 500)


async def test_refused_replacement_keeps_the_old_request_in_place(
    lab: Lab,
) -> None:
    await lab.run((await submit(lab, "alice")).id)
    bob, carol = [(await submit(lab, user)).id for user in ("bob", "carol")]
    await waits(lab, carol)
    too_many = [ask("bob", str(n)) for n in range(MOST_WAITING + 1)]
    with pytest.raises(TooManyPending):
        await lab.queue.submit(too_many, replacing=bob)
    with pytest.raises(SessionExists):
        await lab.queue.submit([ask("bob"), ask("carol")], replacing=bob)
    assert (await lab.queue.session(bob)).state is S.PENDING
    assert await places(lab) == {bob: 1, carol: 2}


async def test_replaced_running_session_keeps_its_share_until_it_is_gone(lab: Lab) -> None:
    told: list[int] = []
    lab.queue.on_end = lambda session: told.append(session.id)
    old = await lab.run((await submit(lab, "alice")).id)
    with lab.queue.ending(old.id):
        (new,) = await lab.queue.submit([ask("alice")], replacing=old.id)
        left = await lab.queue.session(old.id)
        assert (left.state, left.placement, told) == (S.TERMINATING, old.placement, [old.id])
        await waits(lab, new.id)
        await lab.clear(old.id)
    assert (await lab.queue.placed(new.id)).state is S.SCHEDULED


async def test_nudge_wakes_followers_of_changes(lab: Lab) -> None:
    changes = lab.queue.changes(at_least_every_s=60)
    await anext(changes)
    following = asyncio.ensure_future(anext(changes))
    lab.queue.nudge()
    await asyncio.wait_for(following, 30)


async def test_restart_keeps_running_sessions_and_the_queue_order(lab: Lab) -> None:
    runs = await lab.run((await submit(lab, "alice")).id)
    bob, carol = [(await submit(lab, user)).id for user in ("bob", "carol")]
    await waits(lab, carol)
    await lab.restart()
    assert [s.id for s in await lab.queue.live()] == [runs.id, bob, carol]
    assert await lab.queue.serving("alice", "") == runs
    assert [(await lab.queue.session(i)).held for i in (bob, carol)] == [True, True]
    assert await places(lab) == {bob: 1, carol: 2}
    # Carol is resumed first, but stays behind bob.
    async with waiting_for(lab, carol) as spawn, waiting_for(lab, bob) as first:
        await waits(lab, bob)
        with lab.queue.ending(runs.id):
            await lab.queue.end(runs.id, EndCause.USER)
            await lab.clear(runs.id)
        assert (await first).id == bob
        assert not spawn.done()


async def test_launch_interrupted_by_a_restart_begins_again_in_its_share(lab: Lab) -> None:
    new = await submit(lab, "alice")
    await lab.queue.placed(new.id)
    first = await lab.queue.prepare(new.id)
    await lab.queue.pulling(new.id, first.attempt)
    await lab.restart()
    again = await lab.run(new.id)
    assert (again.state, again.attempt, again.placement) == (S.RUNNING, first.attempt + 1, first.placement)


async def test_returned_placement_goes_to_the_next_and_its_session_waits_with_the_reason(
    lab: Lab,
) -> None:
    alice = (await submit(lab, "alice")).id
    bob, carol = [(await submit(lab, user)).id for user in ("bob", "carol")]
    await lab.queue.placed(alice)
    with lab.queue.launching(alice):
        launched = await lab.queue.prepare(alice)
        waits = await lab.queue.give_back(alice, launched.attempt, "1 Insufficient\n nvidia.com/gpu")
    assert (waits.state, waits.placement, waits.wait_reason) == (S.PENDING, None, WaitReason.CLUSTER)
    assert [(node.node_id, node.words) for node in waits.refused] == [
        (NODE.id, "1 Insufficient nvidia.com/gpu")
    ]
    with pytest.raises(Requeued):
        await lab.queue.prepare(alice)
    assert (await lab.queue.placed(bob)).state is S.SCHEDULED
    # Still ahead of later requests.
    assert await places(lab) == {alice: 1, carol: 2}


async def test_placement_of_an_ended_session_cannot_be_returned(lab: Lab) -> None:
    new = (await submit(lab, "alice")).id
    await lab.queue.placed(new)
    attempt = (await lab.queue.prepare(new)).attempt
    await lab.queue.end(new, EndCause.USER)
    with pytest.raises(SessionEnded):
        await lab.queue.give_back(new, attempt, "no room")
    assert (await lab.clear(new)).state is S.TERMINATED


async def test_warning_is_stored_only_for_a_running_session(lab: Lab) -> None:
    runs = await lab.run((await submit(lab, "alice")).id)
    waiting = await submit(lab, "bob")
    assert (await lab.queue.warn(runs.id, "too much memory")).message == "too much memory"
    assert (await lab.queue.warn(runs.id, None)).message is None
    assert (await lab.queue.warn(waiting.id, "too much memory")).message is None


async def test_unknown_session_is_an_error(lab: Lab) -> None:
    assert await lab.queue.serving("nobody", "") is None
    with pytest.raises(UnknownSession):
        await lab.queue.session(99)
    with pytest.raises(UnknownSession):
        await lab.queue.submit([ask("alice")], replacing=99)
    assert await lab.queue.live() == ()


async def test_nodes_are_the_configured_ones(lab: Lab) -> None:
    assert (await lab.queue.snapshot()).nodes == (NODE,)
    larger = replace(NODE, memory_mib=2 * NODE.memory_mib)
    await lab.queue.change_nodes([larger])
    assert (await lab.queue.snapshot()).nodes == (larger,)
    assert not lab.queue.database_is_away


# --- Parking ---


async def test_a_parked_session_gives_its_share_to_others_and_gets_it_back_when_they_end(lab: Lab) -> None:
    away = await lab.run((await submit(lab, "alice")).id)
    parked = await lab.queue.park(away.id, 512)
    assert (parked.state, parked.parked_mib, parked.placement) == (S.PARKED, 512, away.placement)
    assert await lab.queue.park(away.id, 512) == parked
    assert await lab.queue.serving("alice", "") == parked
    other = await lab.run((await submit(lab, "bob")).id)
    wanted = await lab.queue.want(away.id, True)
    assert wanted.wanted_at_s is not None
    assert (await lab.queue.want(away.id, True)).wanted_at_s == wanted.wanted_at_s
    assert (await lab.queue.outlook()).wanted[away.id].position == 1
    late = await submit(lab, "carol")
    await lab.queue.end(other.id, EndCause.USER)
    await lab.queue.gone(other.id)
    await becomes(lab, away.id, S.RESUMING)
    assert (await lab.queue.session(late.id)).state is S.PENDING
    back = await lab.queue.resumed(away.id)
    assert (back.state, back.started_at_s, back.parked_mib) == (S.RUNNING, away.started_at_s, 0)
    assert await lab.queue.resumed(away.id) == back


async def test_a_session_whose_gpu_cannot_be_given_back_is_parked_again_with_a_message(lab: Lab) -> None:
    away = await lab.run((await submit(lab, "alice")).id)
    await lab.queue.park(away.id, 512)
    await lab.queue.want(away.id, True)
    await becomes(lab, away.id, S.RESUMING)
    parked = await lab.queue.park(away.id, 512, "the driver refused")
    assert (parked.state, parked.wanted_at_s, parked.message) == (S.PARKED, None, "the driver refused")


async def test_a_call_that_no_longer_waits_gives_up_its_claim(lab: Lab) -> None:
    away = await lab.run((await submit(lab, "alice")).id)
    await lab.queue.park(away.id, 0)
    await lab.run((await submit(lab, "bob")).id)
    await lab.queue.want(away.id, True)
    assert (await lab.queue.want(away.id, False)).wanted_at_s is None
    assert (await lab.queue.outlook()).wanted == {}


async def test_a_session_on_demand_starts_beside_a_full_gpu_and_is_parked_when_its_server_answers(
    lab: Lab,
) -> None:
    await lab.run((await submit(lab, "alice")).id)
    (new,) = await lab.queue.submit([replace(ask("bob"), on_demand=True)])
    parked = await lab.run(new.id)
    assert parked.state is S.PARKED
    assert parked.placement is not None
    assert await lab.queue.running(new.id, parked.attempt, parked.launched or "") == parked


async def test_only_a_session_that_runs_is_parked_or_resumed(lab: Lab) -> None:
    await lab.run((await submit(lab, "alice")).id)
    waiting = await submit(lab, "bob")
    with pytest.raises(InvalidTransition):
        await lab.queue.park(waiting.id, 0)
    with pytest.raises(InvalidTransition):
        await lab.queue.resumed(waiting.id)
    assert (await lab.queue.want(waiting.id, True)).wanted_at_s is None
