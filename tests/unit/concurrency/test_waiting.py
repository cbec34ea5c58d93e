"""Being told to stop waiting."""

from __future__ import annotations

import asyncio

from fgpuspawner.concurrency.waiting import to_the_end


async def test_work_ends_although_its_caller_is_cancelled_twice() -> None:
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
