"""Lines as JSON: one object a line whatever is in a message, with the ids of the session and the request it is about."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest

from fgpuspawner import logs

FORGED = 'ann\n{"level": "INFO", "message": "all is well"}\r\n[I 2026-01-01 00:00:00 fgpu] forged\u2028'


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(logs, "_kept", {})
    told = Told()
    yield told
    told.log.removeHandler(told)


class Told(logging.Handler):
    """A log of its own, and its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logs.JsonLines("%(color)s%(message)s", "%H", "%", True))
        self.lines: list[str] = []
        self.log = logging.getLogger("fgpu.tests")
        self.log.propagate = False
        self.log.setLevel("INFO")
        self.log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def last(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.lines[-1])
        return found


def test_what_users_name_stays_in_its_line(log: Told) -> None:
    log.log.warning("Session %d (%s): %s", 1, FORGED, {"fgpu": "0.5\n"})
    assert len(log.lines[0].splitlines()) == 1
    assert log.lines[0].isascii()
    assert log.lines[0].startswith(
        '{"process": "hub", "level": "WARNING", "logger": "fgpu.tests", "message": '
    )
    assert FORGED in log.last()["message"]
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.log.exception("A step failed")
    assert len(log.lines[1].splitlines()) == 1
    assert "ValueError" in log.last()["exc_info"]


@pytest.mark.parametrize(
    "given", [None, "", "short", "a" * 65, "with space", "12345678\n", "ü" * 9, 12345678]
)
def test_an_id_that_could_say_more_than_an_id_is_not_taken(given: object) -> None:
    made = copy_context().run(logs.begin, given)
    assert made != given
    assert logs.ACCEPTED.fullmatch(made)


async def test_what_a_request_begins_has_its_id_and_what_another_begins_its_own(log: Told) -> None:
    async def step(given: str) -> None:
        assert logs.begin(given) == given
        await asyncio.sleep(0)
        await asyncio.create_task(said(given))
        await asyncio.to_thread(log.log.info, "%s", given)

    async def said(given: str) -> None:
        await asyncio.sleep(0)
        log.log.info("%s", given)

    await asyncio.gather(*(asyncio.create_task(step(f"request-{i}")) for i in range(3)))
    found = [json.loads(line) for line in log.lines]
    assert len(found) == 6
    assert all(line["request_id"] == line["message"] for line in found)
    log.log.info("of nobody")
    assert "request_id" not in log.last()


async def test_a_line_about_a_session_has_the_id_that_the_session_came_of(log: Told) -> None:
    async def of_another() -> None:
        logs.begin("another-request")
        log.log.info("Session %d (%s/%s): %s", 7, "ann", "", "ends")
        assert (log.last()["session_id"], log.last()["request_id"]) == (7, "first-request")
        with logs.of_session(7):
            log.log.info("Container removed")
            assert (log.last()["session_id"], log.last()["request_id"]) == (7, "first-request")
        log.log.info("Done")
        assert "session_id" not in log.last()
        assert log.last()["request_id"] == "another-request"

    assert logs.keep(7, "first-request") == logs.keep(7, "later-request") == "first-request"
    await asyncio.create_task(of_another())


def test_ids_of_so_many_sessions_are_known_at_a_time(log: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_KEPT", 3)
    for session_id in range(10):
        logs.keep(session_id, f"request-{session_id}")
    assert logs._kept == {i: f"request-{i}" for i in (7, 8, 9)}
