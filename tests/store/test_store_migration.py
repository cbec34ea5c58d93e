"""A database of an earlier release keeps everything, and every field comes back as it was."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from alembic import command
from sqlalchemy import Connection, MetaData, create_engine, text
from sqlalchemy.exc import IntegrityError
from store_worlds import S, ask, end, node, opened, run

from fgpu_scheduler.core.model import (
    EndCause,
    Placement,
    RefusedNode,
    Request,
    Session,
    Share,
    ShareMode,
    Size,
    WaitReason,
)
from fgpu_scheduler.store import migrations
from fgpu_scheduler.store.audit import Audit
from fgpu_scheduler.store.quota_edits import QuotaEdits
from fgpu_scheduler.store.rows import life_values, request_values, share_values
from fgpu_scheduler.store.schema import sessions, shares
from fgpu_scheduler.store.store import Store

FIRST = """
INSERT INTO fgpu_meta (id, version, installation_id) VALUES (1, 41, 'abcdef012345');
INSERT INTO fgpu_nodes (id, resource_group, cpu_milli, memory_mib, state) VALUES ('n1', 'lab', 16000, 65536, 'CORDONED');
INSERT INTO fgpu_devices (uuid, node_id, device_index, model, memory_mib, capacity_milli, simulated, retired)
  VALUES ('GPU-n1-0', 'n1', 0, 'Test GPU', 8192, 1000, true, false),
         ('GPU-n1-1', 'n1', 1, 'Test GPU', 8192, 1000, true, false);
INSERT INTO fgpu_sessions (user_name, server_name, image, resource_group, fgpu_milli, cpu_milli, memory_mib, state,
    submitted_at_s, held, attempt, node_id, wait_reason, scheduled_at_s, started_at_s, ended_at_s, end_cause, message,
    launched, replaces)
  VALUES ('alice', '', 'image@sha256:0', 'lab', 2000, 1000, 1024, 'TERMINATED', 1, false, 2, 'n1', NULL, 2, 3, 90,
          'USER', 'said', 'box', NULL),
         ('alice', 'work', 'image@sha256:0', 'lab', 500, 1000, 1024, 'RUNNING', 5, false, 1, 'n1', NULL, 6, 7, NULL,
          NULL, NULL, 'box2', NULL),
         ('bob', '', 'image@sha256:0', 'lab', 500, 1000, 1024, 'PENDING', 8, true, 0, NULL, 'HELD', NULL, NULL, NULL,
          NULL, NULL, NULL, NULL);
INSERT INTO fgpu_shares (session_id, position, device_uuid, fgpu_milli, memory_mib, compute_percent, mode)
  VALUES (1, 0, 'GPU-n1-0', 1000, 8192, 100, 'memory+compute'),
         (1, 1, 'GPU-n1-1', 1000, 8192, 100, 'memory+compute'),
         (2, 0, 'GPU-n1-1', 500, 4096, 50, 'memory+compute');
INSERT INTO fgpu_events (at_s, session_id, kind, from_state, to_state, reason, user_name)
  VALUES (1, 1, 'submitted', NULL, 'PENDING', NULL, 'alice'),
         (90, 1, 'moved', 'TERMINATING', 'TERMINATED', 'USER', 'alice');
