"""Reads the jobs to replay, and what happened to them, from an installation's database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from fgpu_scheduler import ENDED, HOLDING, Job, Node, Outcome, Quota, Session, SessionState, Store

PAGE = 5000
"""Number of events that are read at once."""
UNKNOWN_LENGTH_S = 3600
"""The assumed length of sessions where none has ever run."""


@dataclass(frozen=True, slots=True)
class History:
    """Jobs in order of submission, and what happened to each if known."""

    jobs: tuple[Job, ...]
    happened: tuple[Outcome, ...] | None
    nodes: tuple[Node, ...] = ()
    quotas: tuple[Quota, ...] = ()


@dataclass(slots=True)
class _Life:
    """The log's times of one session."""

    submitted_at_s: int
    placed_at_s: int | None = None
    ended_at_s: int | None = None


def read_history(store: Store, *, now_s: int) -> History:
    """Return an installation's history: every session ever submitted.

    Sessions that hold shares hold them until now; waiting ones keep waiting. The length of a session that never started
    is the median of its resource group. Nodes and quotas are today's.
    """
    lives = _lives(store)
    snapshot = store.snapshot(now_s)
    sessions = {s.id: s for s in (*store.ended(user=None, limit=10**9), *snapshot.sessions)}
    found = [(lives[i], sessions[i]) for i in sorted(lives) if i in sessions]
    found.sort(key=lambda pair: pair[0].submitted_at_s)
    typical = typical_lengths_s(
        (session.request.resource_group, _held_s(life, now_s))
        for life, session in found
        if life.placed_at_s is not None
    )
    happened = tuple(_happened(life, session, typical, now_s) for life, session in found)
    return History(tuple(o.job for o in happened), happened, snapshot.nodes, snapshot.quotas)


def _lives(store: Store) -> dict[int, _Life]:
    lives: dict[int, _Life] = {}
    last_id = 0
    while page := store.events(after_id=last_id, limit=PAGE):
        last_id = page[-1].id
        for event in page:
            if event.kind == "submitted" and event.session_id is not None:
                lives[event.session_id] = _Life(event.at_s)
            life = lives.get(event.session_id or 0)
            if life is None or event.to_state is None:
                continue
            if event.to_state is SessionState.PENDING:
                # Its node was lost before the launch, so it waited again.
                life.placed_at_s = None
            elif event.to_state in HOLDING and life.placed_at_s is None:
                life.placed_at_s = event.at_s
            elif event.to_state in ENDED:
                life.ended_at_s = event.at_s
    return lives


def _held_s(life: _Life, now_s: int) -> int:
    assert life.placed_at_s is not None
    return max(0, (now_s if life.ended_at_s is None else life.ended_at_s) - life.placed_at_s)


def typical_lengths_s(lengths: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """Return the median length of each resource group's sessions, and under "" of all."""
    found: dict[str, list[int]] = {}
    for group, length_s in lengths:
        found.setdefault(group, []).append(length_s)
        found.setdefault("", []).append(length_s)
    return {group: int(median(own)) for group, own in found.items()}


def typical_length_s(typical: Mapping[str, int], resource_group: str) -> int:
    """Return the assumed length of a session of this group that never started."""
    return typical.get(resource_group, typical.get("", UNKNOWN_LENGTH_S))


def _happened(life: _Life, session: Session, typical: Mapping[str, int], now_s: int) -> Outcome:
    asked, submitted_at_s = session.request, life.submitted_at_s
    left_at_s = max(submitted_at_s, now_s if life.ended_at_s is None else life.ended_at_s)
    if life.placed_at_s is None:
        patience_s = None if life.ended_at_s is None else left_at_s - submitted_at_s
        job = Job(asked, submitted_at_s, typical_length_s(typical, asked.resource_group), patience_s)
        return Outcome(job, None, left_at_s)
    # After a clock was set back a start could precede its submission.
    placed_at_s = max(submitted_at_s, life.placed_at_s)
    job = Job(asked, submitted_at_s, _held_s(life, now_s))
    shares = session.placement.shares if session.placement else ()
    taken_milli = sum(share.fgpu_milli for share in shares) or asked.fgpu_milli
    return Outcome(job, placed_at_s, placed_at_s + job.length_s, taken_milli)
