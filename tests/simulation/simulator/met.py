"""Counts what a history contained: a history without an event proves nothing about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fgpu_scheduler.core.lifecycle import ENDED
from fgpu_scheduler.core.model import QuotaScope, Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.policies import GroupPolicy, Policy

S = SessionState


class Coverage:
    """Counts by name: wait reasons, end causes, warnings, kinds of requests, policies, and limits of quotas."""

    def __init__(self, first: Snapshot, policy: Policy) -> None:
        self._counts: Counter[str] = Counter()
        for group in {node.resource_group: None for node in first.nodes}:
            self._counts.update(_of_policy(policy.of(group)))

    def look(self, before: Mapping[int, Session], after: Mapping[int, Session], now: Snapshot) -> None:
        """Count the differences between two states of all sessions; ``now`` is the second state's snapshot."""
        for session_id, session in after.items():
            old = before.get(session_id)
            if old is session:
                continue
            if old is None:
                self._counts.update(_of_request(session.request))
                self._counts["queued again"] += session.replaces is not None
            if session.wait_reason is not None and (
                old is None or old.wait_reason is not session.wait_reason
            ):
                self._counts[f"waits {session.wait_reason}"] += 1
            if session.ends_cause is not None and (old is None or old.ends_cause is not session.ends_cause):
                self._counts[f"warned {session.ends_cause}"] += 1
            if session.state in ENDED and (old is None or old.state not in ENDED):
                self._counts[f"ends {session.end_cause}"] += 1
            if session.kept_until_s is not None and (old is None or old.kept_until_s is None):
                self._counts["kept"] += 1
            if session.extended_s and (old is None or not old.extended_s):
                self._counts["extended"] += 1
            if old is not None and old.state is not session.state and session.state in (S.PARKED, S.RESUMING):
                self._counts[f"becomes {session.state} from {old.state}"] += 1
            resized = old is not None and old.state is session.state is S.RUNNING
            if old is not None and resized and session.sizes != old.sizes and session.placement is not None:
                grown = session.placement.shares[0].memory_mib > session.sizes[-1].memory_mib
                self._counts["grown" if grown else "shrunk"] += 1
            if session.state is S.SCHEDULED and old is not None and old.state is S.PENDING:
                self._counts.update(_of_start(session, now))

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Return the counts by name."""
        return tuple(sorted((what, number) for what, number in self._counts.items() if number))


def _of_policy(own: GroupPolicy) -> list[str]:
    return [f"order {own.order.__name__}", f"strict {own.strict}"]


def _of_request(asked: Request) -> list[str]:
    found = ["asks fGPU" if asked.gpu_memory_mib is None else "asks memory"]
    if asked.gpu_memory_mib is not None and asked.compute_percent is not None:
        found = ["asks memory and compute"]
    found += ["asks a model"] if len(asked.gpu_models) == 1 else []
    found += ["asks several models"] if len(asked.gpu_models) > 1 else []
    found += ["asks a time limit"] if asked.time_limit_s else []
    found += ["asks a priority"] if asked.priority else []
    return found


def _of_start(session: Session, now: Snapshot) -> list[str]:
    assert session.placement is not None
    shares = session.placement.shares
    found = ["starts on several devices" if len(shares) > 1 else f"starts a share of {shares[0].mode}"]
    models = session.request.gpu_models
    if len(models) > 1:
        got = next(d.model for n in now.nodes for d in n.devices if d.uuid == shares[0].device_uuid)
        found += ["starts on the model liked most" if got == models[0] else "starts on a model liked less"]
    found += ["starts as promised"] if session.promised_at_s is not None else []
    for quota in now.quotas:
        limits = quota.max_fgpu_milli, quota.max_sessions, quota.max_pending, quota.max_lifetime_s
        names = "fgpu", "sessions", "pending", "lifetime"
        scope = QuotaScope(quota.scope)
        found += [f"starts beside a quota of {scope}"]
        found += [
            f"starts beside a quota of {name}"
            for name, limit in zip(names, limits, strict=True)
            if limit is not None
        ]
    return found