"""
"""What revision 0001 holds after two sessions and one that waits."""


def upgraded(connection: Connection, revision: str) -> None:
    """Bring an empty database to a revision, as the release that had it did."""
    config = migrations._config()
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def test_a_database_of_the_first_revision_keeps_everything(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        upgraded(connection, "0001")
        for statement in FIRST.split(";\n"):
            if statement.strip():
                connection.execute(text(statement))
    engine.dispose()
    with opened(url) as store:
        assert store.installation_id == "abcdef012345"
        found = store.snapshot(100)
        assert (found.version, found.usage, found.quotas) == (41, (), ())
        assert [(n.id, n.state.value) for n in found.nodes] == [("n1", "CORDONED")]
        assert [(d.uuid, d.max_shares) for d in found.nodes[0].devices] == [
            ("GPU-n1-0", 20),
            ("GPU-n1-1", 20),
        ]
        halves = (Share("GPU-n1-1", 500, 4096, 50),)
        runs = Session(2, ask("alice", "work"), S.RUNNING, 5, attempt=1, placement=Placement("n1", halves))
        runs = replace(runs, scheduled_at_s=6, started_at_s=7, launched="box2")
        waits = Session(3, ask("bob"), S.PENDING, 8, True, wait_reason=WaitReason.HELD)
        assert found.sessions == (runs, waits)
        wholes = tuple(Share(f"GPU-n1-{i}", 1000, 8192, 100) for i in range(2))
        first = Session(1, ask("alice", fgpu_milli=2000), S.TERMINATED, 1, False, 2, Placement("n1", wholes))
        first = replace(first, scheduled_at_s=2, started_at_s=3, ended_at_s=90, launched="box")
        assert store.ended(user=None, limit=9) == (replace(first, end_cause=EndCause.USER, message="said"),)
        assert [(e.id, e.kind, e.user) for e in store.events()] == [
            (1, "submitted", "alice"),
            (2, "moved", "alice"),
        ]
        # It goes on: ids and the log continue, and what ends counts as used.
        end(store, 2, now_s=106)
        assert [(u.user, u.fgpu_milli_s) for u in store.snapshot(106).usage] == [("alice", 500 * 100)]
        assert store.submit([ask("carol")], now_s=107)[0].id == 4
        assert store.events(after_id=2)[0].id == 3


HISTORY = 1000
ENDS = list(EndCause)


def told(connection: Connection) -> dict[str, list[dict[str, object]]]:
    """Return every row of every table by the names of its columns, in the order of their texts."""
    known = MetaData()
    known.reflect(connection)
    return {
        name: sorted((dict(row._mapping) for row in connection.execute(table.select())), key=repr)
        for name, table in known.tables.items()
        if not name.endswith("alembic_version")
    }


def put_in(connection: Connection, **rows: list[dict[str, object]]) -> None:
    known = MetaData()
    known.reflect(connection)
    for name, values in rows.items():
        connection.execute(known.tables[f"fgpu_{name}"].insert(), values)


def first_years(connection: Connection) -> None:
    """Fill revision 0001: 25 machines, a thousand sessions that ended in each way, and ten that run."""
    machines = [f"n{n}" for n in range(25)]
    asked = {"image": "image@sha256:0", "fgpu_milli": 500, "cpu_milli": 1000, "memory_mib": 1024}
    sessions_, shares_, events = [], [], []
    for n in range(1, HISTORY + 11):
        user, group, machine = f"Zoë {n % 60}", ("lab", "class")[n % 2], machines[n % 25]
        ended = n <= HISTORY
        life = {
            "state": "TERMINATED" if ended else "RUNNING",
            "submitted_at_s": 60 * n,
            "held": False,
            "attempt": n % 3,
        }
        life |= {
            "node_id": machine,
            "scheduled_at_s": 60 * n + 1,
            "started_at_s": 60 * n + 9,
            "launched": f"box{n}",
        }
        life |= {
            "ended_at_s": 60 * n + 7200 if ended else None,
            "end_cause": ENDS[n % len(ENDS)].value if ended else None,
        }
        said = {"message": f"it said\n'{n}'" if n % 4 else None, "replaces": n - 1 if n % 9 == 0 else None}
        sessions_.append(
            {"user_name": user, "server_name": f"s{n}", "resource_group": group, **asked, **life, **said}
        )
        share = {
            "session_id": n,
            "device_uuid": f"GPU-{machine}-{n % 2}",
            "fgpu_milli": 500,
            "memory_mib": 4096,
        }
        shares_.append({**share, "position": 0, "compute_percent": 50, "mode": "memory+compute"})
        events.append(
            {"at_s": 60 * n, "session_id": n, "kind": "submitted", "to_state": "PENDING", "user_name": user}
        )
    put_in(
        connection,
        meta=[{"id": 1, "version": 4711, "installation_id": "abcdef012345"}],
        nodes=[
            {"id": m, "resource_group": "lab", "cpu_milli": 16000, "memory_mib": 65536, "state": "CORDONED"}
            for m in machines
        ],
        devices=[
            {"uuid": f"GPU-{m}-{n}", "node_id": m, "device_index": n, "model": "Test GPU", "memory_mib": 8192}
            | {"capacity_milli": 1000, "simulated": True, "retired": n == 1 and m == "n7"}
            for m in machines
            for n in range(2)
        ],
        sessions=sessions_,
        shares=shares_,
        events=events,
    )


def later_years(connection: Connection) -> None:
    """Fill what revision 0005 has more: usage, quotas of the file and of pages, the audit log, the banner."""
    limits = {"max_fgpu_milli": 4000, "max_sessions": None, "max_pending": 7, "max_lifetime_s": None}
    edited = {"removed": False, "changed_by": "root", "changed_at_s": 9}
    put_in(
        connection,
        usage=[
            {"user_name": f"Zoë {n}", "resource_group": "lab", "fgpu_milli_s": n * 1.5, "at_s": 70_000}
            for n in range(60)
        ],
        quotas=[{"scope": "user", "name": f"Zoë {n}", "resource_group": "lab"} | limits for n in range(60)],
        quota_edits=[{"scope": "user", "name": "Zoë 1", "resource_group": "lab"} | limits | edited],
        audit=[
            {
                "at_s": n,
                "actor": "root",
                "action": "node.cordon",
                "target": f"node n{n % 25}",
                "details": "READY -> CORDONED",
            }
            for n in range(300)
        ],
        banner=[
            {
                "id": 1,
                "text": "Down on Friday",
                "level": "info",
                "until_at_s": None,
                "set_by": "root",
                "set_at_s": 1,
            }
        ],
    )


def test_a_thousand_sessions_of_the_first_schema_with_quotas_audit_and_machines_are_the_same_afterwards(
    url: str,
) -> None:
    engine = create_engine(url)
    for revision, fill in (("0001", first_years), ("0005", later_years)):
        with engine.begin() as connection:
            upgraded(connection, revision)
            fill(connection)
            before = told(connection)
    with opened(url) as store, engine.connect() as connection:
        after = told(connection)
        for table, was in before.items():
            models = [row.pop("gpu_model") for row in was if table == "fgpu_sessions"]
            assert set(models) <= {None}, "of models tells the test below"
            columns = was[0].keys() if was else ()
            assert sorted(({c: row[c] for c in columns} for row in after[table]), key=repr) == sorted(
                was, key=repr
            ), table
        assert {name for name, rows in before.items() if rows} >= {
            f"fgpu_{name}"
            for name in ("nodes", "devices", "sessions", "shares", "events", "usage", "quotas", "audit")
        }
        # It is not only there: what reads it, reads it all.
        now = store.snapshot(100_000)
        assert (store.installation_id, now.version, len(now.nodes), len(now.quotas)) == (
            "abcdef012345",
            4711,
            25,
            60,
        )
        assert len([d for n in now.nodes for d in n.devices]) == 49, "one was retired"
        assert [s.id for s in now.sessions] == list(range(HISTORY + 1, HISTORY + 11))
        found = {session.id: session for session in store.ended(user=None, limit=2 * HISTORY)}
        assert sorted(found) == list(range(1, HISTORY + 1))
        assert {s.end_cause for s in found.values()} == set(ENDS)
        assert all(s.placement is not None and s.placement.shares for s in found.values())
        assert len(Audit(store).lines(limit=999)) == 300
        assert Audit(store).lines(limit=999, groups=["lab"]) == (), (
            "whose group a line is, the log did not know then"
        )
        assert [edit.changed_by for edit in QuotaEdits(store).all()] == ["root"]
        # And it goes on.
        end(store, HISTORY + 1, now_s=100_001)
        assert store.submit([ask("carol")], now_s=100_002)[0].id == HISTORY + 11
    engine.dispose()


FULL_REQUEST = Request(
    "alice",
    "work",
    "image@sha256:0",
    "lab",
    0,
    1000,
    1024,
    gpu_memory_mib=4096,
    compute_percent=35,
    gpu_models=("Test GPU", 'Other, "quoted"'),
    time_limit_s=3600,
    priority=-7,
    groups=("a,b", "class", 'Zoë "quoted"'),
)
FULL_SESSION = Session(
    1,
    FULL_REQUEST,
    S.RUNNING,
    5,
    True,
    3,
    Placement("n1", (Share("GPU-n1-1", 500, 4096, 0, ShareMode.MEMORY),)),
    WaitReason.RESERVED,
    6,
    7,
    8,
    EndCause.OOM,
    "said",
    "box",
    12,
    2**33,
    2**33 + 1,
    EndCause.IDLE,
    2**33 + 2,
    2**33 + 3,
    11,
    -8,
    2**33 + 4,
    2**33 + 5,
    (RefusedNode("n1", 2**33 + 6, 3, 'no "room"'), RefusedNode("n2", 7, 1, "tainted")),
    (Size(2**33 + 7, 250, 250_000, 2048, 25), Size(2**33 + 8, 750, 750_000, 6144, 75)),
)


def test_every_field_of_a_session_comes_back(store: Store) -> None:
    # Each differs from its default, so that a new field is not forgotten here.
    for value in (FULL_SESSION, FULL_REQUEST):
        assert [f.name for f in fields(value) if getattr(value, f.name) == f.default] == []
    with store._database.writing() as connection:
        row = {"id": 1, **request_values(FULL_REQUEST), **life_values(FULL_SESSION)}
        connection.execute(sessions.insert().values(row))
        connection.execute(shares.insert(), share_values(FULL_SESSION))
    assert store.session(1) == FULL_SESSION


def test_a_request_with_every_field_waits_as_it_was_asked(store: Store) -> None:
    submitted = store.submit([FULL_REQUEST], now_s=1)
    assert submitted[0].request == FULL_REQUEST
    assert store.snapshot(1).sessions == submitted


@pytest.mark.parametrize("amounts", [(0, 4096, 50), (500, 0, 50), (500, 4096, -1)])
def test_the_database_refuses_a_share_of_nothing(store: Store, amounts: tuple[int, int, int]) -> None:
    store.set_nodes([node()], now_s=0)
    session = run(store, ask())
    assert session.placement is not None
    fgpu_milli, memory_mib, compute_percent = amounts
    row = share_values(session)[0] | {"position": 5}
    row |= {"fgpu_milli": fgpu_milli, "memory_mib": memory_mib, "compute_percent": compute_percent}
    with pytest.raises(IntegrityError), store._database.writing() as connection:
        connection.execute(shares.insert(), [row])


def test_one_model_becomes_a_list_of_one_whatever_it_is_called(url: str) -> None:
    engine = create_engine(url)
    names = [None, "Test GPU", "T4", '["T4"]', 'a "b"', "T4"]
    with engine.begin() as connection:
        upgraded(connection, "0012")
        connection.execute(
            text("INSERT INTO fgpu_meta (id, version, installation_id) VALUES (1, 41, 'abcdef012345')")
        )
        for n, name in enumerate(names):
            said = text(
                "INSERT INTO fgpu_sessions (user_name, server_name, image, resource_group, fgpu_milli, cpu_milli,"
                " memory_mib, state, submitted_at_s, held, attempt, gpu_model)"
                " VALUES (:user, '', 'image', 'lab', 500, 1000, 1024, 'PENDING', 1, true, 0, :model)"
            )
            connection.execute(said, {"user": f"u{n}", "model": name})
    engine.dispose()
    with opened(url) as store:
        found = [session.request.gpu_models for session in store.snapshot(1).sessions]
        assert found == [() if name is None else (name,) for name in names]
