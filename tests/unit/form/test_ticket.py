from __future__ import annotations

import pytest

from fgpuspawner.form import ticket

KEY, OTHER = "00" * 32, "11" * 32


def test_ticket_names_its_user() -> None:
    text = ticket.make(KEY, "alice", ["ml101", "lab"], login="a", now_s=1000)
    assert ticket.read(KEY, text, login="a", now_s=1000 + ticket.VALID_FOR_S) == ticket.Ticket(
        "alice", ("lab", "ml101")
    )


def test_ticket_expires() -> None:
    text = ticket.make(KEY, "alice", [], login="a", now_s=1000)
    with pytest.raises(ticket.BadTicket, match="too old for a forecast; reload"):
        ticket.read(KEY, text, login="a", now_s=1001 + ticket.VALID_FOR_S)


@pytest.mark.parametrize(
    "forged",
    ["", ".", "x", "é.é", "e30=.00", "!!!.???", "W10=." + "0" * 64, "2|1:0|9:999999999|1:x|0:|00", "1|x|y"],
)
def test_forged_ticket_is_refused(forged: str) -> None:
    with pytest.raises(ticket.BadTicket, match="this is no ticket"):
        ticket.read(KEY, forged, login="a", now_s=0)


def test_ticket_of_another_key_or_name_is_refused() -> None:
    text = ticket.make(OTHER, "alice", [], login="a", now_s=1000)
    with pytest.raises(ticket.BadTicket):
        ticket.read(KEY, text, login="a", now_s=1000)
    body = ticket.make(KEY, "mallory", [], login="a", now_s=1000).rpartition("|")[0]
    signature = ticket.make(KEY, "alice", [], login="a", now_s=1000).rpartition("|")[2]
    with pytest.raises(ticket.BadTicket):
        ticket.read(KEY, f"{body}|{signature}", login="a", now_s=1000)


def test_ticket_ends_with_its_log_in() -> None:
    text = ticket.make(KEY, "alice", [], login="first", now_s=1000)
    assert ticket.read(KEY, text, login="first", now_s=1001).user == "alice"
    for login in ("", "second"):
        with pytest.raises(ticket.BadTicket, match="log-in that the page is of has ended"):
            ticket.read(KEY, text, login=login, now_s=1001)


def test_ticket_for_a_token_has_no_log_in() -> None:
    text = ticket.make(KEY, "alice", [], login="", now_s=1000)
    assert ticket.read(KEY, text, login="any", now_s=1001).user == "alice"


def test_empty_key_accepts_no_ticket() -> None:
    with pytest.raises(ticket.BadTicket):
        ticket.read("", ticket.make("", "alice", [], login="a", now_s=1000), login="a", now_s=1000)
