"""One round of reclaiming: record which sessions are idle, then commit warnings, withdrawn warnings and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fgpu_scheduler.core.lifecycle import UP
from fgpu_scheduler.core.model import Session, Snapshot
from fgpu_scheduler.core.planner import Plan, PlanCache, Policy, plan
from fgpu_scheduler.core.reclaim import AllRules, WarningAges, reclaims
from fgpu_scheduler.errors import InvalidTransition, StaleVersion
from fgpu_scheduler.store.store import Store


class Reclaiming:
    """Reclaims by the rules, and remembers for how long each warning has stood. For the store's thread."""

    def __init__(self, store: Store, policy: Policy, rules: AllRules) -> None:
        self._store = store
        self._policy = policy
        self._rules = rules
        self._warnings = WarningAges()
        self._cache = PlanCache()

    def watched_for_idleness(self, now_s: int) -> tuple[Session, ...]:
        """Return the running sessions that their rules end for being idle."""
        return tuple(
            session
            for session in self._store.snapshot(now_s).sessions
            if session.state in UP
            and self._rules.of(session.request.resource_group).ends_idle_after_s is not None
        )

    def note_idle(
        self, watched: Sequence[Session], since_s: Mapping[int, int | None], now_s: int
    ) -> tuple[int, ...]:
        """Commit since when each session is idle and return the changed ids; unknown counts as not idle."""
        changed = []
        for session in watched:
            since = since_s.get(session.id)
            if since != session.idle_since_s:
                try:
                    self._store.note_idle(session.id, since, now_s=now_s)
                except InvalidTransition:
                    continue  # It has ended since.
                changed.append(session.id)
        return tuple(changed)

    def round(self, now_s: int, steady_s: float) -> tuple[Session, ...]:
        """Decide and commit, retrying after writes of others; return the changed sessions.

        ``steady_s`` is a monotonic time, so that setting the clock shortens no grace period.

        Raises:
            StaleVersion: the commit was refused twice for the same version.
        """
        refused = -1
        while True:
            snapshot = self._store.snapshot(now_s)
            warned_for_s = self._warnings.warned_for_s(snapshot.sessions, steady_s)
            planned = self._planned(snapshot)
            decided = reclaims(snapshot, planned, self._rules, warned_for_s=warned_for_s)
            if not decided:
                return ()
            try:
                return self._store.reclaim(decided, snapshot.version, now_s=now_s)
            except StaleVersion:
                if snapshot.version == refused:
                    raise
                refused = snapshot.version

    def _planned(self, snapshot: Snapshot) -> Plan:
        """Return the plan on which pre-emption is decided; without pre-emption an empty plan is enough."""
        if not any(own.preempt for own in (self._rules.default, *self._rules.groups.values())):
            return Plan(snapshot.version, ())
        return plan(snapshot, self._policy, self._cache)
