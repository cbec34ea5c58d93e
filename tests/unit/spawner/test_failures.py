"""Starts that came to nothing: what to do next, and what the form remembers of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bs4 import BeautifulSoup
from simulator.world import request

from fgpu_scheduler import EndCause, Session, SessionState
from fgpuspawner.engines.base import LAST_WORDS, Ended
from fgpuspawner.spawner.failures import (
    NEXT_STEP,
    REMEMBERED_S,
    end_words,
    failed_html,
    last_end,
    last_failure,
)

FAILED = Session(
    7,
    replace(request("ann"), server_name="second"),
    SessionState.ERROR,
    0,
    ended_at_s=100,
    end_cause=EndCause.LAUNCH_FAILED,
    message="the server ended",
)


def test_every_end_cause_has_a_next_step() -> None:
    assert set(NEXT_STEP) == set(EndCause)
    for cause in EndCause:
        assert NEXT_STEP[cause].endswith(".")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Your session did not start: the server ended. Try again."),
        (
            {"end_cause": EndCause.USER, "message": None},
            "Your request was cancelled. Ask again whenever you like.",
        ),
        (
            {"end_cause": EndCause.USER, "message": None, "started_at_s": 50},
            "Your session was ended. Ask again whenever you like.",
        ),
        (
            {
                "end_cause": EndCause.USER,
                "message": "ended by the administrator zoe: repair",
                "started_at_s": 50,
            },
            "Your session was ended: ended by the administrator zoe: repair. Ask again",
        ),
        (
            {"end_cause": EndCause.IDLE, "message": None, "started_at_s": 50},
            "Your session has ended. It was idle.",
        ),
    ],
    ids=str,
)
def test_server_page_says_why_the_session_ended(changes: dict[str, object], words: str) -> None:
    assert end_words(replace(FAILED, **changes)).startswith(words)  # type: ignore[arg-type]


def test_message_of_an_end_is_escaped() -> None:
    hostile = "<script>alert(1)</script> </div>\"'"
    page = BeautifulSoup(failed_html(hostile, "Try again."), "html.parser")
    assert [e.text for e in page.select("div")] == [hostile, "Try again."]
    assert not page.select("script")


@pytest.mark.parametrize(
    ("changes", "server", "now_s", "found"),
    [
        ({}, "second", 100, True),
        ({}, "second", 100 + REMEMBERED_S, True),
        ({}, "second", 101 + REMEMBERED_S, False),
        ({}, "", 100, False),
        ({"end_cause": EndCause.QUEUE_TIMEOUT}, "second", 100, True),
        ({"end_cause": EndCause.USER}, "second", 100, False),
        ({"started_at_s": 50}, "second", 100, False),
        ({"ended_at_s": None, "end_cause": None, "state": SessionState.PENDING}, "second", 100, False),
    ],
    ids=str,
)
def test_form_remembers_the_last_failed_start_of_its_server(
    changes: dict[str, object], server: str, now_s: int, found: bool
) -> None:
    newest = replace(FAILED, **changes)  # type: ignore[arg-type]
    older = replace(FAILED, id=3, message="older")
    assert last_failure([older, newest], server, now_s=now_s) == (newest if found else None)


@pytest.mark.parametrize(
    ("changes", "server", "now_s", "found"),
    [
        ({}, "second", 100, True),
        ({"end_cause": EndCause.USER, "started_at_s": 50}, "second", 100 + REMEMBERED_S, True),
        ({}, "second", 101 + REMEMBERED_S, False),
        ({}, "", 100, False),
        ({"message": None}, "second", 100, True),
        ({"ended_at_s": None, "end_cause": None, "state": SessionState.PENDING}, "second", 100, False),
    ],
    ids=str,
)
def test_last_end_of_a_server_is_remembered_for_an_hour(
    changes: dict[str, object], server: str, now_s: int, found: bool
) -> None:
    newest = replace(FAILED, **changes)  # type: ignore[arg-type]
    older = replace(FAILED, id=3, message="older")
    assert last_end([older, newest], server, now_s=now_s) == (newest if found else None)


def test_last_words_are_left_out_where_they_may_hold_values_of_the_owner() -> None:
    ended = Ended(1, EndCause.EXITED, f"the server ended{LAST_WORDS}KEY is 7")
    assert ended.without_values(FAILED) == ended
    own = replace(FAILED, request=replace(FAILED.request, setup=3))
    assert ended.without_values(own).message == "the server ended"
