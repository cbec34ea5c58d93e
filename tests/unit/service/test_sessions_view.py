"""The sessions page: filters, order, CSV file, bars of use, lost machines."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
from simulator import lasting
from worlds import ALICE, SITE, Build, node, shown

from fgpu_scheduler import (
    Device,
    Node,
    NodeState,
    Placement,
    Policy,
    Request,
    Session,
    SessionState,
    Share,
    Snapshot,
    forecast,
)
from fgpuspawner.meter.model import Meter
from fgpuspawner.service.api.capacity import capacity_object
from fgpuspawner.service.api.session_objects import sessions_object
from fgpuspawner.service.csv_file import csv_text
from fgpuspawner.service.model import Site, Viewer, World
from fgpuspawner.service.objects import Session as SessionObject
from fgpuspawner.service.pages.session_rows import SESSION_COLUMNS, row, session_cells, use
from fgpuspawner.service.pages.sessions_view import SessionFilter, filtered, new_session_url, read_filter
from fgpuspawner.service.problems import Problem

S = SessionState
GPU = Device("GPU-simulated-1", "n1", 0, "Model", 8192, 2000, True)
NODE = Node("n1", "default", 64000, 65536, (GPU,))
ROOT = Viewer("root", admin=True, groups=("default",))
METER = Meter(1000, 1024, 4096, 12.6, 50, 12.0, None)


def session(number: int, user: str, server: str, milli: int, *, runs: bool = True, **more: object) -> Session:
    request = Request(user, server, "python", "default", milli, cpu_milli=500, memory_mib=512)
    place = Placement("n1", (Share.of(GPU, milli),)) if runs else None
    state = S.RUNNING if runs else S.PENDING
    found = Session(
        number, request, state, 100 + number, placement=place, started_at_s=200 - number if runs else None
    )
    return replace(found, **more)  # type: ignore[arg-type]


def objects(*sessions: Session, now_s: int = 1000) -> list[SessionObject]:
    snapshot = Snapshot(now_s, 7, (NODE,), sessions)
    found = forecast(snapshot, Policy(), lasting(600))
    world = World(snapshot, {f.session_id: f for f in found})
    return sessions_object(sessions, world, ROOT, Site("/", {"python": "Python 3.11"})).sessions


SOME = objects(
    session(1, "bob", "Zeta", 500),
    session(2, "alice", "alpha", 1000),
    session(3, "carol", "beta", 300, runs=False),
    session(4, "bob", "", 200, state=S.TERMINATING),
)


def names(choice: SessionFilter, sessions: list[SessionObject] = SOME) -> list[str]:
    return [s["display_name"] for s in filtered(sessions, choice)]


def test_default_order_is_by_submission() -> None:
    assert names(SessionFilter()) == ["Zeta", "alpha", "beta", "Python 1"]


def test_columns_sort_both_ways_with_missing_values_last() -> None:
    assert names(SessionFilter("name")) == ["alpha", "beta", "Python 1", "Zeta"]
    assert names(SessionFilter("amount")) == ["Python 1", "beta", "Zeta", "alpha"]
    assert names(SessionFilter("amount", descending=True)) == ["alpha", "Zeta", "beta", "Python 1"]
    assert names(SessionFilter("status")) == ["Zeta", "alpha", "beta", "Python 1"]
    # The one that waits has not started, whichever the direction.
    assert names(SessionFilter("started")) == ["Python 1", "alpha", "Zeta", "beta"]
    assert names(SessionFilter("started", descending=True)) == ["Zeta", "alpha", "Python 1", "beta"]


def test_use_sorts_by_meter_with_unmeasured_last() -> None:
    measured = [
        s.model_copy(update={"meter": replace(METER, memory_used_mib=used)})
        for s, used in zip(SOME, (30, None, 20, 10), strict=True)
    ]
    assert names(SessionFilter("use", descending=True), measured) == [
        "Zeta",
        "beta",
        "Python 1",
        "alpha",
    ]


def test_filters_by_state_user_and_text() -> None:
    assert names(SessionFilter(state="running")) == ["Zeta", "alpha"]
    assert names(SessionFilter(state="waiting")) == ["beta"]
    assert names(SessionFilter(user="bob")) == ["Zeta", "Python 1"]
    assert names(SessionFilter(text="ALPH")) == ["alpha"]
    assert names(SessionFilter(text="0.3 fgpu")) == ["beta"]
    assert names(SessionFilter(text="python", state="ending")) == ["Python 1"]
    assert names(SessionFilter(text="none of these")) == []


def test_column_title_cycles_through_the_sort_orders() -> None:
    first = SessionFilter(text="a b")
    assert first.turned("name") == "sort=name&q=a+b"
    assert replace(first, sort="name").turned("name") == "sort=name&q=a+b&order=descending"
    assert replace(first, sort="name", descending=True).turned("name") == "q=a+b"
    assert replace(first, sort="name").turned("user") == "sort=user&q=a+b"
    assert [replace(first, sort="name", descending=d).direction("name") for d in (False, True)] == [
        "ascending",
        "descending",
    ]
    assert first.direction("name") == "none"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"sort": "size"}, "sort"),
        ({"state": "RUNNING"}, "state"),
        ({"order": "up"}, "order"),
        ({"q": "x" * 201}, "q"),
    ],
)
def test_unknown_filter_is_refused_with_its_field(given: dict[str, str], field: str) -> None:
    with pytest.raises(Problem) as refused:
        read_filter(lambda name: given.get(name, ""), admin=True)
    assert (refused.value.status, refused.value.field) == (400, field)


def test_user_filter_is_for_administrators() -> None:
    assert read_filter(lambda name: {"user": "bob"}.get(name, ""), admin=False) == SessionFilter()
    assert read_filter(lambda name: {"user": "bob"}.get(name, ""), admin=True) == SessionFilter(user="bob")


def test_csv_file_has_every_column_and_no_formula() -> None:
    hostile = SOME[0].model_copy(
        update={
            "display_name": '=HYPERLINK("http://x","y")',
            "user": " @SUM(1)",
            "message": '-1,"two"\nlines',
        }
    )
    found = list(
        csv.reader(io.StringIO(csv_text(tuple(SESSION_COLUMNS), [session_cells(hostile)]), newline=""))
    )
    assert len(found) == 2
    line = dict(zip(found[0], found[1], strict=True))
    assert line["session"] == '\'=HYPERLINK("http://x","y")'
    assert line["user"] == "' @SUM(1)"
    assert line["why"] == '\'-1,"two"\nlines'
    assert (line["fgpu"], line["started"], line["ends"]) == ("0.5", "1970-01-01 00:03:19", "")


def test_row_digest_ignores_the_meter() -> None:
    (one,) = objects(session(1, "bob", "a", 500))
    assert row(one).digest == row(one.model_copy(update={"meter": METER})).digest
    assert row(one).digest != row(one.model_copy(update={"message": "low on memory"})).digest
    holds = session(1, "bob", "a", 2000)
    early, late = (objects(holds, session(2, "bob", "b", 2000, runs=False), now_s=n)[1] for n in (1000, 1005))
    assert early["expected_start_at_s"] != late["expected_start_at_s"]
    # Both lie within one minute, so the shown text is the same.
    assert row(early).digest == row(late).digest


def test_meter_bars_are_relative_to_the_slice() -> None:
    found = use(METER)
    assert found is not None
    assert found.memory is not None
    assert found.compute is not None
    assert (found.memory.text, found.memory.percent) == ("1 of 4 GiB", "25.0")
    assert (found.compute.text, found.compute.percent) == ("13 of 50 %", "25.2")
    found = use(replace(METER, memory_context_mib=512))
    assert found is not None
    assert found.memory is not None
    assert (found.memory.text, found.memory.percent) == ("1 of 4 GiB, 0.5 of it contexts and code", "25.0")


@pytest.mark.parametrize(("sm", "said"), [(12.4, "12"), (12.5, "13"), (13.5, "14"), (0.5, "1"), (0.4, "0")])
def test_half_percents_round_as_in_the_script(sm: float, said: str) -> None:
    found = use(replace(METER, sm_percent=sm))
    assert found is not None
    assert found.compute is not None
    assert found.compute.text == f"{said} of 50 %"


def test_borrowed_compute_adds_up_with_the_share() -> None:
    for sm, lent, said in (
        (92.4, 0.0, ("92 %", "50 % share + 42 % borrowed")),
        (92.4, None, ("92 %", "")),
        (50.4, 3.6, ("50 of 50 %", "others use 4 % of it")),
        (12.0, 0.4, ("12 of 50 %", "")),
        (12.0, None, ("12 of 50 %", "")),
    ):
        found = use(replace(METER, sm_percent=sm, compute_lent_percent=lent))
        assert found is not None
        assert found.compute is not None
        assert (found.compute.text, found.lent) == said


def test_unmeasured_use_shows_its_reason() -> None:
    found = use(replace(METER, memory_used_mib=None, sm_percent=None, trouble="the GPU does not answer"))
    assert found is not None
    assert (found.memory, found.compute, found.trouble) == (None, None, "the GPU does not answer")
    assert use(None) is None


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (["READY", "READY"], ""),
        (["READY", "CORDONED"], ""),
        (
            ["LOST"],
            "The machine of this group does not answer. What runs there keeps its share; what waits starts elsewhere, or "
            "when it is back.",
        ),
        (
            ["READY", "LOST", "READY"],
            "1 of the 3 machines of this group does not answer. What runs there keeps its share; what waits starts "
            "elsewhere, or when it is back.",
        ),
        (
            ["GONE", "LOST", "READY"],
            "2 of the 3 machines of this group do not answer. What runs there keeps its share; what waits starts "
            "elsewhere, or when it is back.",
        ),
    ],
)
def test_users_are_told_of_lost_machines(states: list[str], words: str) -> None:
    nodes = [replace(node(f"n{i}"), state=NodeState(state)) for i, state in enumerate(states)]
    world = Build(*nodes).world()
    assert shown(world, ALICE).lost == words
    (group,) = capacity_object(world, ALICE)["groups"]
    assert group["nodes_lost"] == sum(state in ("LOST", "GONE") for state in states)


def test_new_session_takes_the_first_free_server() -> None:
    def url(*servers: str) -> str | None:
        build = Build()
        for server in servers:
            build.pending("alice", 100, server=server)
        world = build.world()
        live = sessions_object(world.snapshot.sessions, world, ALICE, SITE)["sessions"]
        return new_session_url(live, ALICE, "/")

    assert url() == "/hub/spawn"
    assert url("gpu-1") == "/hub/spawn"
    assert url("") == "/hub/spawn/alice/gpu-1"
    assert url("", "gpu-1", "gpu-3") == "/hub/spawn/alice/gpu-2"
    assert new_session_url([], Viewer(None), "/") is None
