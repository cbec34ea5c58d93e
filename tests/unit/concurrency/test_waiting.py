"""Waiting for a server to answer, and being told to stop waiting."""

from __future__ import annotations

import asyncio

import pytest

from fgpuspawner.concurrency.waiting import it_answers, to_the_end


async def test_a_cancel_that_comes_as_a_connection_is_refused_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The server's end cancels it. Lost, that end would wait for ever, and the share stay taken.
    refused = 0

    async def refuses(ip: str, port: int) -> None:
        nonlocal refused
        refused += 1
        if refused == 3:
            # After this refusal, and before the loop tells anybody of it.
            asyncio.get_running_loop().call_soon(waits.cancel)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", refuses)
    waits = asyncio.ensure_future(it_answers("127.0.0.1", 9, "/api"))
    done, _ = await asyncio.wait([waits], timeout=30)
    try:
        assert done
        assert waits.cancelled()
        assert refused == 3
    finally:
        while not waits.done():
            waits.cancel()
            await asyncio.wait([waits], timeout=1)


async def test_what_must_not_be_left_in_mid_air_is_waited_for_however_often_its_caller_is_cancelled() -> None:
    ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waits = asyncio.ensure_future(to_the_end(ends))
    for _ in range(3):
        await asyncio.sleep(0)
        waits.cancel()
    await asyncio.sleep(0.01)
    assert not waits.done()
    ends.set_result(None)
    await asyncio.wait([waits], timeout=30)
    assert waits.cancelled()
