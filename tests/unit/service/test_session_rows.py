"""Bars and rows of live sessions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds import ADMIN, ALICE, Build, S, gpu, node, shown

from fgpu_scheduler import BASIS_LIMITS, FOR_GOOD_S, AllRules, EndCause, Forecast, Rules
from fgpuspawner.isolation.choice import StoredChoice
from fgpuspawner.meter.model import Live, Meter, MeterState
from fgpuspawner.service.model import Viewer
from fgpuspawner.service.pages import session_rows as rows
from fgpuspawner.service.pages.session_rows import SessionRow, ahead_words, memory_bar, percent
from fgpuspawner.service.pages.sessions_view import stacked_bar
from fgpuspawner.text.sessions import END_WORDS, gib_words, ordinal


def test_used_memory_is_never_shown_as_zero() -> None:
    assert [gib_words(mib) for mib in (0, 1, 128, 3000, 6528, 21503)] == [
        "0",
        "0.1",
        "0.125",
        "2.9",
        "6.375",
        "21",
    ]


@pytest.mark.parametrize(
    ("held_mib", "total_mib", "text", "parts"),
    [
        (24_020, 24_060, "23.46 of 23.5 GiB", ["23.46 in use", "0.04 free"]),
        (12_000, 24_060, "11.7 of 23.5 GiB", ["11.7 in use", "11.8 free"]),
        (2_048, 8_192, "2 of 8 GiB", ["2 in use", "6 free"]),
        (24_060, 24_060, "23.5 of 23.5 GiB", ["23.5 in use", "0 free"]),
    ],
)
def test_shown_parts_of_memory_add_up(held_mib: int, total_mib: int, text: str, parts: list[str]) -> None:
    amounts = [("used", "in use", held_mib), ("free", "free", total_mib - held_mib)]
    found = stacked_bar("", amounts, total_mib, "memory_mib", "GiB", None)
    assert (found.text, [part.words for part in found.parts]) == (text, parts)


def test_memory_bar_is_full_only_at_the_limit() -> None:
    told = [memory_bar("", used_mib, 2176) for used_mib in (0, 1, 700, 2150, 2175, 2176)]
    assert [bar.text for bar in told if bar is not None] == [
        f"{used} of 2.125 GiB" for used in ("0", "0.001", "0.7", "2.1", "2.124", "2.125")
    ]


def test_bar_of_nothing_is_empty() -> None:
    assert percent(0, 0) == "0"
    assert percent(1, 3) == "33.3"
    assert percent(2, 2) == "100.0"
    assert shown(Build().world(), Viewer("eve")).gauges == ()


def test_running_sessions_message_is_shown() -> None:
    build = Build().running("alice", 500)
    build.sessions = [replace(build.sessions[0], message="this session holds 3000 MiB")]
    assert shown(build.world(), ALICE).rows[0].why == "this session holds 3000 MiB"


def test_every_state_and_end_cause_has_text() -> None:
    assert set(rows.STATE_WORDS) == {s.value for s in S}
    assert set(END_WORDS) == {c.value for c in EndCause}


def test_queue_position_text() -> None:
    assert [ahead_words(n) for n in (0, 1, 12)] == ["No request is ahead", "1 is ahead", "12 are ahead"]
    assert [ordinal(n) for n in (3, 4, 11, 21, 112)] == ["3rd", "4th", "11th", "21st", "112th"]


def test_row_offers_the_possible_actions() -> None:
    build = Build(node("n1", "default", gpu("n1", milli=9000)))
    for number, state in enumerate((S.RUNNING, S.SCHEDULED, S.PULLING, S.TERMINATING)):
        build.running("alice", 100, server=f"s{number}", state=state)
    build.running("bob", 100).pending("alice", 9000, server="p")
    rows = {r.session["display_name"]: r for r in shown(build.world(), ADMIN, everybody=True).rows}
    assert [(r.open_url, r.wait_url) for r in rows.values()] == [(None, None)] * 6
    rows = {r.session["display_name"]: r for r in shown(build.world(), ALICE).rows}
    assert [(n, bool(r.open_url), bool(r.wait_url), r.power) for n, r in rows.items()] == [
        ("s0", True, False, "End"),
        ("s1", False, True, "End"),
        ("s2", False, True, "End"),
        ("s3", False, False, None),
        ("p", False, True, "Cancel"),
    ]
    assert (rows["p"].place, rows["p"].ahead) == ("Next in the queue", "No request is ahead")
    assert rows["p"].unexpected == "no estimate yet: too few sessions have ended"


def test_parked_row_says_what_is_kept_and_offers_the_gpu() -> None:
    build = Build().running("alice", 500, state=S.PARKED)
    (session,) = build.sessions
    kept = "6.2 GiB of GPU memory kept. "
    for wanted_at_s, mib, words in (
        (None, 6349, f"{kept}A cell that needs the GPU gets it"),
        (None, 0, "A cell that needs the GPU gets it"),
        (130, 6349, f"{kept}It waits for its GPU"),
    ):
        build.sessions = [replace(session, parked_at_s=120, parked_mib=mib, wanted_at_s=wanted_at_s)]
        (row,) = shown(build.world(), ALICE).rows
        assert (row.why, row.power, bool(row.open_url)) == (words, "End", True)


def test_row_says_when_a_session_is_parked_and_why_it_was_not() -> None:
    build = Build().running("alice", 500)
    (session,) = build.sessions
    world = build.world()
    now_s = world.snapshot.now_s
    soon = MeterState(
        1, {session.id: Live(Meter(now_s, 0, 2048, 0.0, 25, 0.0, None, parks_at_s=now_s + 300))}
    )
    (row,) = shown(replace(world, meters=soon), ALICE).rows
    assert (row.parks_at_s, row.wishes) == (now_s + 300, ())
    for asked_at_s, words in ((now_s - 599, "not parked: it has no room"), (now_s - 600, "")):
        build.sessions = [replace(session, park_asked_at_s=asked_at_s, park_refused="it has no room")]
        (row,) = shown(build.world(), ALICE).rows
        assert row.why == words


def test_row_offers_never_to_park_where_the_rules_allow_it() -> None:
    build = Build().running("alice", 500)
    (session,) = build.sessions
    choice = StoredChoice("n1", "libfgpu", "", "")
    allowed = AllRules(Rules(park_after_s=600, park_opt_out=True))
    for rules, kept_until_s, wishes in (
        (AllRules(), FOR_GOOD_S, ["park"]),
        (allowed, None, ["park", "never-park"]),
        (allowed, 2000, ["park", "never-park"]),
        (allowed, FOR_GOOD_S, ["park", "may-park"]),
    ):
        build.sessions = [replace(session, kept_until_s=kept_until_s)]
        world = replace(build.world(), rules=rules, isolation=(choice,))
        (row,) = shown(world, ALICE).rows
        assert [wish for wish, _ in row.wishes] == wishes
        build.sessions = [replace(session, kept_until_s=kept_until_s, state=S.PARKED, parked_at_s=120)]
        (row,) = shown(replace(build.world(), rules=rules, isolation=(choice,)), ALICE).rows
        assert [wish for wish, _ in row.wishes] == ["wake", *wishes[1:]], "it is for when its GPU is back"
        assert row.why.endswith("and then keeps it") == ("may-park" in wishes)


def test_uncertain_start_is_a_five_minute_range() -> None:
    world = Build().running("bob", 1000).pending("alice", 1000).world(typical_length_s=7200)
    (only,) = world.forecasts.values()
    at_s = only.expected_start_at_s
    assert at_s is not None
    uncertain = replace(only, early_at_s=at_s - 1000, late_at_s=at_s + 1000)

    def line(found: Forecast) -> SessionRow:
        (row,) = shown(replace(world, forecasts={found.session_id: found}), ALICE).rows
        return row

    between_s = line(uncertain).between_s
    assert between_s is not None
    assert [instant % 300 for instant in between_s] == [0, 0]
    assert between_s[0] <= at_s - 1000 < at_s + 1000 <= between_s[1]
    assert line(only).between_s is None, "a start that is certain is an instant"
    by_limits = line(replace(uncertain, basis=BASIS_LIMITS))
    assert (by_limits.between_s, by_limits.about) == (None, "at the latest"), "as the waiting page says"
