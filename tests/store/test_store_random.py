"""Random histories of a store, compared with a model: a dict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_worlds import (
    S,
    ask,
    assert_nothing_is_oversold,
    assert_the_log_tells_every_state,
    database,
    device,
    node,
    opened,
)

from fgpu_scheduler.core.lifecycle import ENDED, LEGAL, SERVING
from fgpu_scheduler.core.model import EndCause, Placement, Quota, QuotaScope, Session, Share
from fgpu_scheduler.core.planner import Plan, Policy, StartDecision, plan
from fgpu_scheduler.core.reclaim import End, Reclaim, Warn, WithdrawWarning
from fgpu_scheduler.core.usage import HALF_LIFE_S
from fgpu_scheduler.errors import InvalidTransition, SessionExists, StaleVersion, UnknownSession
from fgpu_scheduler.store.snapshot_cache import Contents
from fgpu_scheduler.store.store import Store

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 5), st.sampled_from((100, 300, 500, 1000, 2000))),
        st.tuples(st.just("schedule"), st.just(0), st.just(0)),
        st.tuples(st.just("stale"), st.just(0), st.just(0)),
        st.tuples(st.just("force"), st.integers(1, 12), st.integers(0, 2)),
        st.tuples(st.just("move"), st.integers(1, 12), st.sampled_from(list(S))),
        st.tuples(st.just("attempt"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("hold"), st.integers(1, 12), st.booleans()),
        st.tuples(st.just("warn"), st.integers(1, 12), st.sampled_from((EndCause.IDLE, EndCause.PREEMPTED))),
        st.tuples(st.just("spare"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("reclaim"), st.integers(1, 12), st.booleans()),
        st.tuples(st.just("keep"), st.integers(1, 12), st.integers(0, 99)),
        st.tuples(st.just("idle"), st.integers(1, 12), st.sampled_from((None, 3, 5))),
        st.tuples(st.just("quota"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("nodes"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)
Model = dict[int, Session]


class World:
    """A store and its expected contents: the sessions that its methods returned."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.model: Model = {}
        self.now_s = 0

    def submit(self, user: int, fgpu_milli: int) -> None:
        server = f"user{user}"
        serves = any(s.request.user == server and s.state in SERVING for s in self.model.values())
        with raising(SessionExists if serves else None):
            self.put(*self.store.submit([ask(server, fgpu_milli=fgpu_milli)], now_s=self.now_s))

    def schedule(self, *_: int) -> None:
        decided = plan(self.store.snapshot(self.now_s), Policy())
        self.put(*self.store.commit(decided, now_s=self.now_s))
        for wait in decided.decisions:
            if not isinstance(wait, StartDecision):
                self.put(replace(self.model[wait.session_id], wait_reason=wait.reason))

    def stale(self, *_: int) -> None:
        decided = plan(self.store.snapshot(self.now_s), Policy())
        with pytest.raises(StaleVersion):
            self.store.commit(replace(decided, version=decided.version - 1), now_s=self.now_s)

    def force(self, session_id: int, number: int) -> None:
        """Commit a random placement: it is refused or it fits."""
        session = self.model.get(session_id)
        amount = session.request.fgpu_milli if session else 500
        where = Placement("n1", (Share.of(device(number), amount),))
        decided = Plan(self.store.version(), (StartDecision(session_id, where),))
        try:
            self.put(*self.store.commit(decided, now_s=self.now_s))
        except StaleVersion:
            assert self.store.version() == decided.version

    def move(self, session_id: int, to: S) -> None:
        session = self.model.get(session_id)
        legal = session is not None and to in LEGAL[session.state] and to is not S.SCHEDULED
        cause = EndCause.USER if to in (S.TERMINATING, S.CANCELLED) else None
        with raising(UnknownSession if session is None else None if legal else InvalidTransition):
            self.put(self.store.move(session_id, to, now_s=self.now_s, cause=cause))

    def attempt(self, session_id: int, _: int) -> None:
        session = self.model.get(session_id)
        legal = session is not None and session.state in (S.PREPARING, S.PULLING)
        with raising(UnknownSession if session is None else None if legal else InvalidTransition):
            self.put(self.store.new_attempt(session_id, now_s=self.now_s))

    def hold(self, session_id: int, held: bool) -> None:
        with raising(None if session_id in self.model else UnknownSession):
            self.put(self.store.set_held(session_id, held, now_s=self.now_s))

    def warn(self, session_id: int, cause: EndCause) -> None:
        self.reclaimed(session_id, Warn(session_id, cause, self.now_s + 1))

    def spare(self, session_id: int, _: int) -> None:
        self.reclaimed(session_id, WithdrawWarning(session_id))

    def reclaim(self, session_id: int, requeue: bool) -> None:
        session = self.model.get(session_id)
        cause = session.ends_cause if session else None
        self.reclaimed(session_id, End(session_id, cause or EndCause.IDLE, "why", requeue))

    def reclaimed(self, session_id: int, decision: Reclaim) -> None:
        """Commit a random reclaim decision: it is refused unless the session runs, as is an end without a warning."""
        session = self.model.get(session_id)
        runs = session is not None and session.state is S.RUNNING
        if runs and isinstance(decision, End):
            runs = session is not None and session.ends_at_s is not None and session.ends_at_s <= self.now_s
        with raising(UnknownSession if session is None else None if runs else StaleVersion):
            self.put(*self.store.reclaim([decision], self.store.version(), now_s=self.now_s))

    def keep(self, session_id: int, more_s: int) -> None:
        with raising(self.unless_it_runs(session_id)):
            self.put(self.store.keep(session_id, self.now_s + more_s, now_s=self.now_s))

    def idle(self, session_id: int, since_s: int | None) -> None:
        with raising(self.unless_it_runs(session_id)):
            self.put(self.store.note_idle(session_id, since_s, now_s=self.now_s))

    def unless_it_runs(self, session_id: int) -> type[Exception] | None:
        session = self.model.get(session_id)
        return (
            UnknownSession if session is None else None if session.state is S.RUNNING else InvalidTransition
        )

    def quota(self, sessions: int, _: int) -> None:
        self.store.set_quotas([Quota(QuotaScope.USER, "*", max_sessions=sessions)], now_s=self.now_s)
        # No quota now: a handmade plan would exceed it and be refused. The planner's quotas are tested elsewhere.
        self.store.set_quotas([], now_s=self.now_s)

    def nodes(self, devices: int, _: int) -> None:
        self.store.set_nodes([node(devices=devices)], now_s=self.now_s)

    def put(self, *changed: Session) -> None:
        self.model.update({session.id: session for session in changed})

    def check(self) -> None:
        snapshot = self.store.snapshot(self.now_s)
        live = [s for s in self.model.values() if s.state not in ENDED]
        assert snapshot.sessions == tuple(sorted(live, key=lambda s: s.id))
        ended = [s for s in self.model.values() if s.state in ENDED]
        newest = sorted(ended, key=lambda s: (s.ended_at_s, s.id), reverse=True)
        assert self.store.ended(user=None, limit=1000) == tuple(newest)
        assert_nothing_is_oversold(self.store)
        with self.store._database.reading() as connection:
            # The cached contents must equal what another process reads.
            read = Contents.read(connection, snapshot.version)
        assert read.snapshot(self.now_s, read.usage(self.now_s, half_life_s)) == snapshot


def half_life_s(_: str) -> int:
    return HALF_LIFE_S


@contextmanager
def raising(error: type[Exception] | None) -> Iterator[None]:
    if error is None:
        yield
    else:
        with pytest.raises(error):
            yield


def live_through(kind: str, folder: Path, steps: list[tuple[str, int, object]]) -> None:
    with database(kind, folder) as url, opened(url) as store:
        world = World(store)
        world.nodes(2, 0)
        for name, first, second in steps:
            world.now_s += 1
            before = store.version(), store.last_event_id()
            getattr(world, name)(first, second)
            after = store.version(), store.last_event_id()
            # Every change makes a version and an event, and without a change there is neither.
            assert (after[0] > before[0]) == (after[1] > before[1]) or name == "idle"
            world.check()
        assert_the_log_tells_every_state(store)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgresql"])
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_random_history_matches_the_model(
    kind: str, tmp_path: Path, steps: list[tuple[str, int, object]]
) -> None:
    live_through(kind, tmp_path, steps)
