"""Whether the Hub works, for monitors: whoever likes may ask as often as they like."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fgpu_scheduler import StoreUnavailable
from fgpuspawner.hub import room
from fgpuspawner.hub.room import DatabaseLook


async def test_a_thousand_who_ask_at_once_make_one_look_at_the_database() -> None:
    looks, go_on = list[int](), threading.Event()

    def look() -> None:
        looks.append(1)
        assert go_on.wait(30)

    database = DatabaseLook(look)
    asking = [asyncio.create_task(database.works()) for _ in range(1000)]
    await asyncio.sleep(0)
    # One who leaves takes nobody's answer away.
    asking[0].cancel()
    go_on.set()
    assert set(await asyncio.gather(*asking[1:])) == {True}
    assert await database.works()
    assert looks == [1], "and each serves a moment"


async def test_a_database_that_cannot_be_written_is_found_out_and_so_is_one_that_can_be_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "LOOK_FRESH_S", 0.0)
    away = True

    def look() -> None:
        if away:
            raise StoreUnavailable("the database is away")

    database = DatabaseLook(look)
    assert not await database.works()
    away = False
    await asyncio.sleep(0)
    assert await database.works()
