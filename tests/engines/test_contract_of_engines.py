"""The contract of every engine: local processes, Docker here and elsewhere, Kubernetes, and the tests' own engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import requests
from labs import Lab, MachineLab

from fgpu_scheduler import EndCause, Session
from fgpuspawner.engines.base import Ended, Endpoint, Engine, EngineSilent, LaunchFailed, PullFailed
from fgpuspawner.hub.session_probes import prove
from fgpuspawner.hub.session_server import first_answer
from fgpuspawner.images.availability import Where
from fgpuspawner.images.model import Image

PATIENCE_S = 60


async def until(true: Callable[[], Any], what: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = true()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.05)
    raise AssertionError(what)


async def answer(endpoint: Endpoint, path: str = "") -> str:
    """Return the answer of the server at an endpoint, waiting until it answers."""
    async with asyncio.timeout(PATIENCE_S):
        await first_answer(endpoint.ip, endpoint.port, "/")
    url = f"http://{endpoint.ip}:{endpoint.port}/{path}"
    return (await asyncio.to_thread(requests.get, url, timeout=10)).text


async def ended(engine: Engine, session: Session) -> Ended:
    found = await until(lambda: engine.ended(session), "it is known to have ended")
    assert isinstance(found, Ended)
    return found


async def alive(engine: Engine) -> list[tuple[int, int]]:
    """Return the session and attempt of everything observed alive."""
    seen = await engine.observe()
    return sorted((thing.session_id, thing.attempt) for thing in seen.things if thing.alive)


async def test_a_server_is_started_where_its_session_was_placed_and_answers(lab: Lab) -> None:
    engine = lab.engine()
    for node in lab.placed:
        session = lab.session(node.id)
        endpoint = await engine.start(lab.spec(engine, session))
        assert await answer(endpoint) == str(session.id)
        assert await engine.ended(session) is None
        assert not engine.is_away(session)
        (seen,) = [t for t in (await engine.observe()).things if t.session_id == session.id]
        assert (seen.node_id, seen.attempt, seen.alive) == (node.id, 1, True)
    assert sorted((await engine.observe()).nodes) == sorted(node.id for node in lab.placed)


async def test_ended_server_is_reported_with_exit_status_and_last_output(lab: Lab) -> None:
    engine = lab.engine()
    session = lab.session()
    await engine.start(lab.spec(engine, session, "exits"))
    found = await ended(engine, session)
    assert (found.status, found.cause) == (3, EndCause.EXITED), found.message
    assert "status 3" in found.message
    assert "no luck" in found.message
    assert await alive(engine) == []


async def test_log_of_a_running_and_an_ended_server_is_read_by_any_hub(lab: Lab) -> None:
    engine = lab.engine()
    running, failed = lab.session(), lab.session()
    await answer(await engine.start(lab.spec(engine, running)))
    await engine.start(lab.spec(engine, failed, "exits"))
    await ended(engine, failed)
    if not engine.capabilities.reads_logs:
        assert await engine.log(running, lines=9) is None
        return
    again = lab.engine()
    assert b"up" in (await again.log(running, lines=9) or b"").splitlines()
    assert b"no luck" in (await again.log(failed, lines=9) or b"").splitlines()
    assert await again.log(lab.session(), lines=9) is None


async def test_server_out_of_memory_is_ended_with_that_cause(lab: Lab) -> None:
    engine = lab.engine()
    if not engine.capabilities.real_limits:
        pytest.skip("limits of memory are not enforced here, and it says so")
    session = lab.session(memory_mib=128)
    await engine.start(lab.spec(engine, session, "eats"))
    found = await ended(engine, session)
    assert found.cause is EndCause.OOM
    assert "128 MiB" in found.message


@pytest.mark.parametrize("mode", ["serves", "deaf"])
@pytest.mark.parametrize("now", [False, True])
async def test_stopped_session_leaves_nothing_behind(lab: Lab, mode: str, now: bool) -> None:
    engine = lab.engine()
    session = lab.session()
    await answer(await engine.start(lab.spec(engine, session, mode)))
    assert await engine.stop(session, now=now)
    assert await alive(engine) == []
    assert await engine.stop(session, now=True), "twice is fine"


async def test_stop_of_a_session_never_started_returns_at_once(lab: Lab) -> None:
    engine = lab.engine()
    assert await engine.stop(lab.session(), now=False)


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 40, 200])
async def test_stop_cleans_up_a_start_interrupted_at_any_point(lab: Lab, turns: int) -> None:
    engine = lab.engine()
    session = lab.session()
    starting = asyncio.ensure_future(engine.start(lab.spec(engine, session)))
    for _ in range(turns):
        await asyncio.sleep(0.002)
    starting.cancel()
    await asyncio.wait([starting])
    # The Hub may have died too: the next one knows the session only from its database.
    next_one = lab.engine()
    # Ask several times: a kubelet takes up to a minute to end a pod that it has just started.
    for _ in range(4):
        if await next_one.stop(session, now=True):
            break
    else:
        raise AssertionError("it is not known to hold nothing")
    assert await alive(next_one) == []
    await until(lambda: _nothing_lives(engine), "nothing comes up behind the one that was cut off")


async def _nothing_lives(engine: Engine) -> bool:
    return await alive(engine) == []


async def test_next_attempt_starts_while_the_last_one_is_still_ending(lab: Lab) -> None:
    engine = lab.engine()
    first = lab.session()
    await answer(await engine.start(lab.spec(engine, first, "deaf")))
    ending = asyncio.ensure_future(engine.stop(first, now=False))
    await asyncio.sleep(0)
    second = lab.again(first)
    assert await ending
    endpoint = await engine.start(lab.spec(engine, second))
    assert await answer(endpoint) == str(second.id)
    assert await alive(engine) == [(second.id, 2)]
    assert await engine.stop(second, now=True), "that ends every attempt"
    assert await alive(engine) == []


async def test_restarted_hub_finds_running_sessions_and_can_end_them(lab: Lab) -> None:
    before = lab.engine()
    session = lab.session()
    endpoint = await before.start(lab.spec(before, session))
    await answer(endpoint)
    after = lab.engine()
    assert await alive(after) == [(session.id, 1)]
    assert await after.ended(session) is None
    assert await answer(endpoint) == str(session.id)
    assert await after.stop(session, now=False)
    assert await alive(after) == []


async def test_ghost_is_removed_by_its_observation(lab: Lab) -> None:
    engine = lab.engine()
    session = lab.session()
    await answer(await engine.start(lab.spec(engine, session)))
    (ghost,) = (await engine.observe()).things
    assert await engine.remove(ghost)
    assert await alive(engine) == []
    assert await engine.remove(ghost) in (True, False), "again is no error"


async def test_sessions_of_another_installation_are_not_observed_or_touched(lab: Lab) -> None:
    engine = lab.engine()
    with lab.foreign() as is_untouched:
        await until(is_untouched, "it is there")
        assert list((await engine.observe()).things) == []
        session = lab.session()
        await engine.start(lab.spec(engine, session))
        assert await engine.stop(session, now=True)
        assert is_untouched()


async def test_silent_engine_is_not_treated_as_empty(lab: Lab) -> None:
    if not lab.can_be_silent:
        pytest.skip(
            "it always answers; or it is everybody's here, and another machine's is stopped in its place"
        )
    engine = lab.engine()
    node = lab.placed[-1] if lab.name != "docker engines" else next(n for n in lab.placed if n.id == "far")
    session = lab.session(node.id)
    await answer(await engine.start(lab.spec(engine, session)))
    with lab.silence():
        await until(lambda: _is_away(engine, session), "it is found out")
        seen = await engine.observe()
        assert node.id not in seen.nodes
        assert await engine.ended(session) is None
        assert not await engine.stop(session, now=True), "it is not known to be gone"
        with pytest.raises(EngineSilent):
            await asyncio.to_thread(engine.sessions_of, [1], node.id)
        spec = lab.spec(engine, lab.session(node.id))
        with pytest.raises((LaunchFailed, EngineSilent)):
            await engine.start(spec)
    await until(lambda: _sees(engine, node.id), "it answers again")
    assert (session.id, 1) in await alive(engine)
    assert await engine.stop(session, now=True)


@pytest.mark.parametrize("body", [b"<html>Please log in to this network", b"{}", b"[]x"])
async def test_engine_with_invalid_answers_is_not_treated_as_empty(lab: Lab, body: bytes) -> None:
    engine = lab.engine()
    if not isinstance(lab, MachineLab):
        pytest.skip("nothing stands between the Hub and this engine")
    session = lab.session("far")
    await answer(await engine.start(lab.spec(engine, session)))
    with lab.nonsense(body):
        assert await engine.ended(session) is None
        assert not await engine.stop(session, now=True), "it is not known to be gone"
        with pytest.raises(EngineSilent):
            await asyncio.to_thread(engine.sessions_of, [1], "far")
        assert "far" not in (await engine.observe()).nodes
        assert engine.is_away(session)
        with pytest.raises((LaunchFailed, EngineSilent)):
            await engine.start(lab.spec(engine, lab.session("far")))
    await until(lambda: _sees(engine, "far"), "it answers again")
    assert (session.id, 1) in await alive(engine)
    assert await engine.stop(session, now=True)


async def _is_away(engine: Engine, session: Session) -> bool:
    await engine.observe()
    return engine.is_away(session)


async def _sees(engine: Engine, node_id: str) -> bool:
    return node_id in (await engine.observe()).nodes


async def test_processes_are_attributed_to_their_sessions_and_unknown_ones_to_none(lab: Lab) -> None:
    engine = lab.engine()
    node = lab.placed[0]
    session = lab.session(node.id)
    await answer(await engine.start(lab.spec(engine, session)))
    pid = lab.pid_of(engine, session)
    where = node.id if lab.isolation.is_elsewhere(node.id) else None
    if not lab.knows_processes:
        with pytest.raises(EngineSilent):
            await asyncio.to_thread(engine.sessions_of, [1], where)
        return
    found = await asyncio.to_thread(engine.sessions_of, [1, *([pid] if pid else [])], where)
    assert dict(found) == ({pid: session.id} if pid else {})


MODES = {
    "a fraction": ({"gpu_by": "fgpu", "fgpu": "0.6"}, [2432]),
    "a whole GPU": ({"gpu_by": "fgpu", "fgpu": "2"}, [8192]),
    "several whole GPUs": ({"gpu_by": "fgpu", "fgpu": "4"}, [8192, 8192]),
    "memory only": ({"gpu_by": "memory", "gpu_memory_mib": "5120", "compute_percent": ""}, [5120]),
    "memory and compute": ({"gpu_by": "memory", "gpu_memory_mib": "1024", "compute_percent": "25"}, [1024]),
    "full memory": ({"gpu_by": "memory", "gpu_memory_mib": "8192", "compute_percent": ""}, [8192]),
}
"""Each way to request a GPU in the launch form, and the memory of each GPU that the session then sees."""


@pytest.mark.parametrize(("fields", "memory_mib"), MODES.values(), ids=MODES)
async def test_each_way_to_ask_for_a_gpu_starts_and_nvidia_smi_inside_shows_the_slice(
    lab: Lab, fields: dict[str, str], memory_mib: list[int]
) -> None:
    engine = lab.engine()
    session = lab.asked_for(fields)
    spec = lab.spec(engine, session)
    endpoint = await engine.start(spec)
    assert await answer(endpoint) == str(session.id)
    if lab.name == "memory":
        pytest.skip("a thread has no limits of its own")
    await prove(engine, lab.isolation, lab.settings, spec, Endpoint("", 0))
    shown = (await answer(endpoint, "nvidia-smi")).splitlines()
    assert shown == [f"{len(memory_mib)}, {mib}" for mib in memory_mib]


async def test_present_image_is_not_pulled_and_unavailable_one_is_reported(lab: Lab) -> None:
    engine = lab.engine()
    node = lab.placed[0]
    assert await engine.has_image(lab.image, node.id)
    assert (await engine.availability(lab.image, node.id)).where in (Where.HERE, Where.UNKNOWN)
    await engine.fetch_image(lab.image, node.id, 1)
    if not engine.capabilities.fetches_images:
        return
    gone = Image("gone", "Gone", "gone", "1", "3", "127.0.0.1:9/fgpu-test/nowhere:1", enabled=True)
    assert not await engine.has_image(gone, node.id)
    assert (await engine.availability(gone, node.id)).where in (Where.CANNOT, Where.UNKNOWN)
    with pytest.raises(PullFailed, match="nowhere:1"):
        async with asyncio.timeout(PATIENCE_S):
            await engine.fetch_image(gone, node.id, 1)
    assert engine.fetching() == {}


async def test_engine_reports_what_it_cannot_do(lab: Lab) -> None:
    engine = lab.engine()
    able = engine.capabilities
    assert bool(engine.image_stores()) is able.fetches_images
    elsewhere = {node.id for node in lab.placed if lab.isolation.is_elsewhere(node.id)}
    assert engine.survey().keys() == elsewhere
    assert able.machines or not elsewhere
