"""Checks of quotas, with their own sums and their own matching of quotas and sessions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fgpu_scheduler.core.lifecycle import HOLDING
from fgpu_scheduler.core.model import Quota, Request, Session, SessionState, Snapshot, WaitReason

S = SessionState


def over_quota(before: Mapping[int, Session], now: Snapshot) -> Iterator[str]:
    """No session is placed, grows or is queued over a quota; a lowered quota ends no session."""
    for quota in now.quotas:
        for name in sorted({n for s in now.sessions for n in names(quota, s.request)}):
            own = [s for s in now.sessions if name in names(quota, s.request)]
            said = f"quota of {quota.scope} {name}"
            holding = [s for s in own if s.state in HOLDING]
            new = [s for s in holding if _is_new(s, before)]
            fgpu_milli = sum(_taken_milli(s) for s in holding)
            if new and quota.max_sessions is not None and len(holding) > quota.max_sessions:
                yield f"{said}: {len(holding)} sessions are held, and {quota.max_sessions} are allowed"
            more = any(_has_grown(s, before) for s in holding)
            if more and quota.max_fgpu_milli is not None and fgpu_milli > quota.max_fgpu_milli:
                yield f"{said}: {fgpu_milli} milli-fGPU are held, and {quota.max_fgpu_milli} are allowed"
            waiting = [s for s in own if s.state is S.PENDING]
            comes = any(s.id not in before and s.replaces is None for s in waiting)
            if comes and quota.max_pending is not None and len(waiting) > quota.max_pending:
                yield f"{said}: {len(waiting)} wait, and {quota.max_pending} are allowed"


def falsely_stopped(before: Mapping[int, Session], now: Snapshot) -> Iterator[str]:
    """A session that newly waits for a quota would exceed one, counting held shares and reservations."""
    for session in now.sessions:
        old = before.get(session.id)
        told = session.wait_reason is WaitReason.QUOTA and (
            old is None or old.wait_reason is not WaitReason.QUOTA
        )
        if told and session.request.gpu_memory_mib is None and not _stopped(session, now):
            yield f"session {session.id} waits for a quota, and no quota stops it"


def _stopped(session: Session, now: Snapshot) -> bool:
    for quota in now.quotas:
        for name in names(quota, session.request):
            own = [s for s in now.sessions if s.id != session.id and name in names(quota, s.request)]
            taken = [s for s in own if s.state in HOLDING or s.wait_reason is WaitReason.RESERVED]
            fgpu_milli = sum(_placed_milli(s) or s.request.fgpu_milli for s in taken if not _is_away(s))
            fgpu_milli += _needed_milli(session)
            # The fGPU of an explicit amount depends on the device.
            unknown = any(s.placement is None and s.request.gpu_memory_mib is not None for s in taken)
            comes = session.state is S.PENDING
            if comes and quota.max_sessions is not None and len(taken) >= quota.max_sessions:
                return True
            if quota.max_fgpu_milli is not None and (fgpu_milli > quota.max_fgpu_milli or unknown):
                return True
    return False


def names(quota: Quota, asked: Request) -> list[str]:
    """Return the names under which a quota counts the request: its user, its groups, or all."""
    if quota.resource_group is not None and quota.resource_group != asked.resource_group:
        return []
    if quota.scope.value == "user":
        return [asked.user] if quota.name in ("*", asked.user) else []
    if quota.scope.value == "account":
        return [name for name in asked.account.split("/") if name and quota.name in ("*", name)]
    if quota.scope.value == "group":
        return [group for group in asked.groups if quota.name in ("*", group)]
    return ["everybody"]


def limit_s(session: Session, now: Snapshot, lifetime_s: int | None = None) -> int | None:
    """Return the longest run of a session by its request, the quotas and the lifetime of its resource group."""
    limits = [session.time_limit_s, lifetime_s]
    limits += [quota.max_lifetime_s for quota in now.quotas if names(quota, session.request)]
    return min((limit for limit in limits if limit is not None), default=None)


def guaranteed(session: Session, now: Snapshot) -> set[str]:
    """Return the accounts with a guarantee that covers a waiting session, too."""
    found = set()
    for quota in now.quotas:
        for name in names(quota, session.request):
            held = [s for s in now.sessions if s.state in HOLDING and name in names(quota, s.request)]
            total = sum(_taken_milli(s) for s in held) + session.request.fgpu_milli
            if quota.guaranteed_milli is not None and total <= quota.guaranteed_milli:
                found.add(name)
    return found


def within(session: Session, now: Snapshot) -> set[str]:
    """Return the accounts in whose guarantee a session is: those that fit into it, the longest held first."""
    found = set()
    held = sorted((s for s in now.sessions if s.state in HOLDING), key=lambda s: (s.scheduled_at_s, s.id))
    for quota in now.quotas:
        for name in names(quota, session.request):
            left = quota.guaranteed_milli or 0
            for other in held:
                if name in names(quota, other.request) and _taken_milli(other) <= left:
                    left -= _taken_milli(other)
                    found |= {name} if other.id == session.id else set()
    return found


def _is_new(session: Session, before: Mapping[int, Session]) -> bool:
    old = before.get(session.id)
    return old is None or old.state not in HOLDING


def _has_grown(session: Session, before: Mapping[int, Session]) -> bool:
    old = before.get(session.id)
    return _taken_milli(session) > (0 if old is None else _taken_milli(old))


def _is_away(session: Session) -> bool:
    """Return whether a parked session leaves its fGPU to others: it does not want it back, or a quota stops it."""
    wants = session.wanted_at_s is not None and session.wait_reason is not WaitReason.QUOTA
    return session.parked_at_s is not None and not (session.state is S.PARKED and wants)


def _needed_milli(session: Session) -> int:
    on_demand = session.state is S.PENDING and session.request.on_demand
    return 0 if on_demand else session.request.fgpu_milli


def _taken_milli(session: Session) -> int:
    return 0 if session.parked_at_s is not None else _placed_milli(session)


def _placed_milli(session: Session) -> int:
    return sum(share.fgpu_milli for share in session.placement.shares) if session.placement else 0
