"""Databases, worlds and checks for the store's tests."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, make_url, text

from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import (
    Device,
    EndCause,
    Node,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
)
from fgpu_scheduler.core.planner import Plan, Policy, StartDecision, plan
from fgpu_scheduler.store.store import Store

S = SessionState


def postgres_url() -> str:
    url = os.environ.get("FGPU_TEST_POSTGRES_URL")
    if url:
        return url
    why = "FGPU_TEST_POSTGRES_URL is not set; tests/services.sh starts a server and says it"
    pytest.skip(why)


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a new empty database, and delete the database afterwards."""
    if kind == "memory":
        yield "sqlite://"
    elif kind == "sqlite":
        path = folder / f"{secrets.token_hex(6)}.sqlite"
        yield f"sqlite:///{path}"
        for left in folder.glob(f"{path.name}*"):
            left.unlink()
    else:
        server = make_url(postgres_url())
        schema = f"fgpu_{secrets.token_hex(6)}"
        engine = create_engine(server, poolclass=NullPool)
        with engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA {schema}"))
        url = server.update_query_dict({"options": f"-csearch_path={schema}"})
        try:
            yield url.render_as_string(hide_password=False)
        finally:
            with engine.begin() as connection:
                connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))


@contextmanager
def opened(url: str, **options: Any) -> Iterator[Store]:
    store = Store(url, **options)
    store.open()
    try:
        yield store
    finally:
        store.close()


def device(number: int, *, node_id: str = "n1", memory_mib: int = 8192, capacity_milli: int = 1000) -> Device:
    uuid = f"GPU-{node_id}-{number}"
    return Device(uuid, node_id, number, "Test GPU", memory_mib, capacity_milli, True)


def node(id_: str = "n1", *, devices: int = 2, cpu_milli: int = 16000, memory_mib: int = 65536) -> Node:
    found = tuple(device(number, node_id=id_) for number in range(devices))
    return Node(id_, "lab", cpu_milli, memory_mib, found)


def ask(
    user: str = "alice",
    server_name: str = "",
    *,
    fgpu_milli: int = 500,
    group: str = "lab",
    image: str = "image@sha256:0",
) -> Request:
    return Request(user, server_name, image, group, fgpu_milli, 1000, 1024)


def placing(store: Store, *session_ids: int, on: Sequence[Device], fgpu_milli: int = 500) -> Plan:
    """Return a handmade plan of the current version; everything else in it may be wrong."""
    where = Placement(on[0].node_id, tuple(Share.of(d, fgpu_milli) for d in on))
    return Plan(store.version(), tuple(StartDecision(session_id, where) for session_id in session_ids))


def schedule(store: Store, *, now_s: int = 0) -> tuple[Session, ...]:
    return store.commit(plan(store.snapshot(now_s), Policy()), now_s=now_s)


def run(store: Store, request: Request, *, now_s: int = 0) -> Session:
    """Bring a new session to RUNNING; it must fit at once."""
    session = store.submit([request], now_s=now_s)[0]
    assert session.id in [s.id for s in schedule(store, now_s=now_s)]
    store.move(session.id, S.PREPARING, now_s=now_s)
    return store.move(session.id, S.RUNNING, now_s=now_s)


def end(store: Store, session_id: int, *, now_s: int = 0, cause: EndCause = EndCause.USER) -> Session:
    store.move(session_id, S.TERMINATING, now_s=now_s, cause=cause)
    return store.move(session_id, S.TERMINATED, now_s=now_s)


def assert_nothing_is_oversold(store: Store) -> None:
    snapshot = store.snapshot(0)
    for one in (d for n in snapshot.nodes for d in n.devices):
        held = [
            share
            for session in snapshot.sessions
            if session.state in HOLDING and session.placement is not None
            for share in session.placement.shares
            if share.device_uuid == one.uuid
        ]
        assert sum(share.fgpu_milli for share in held) <= one.capacity_milli
        assert sum(share.memory_mib for share in held) <= one.memory_mib
        assert sum(share.compute_percent for share in held) <= 100


def assert_the_log_tells_every_state(store: Store) -> None:
    """Assert that replaying the log from its beginning gives the stored states."""
    log = store.events(limit=10**6)
    assert [event.id for event in log] == sorted({event.id for event in log})
    state: dict[int, SessionState] = {}
    for event in log:
        if event.session_id is None:
            continue
        if event.kind == "submitted":
            assert event.session_id not in state
        if event.kind in ("moved", "attempt"):
            assert event.from_state is state[event.session_id]
        if event.to_state is not None:
            state[event.session_id] = event.to_state
    stored = [*store.snapshot(0).sessions, *store.ended(user=None, limit=10**6)]
    assert state == {session.id: session.state for session in stored}
