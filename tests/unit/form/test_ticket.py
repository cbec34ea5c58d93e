from __future__ import annotations

import json

import pytest
from tornado.web import create_signed_value

from fgpuspawner.form import ticket

KEY, OTHER = "00" * 32, "11" * 32


def test_a_ticket_says_whom_it_is_for() -> None:
    text = ticket.make(KEY, "alice", ["ml101", "lab"], login="a", now_s=1000)
    assert ticket.read(KEY, text, login="a", now_s=1000 + ticket.VALID_FOR_S) == ticket.Ticket(
        "alice", ("lab", "ml101")
    )


def test_a_ticket_ends() -> None:
    text = ticket.make(KEY, "alice", [], login="a", now_s=1000)
    with pytest.raises(ticket.BadTicket, match="too old for a forecast; reload"):
        ticket.read(KEY, text, login="a", now_s=1001 + ticket.VALID_FOR_S)


@pytest.mark.parametrize(
    "forged",
    ["", ".", "x", "é.é", "e30=.00", "!!!.???", "W10=." + "0" * 64, "2|1:0|9:999999999|1:x|0:|00", "1|x|y"],
)
def test_what_was_not_made_here_is_refused(forged: str) -> None:
    with pytest.raises(ticket.BadTicket, match="this is no ticket"):
        ticket.read(KEY, forged, login="a", now_s=0)


def test_a_ticket_of_another_key_or_with_another_name_is_refused() -> None:
    text = ticket.make(OTHER, "alice", [], login="a", now_s=1000)
    with pytest.raises(ticket.BadTicket):
        ticket.read(KEY, text, login="a", now_s=1000)
    body = ticket.make(KEY, "mallory", [], login="a", now_s=1000).rpartition("|")[0]
    signature = ticket.make(KEY, "alice", [], login="a", now_s=1000).rpartition("|")[2]
    with pytest.raises(ticket.BadTicket):
        ticket.read(KEY, f"{body}|{signature}", login="a", now_s=1000)


def test_what_was_signed_for_something_else_is_no_ticket() -> None:
    other = create_signed_value(KEY, "oauth", json.dumps(["alice", []]), clock=lambda: 1000).decode()
    with pytest.raises(ticket.BadTicket):
        ticket.read(KEY, other, login="a", now_s=1000)


def test_a_ticket_ends_with_its_log_in() -> None:
    text = ticket.make(KEY, "alice", [], login="first", now_s=1000)
    assert ticket.read(KEY, text, login="first", now_s=1001).user == "alice"
    for login in ("", "second"):
        with pytest.raises(ticket.BadTicket, match="log-in that the page is of has ended"):
            ticket.read(KEY, text, login=login, now_s=1001)


def test_a_ticket_of_a_page_that_a_token_asked_for_is_of_no_log_in() -> None:
    text = ticket.make(KEY, "alice", [], login="", now_s=1000)
    assert ticket.read(KEY, text, login="any", now_s=1001).user == "alice"


def test_without_a_key_there_are_no_tickets() -> None:
    with pytest.raises(ticket.BadTicket):
        ticket.read("", ticket.make("", "alice", [], login="a", now_s=1000), login="a", now_s=1000)
