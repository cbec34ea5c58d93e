"""What an earlier version left and offered: its database is taken over, its settings, addresses and commands still work.

`before/` was written by the commit before sessions were launched behind one seam (a85c1b3).
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from fgpu_scheduler import Store
from fgpuspawner.cli.main import make_parser
from fgpuspawner.settings import FGPU
from hubprocess import HubProcess, until

BEFORE = Path(__file__).parent / "before"
WAS: dict[str, Any] = json.loads((BEFORE / "was.json").read_text())
USERS = "c.Authenticator.allowed_users = {'alice', 'bob', 'carol', 'admin'}\n"


def left_database(path: Path) -> int:
    """Write the database as if its Hub had been killed a moment ago; return by how much its instants were moved."""
    sql = (BEFORE / "fgpu.sql").read_text()
    instants = re.compile(r"\b1795367\d{3}\b")
    later_s = int(time.time()) - max(map(int, instants.findall(sql)))
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as database:
        database.executescript(instants.sub(lambda instant: str(int(instant[0]) + later_s), sql))
    database.close()
    return later_s


def commands_of(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command below a parser, with its options."""
    if path:
        yield path, {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, own in action.choices.items():
                yield from commands_of(own, f"{path} {name}".strip())


def test_every_setting_that_was_there_is_still_taken_with_the_value_it_had() -> None:
    taken = FGPU.from_json(json.dumps(WAS["settings"])).checked()
    now = json.loads(taken.to_json())
    assert {name: now[name] for name in WAS["settings"]} == WAS["settings"]


def test_every_command_that_was_there_is_still_there_with_its_options() -> None:
    now = dict(commands_of(make_parser()))
    missing = {
        name: sorted(set(options) - now.get(name, set()))
        for name, options in WAS["commands"].items()
        if not set(options) <= now.get(name, set())
    }
    assert missing == {}


def test_every_table_that_was_there_is_still_there_with_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "data" / "fgpu.sqlite"
    left_database(path)
    store = Store(f"sqlite:///{path}")
    store.open()
    store.close()
    with sqlite3.connect(path) as database:
        now = {
            table: {column[1] for column in database.execute(f"pragma table_info({table})")}
            for table in WAS["tables"]
        }
    database.close()
    now["fgpu_sessions"] |= {
        "gpu_model"
    }  # It is called gpu_models now, and holds what it held: test_store_migration.
    missing = {table: sorted(set(was) - now[table]) for table, was in WAS["tables"].items()}
    assert not any(missing.values()), missing


@pytest.fixture(scope="module")
def taken_over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubProcess, int]]:
    """A Hub on what the earlier one left, and by how much its instants were moved."""
    folder = tmp_path_factory.mktemp("hub")
    mini = str(Path(__file__).parent / "miniserver.py")
    hub = HubProcess(
        folder,
        before=USERS,
        after=f"c.Spawner.cmd = ['python', {mini!r}]\n",
        quotas=[{"user": "*", "max_fgpu": 4}],
        # Of the earlier Hub only the scheduler's database is there, and its servers are not.
        end_unknown_sessions=True,
    )
    later_s = left_database(hub.data / "fgpu.sqlite")
    try:
        yield hub.start(), later_s
    finally:
        hub.close()


def test_who_waited_keeps_place_and_time_and_starts_and_what_ran_has_ended(
    taken_over: tuple[HubProcess, int],
) -> None:
    hub, later_s = taken_over
    hub.reach({"bob/": "RUNNING", "carol/": "RUNNING"})
    found = {key: (s.id, s.submitted_at_s) for key, s in hub.sessions().items()}
    assert found == {"bob/": (3, 1795367297 + later_s), "carol/": (4, 1795367299 + later_s)}
    night = next(s for s in hub.store.ended(user="alice", limit=10) if s.request.server_name == "night")
    assert night.end_cause is not None


def test_what_was_written_and_what_has_ended_are_still_told(taken_over: tuple[HubProcess, int]) -> None:
    hub, _ = taken_over
    own, admin = ({"Authorization": f"token {hub.add_user(user)}"} for user in ("alice", "admin"))
    api = f"{hub.url}/services/fgpu/api/v1"

    def get(path: str, who: dict[str, str]) -> Any:
        answer = requests.get(f"{api}/{path}", headers=who, timeout=30)
        return answer.json() if answer.status_code == 200 else None

    me = until(lambda: get("me", own), what="the service answers")
    assert me["banner"]["text"] == "The power is off on Friday"
    assert 1 in [receipt["session_id"] for receipt in get("history", own)["receipts"]]
    quotas = {json.dumps(q["for"]): q["limits"] for q in get("admin/quotas", admin)["quotas"]}
    assert quotas == {'{"user": "*"}': {"max_fgpu": "4"}, '{"user": "carol"}': {"max_sessions": 3}}
    actions = {line["action"] for line in get("admin/audit", admin)["lines"]}
    assert {"banner.set", "quota.set"} <= actions


def test_every_address_that_was_there_is_still_there(taken_over: tuple[HubProcess, int]) -> None:
    hub, _ = taken_over
    admin = {"Authorization": f"token {hub.add_user('admin')}"}
    until(lambda: requests.get(f"{hub.url}/services/fgpu/health", timeout=30).ok, what="the service answers")

    def said(address: str) -> tuple[int, str]:
        # The stream of events goes on and on: its head is all that is read.
        url = f"{hub.url}/services/fgpu/{address}"
        with requests.get(url, headers=admin, timeout=30, stream=True, allow_redirects=False) as answer:
            words = "" if answer.ok else answer.text.replace(address, "")
            return answer.status_code, words

    nowhere = {said("nowhere"), said("api/v1/nowhere")}
    assert {status for status, _ in nowhere} == {404}
    assert [address for address in WAS["addresses"] if said(address) in nowhere] == []
