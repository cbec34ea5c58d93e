"""Reads the jobs that ``fgpu replay`` simulates, and their real outcomes: from a database, or from a trace file.

A trace file has one session in each row of CSV; docs/replay.md describes its columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Self, TextIO

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from fgpu_scheduler import (
    ENDED,
    HOLDING,
    BadAmount,
    BadSettings,
    Job,
    Node,
    Outcome,
    Quota,
    Request,
    Session,
    SessionState,
    Store,
    parse_milli,
)

PAGE = 5000
"""Number of events that are read at once."""
UNKNOWN_LENGTH_S = 3600
"""The assumed length of sessions where none has ever run."""


@dataclass(frozen=True, slots=True)
class JobHistory:
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


def read_history(store: Store, *, now_s: int) -> JobHistory:
    """Return an installation's history: every session ever submitted.

    Sessions that hold shares hold them until now; waiting ones keep waiting. The length of a session that never started
    is the median of its resource group. Nodes and quotas are today's.
    """
    lives = _lives(store)
    snapshot = store.snapshot(now_s)
    sessions = {s.id: s for s in (*store.ended(user=None, limit=10**9), *snapshot.sessions)}
    found = [(lives[i], sessions[i]) for i in sorted(lives) if i in sessions]
    found.sort(key=lambda pair: pair[0].submitted_at_s)
    typical = _typical_lengths_s(
        (session.request.resource_group, _held_s(life, now_s))
        for life, session in found
        if life.placed_at_s is not None
    )
    happened = tuple(_happened(life, session, typical, now_s) for life, session in found)
    return JobHistory(tuple(o.job for o in happened), happened, snapshot.nodes, snapshot.quotas)


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


def _typical_lengths_s(lengths: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """Return the median length of the sessions of each resource group, and under "" of all sessions."""
    found: dict[str, list[int]] = {}
    for group, length_s in lengths:
        found.setdefault(group, []).append(length_s)
        found.setdefault("", []).append(length_s)
    return {group: int(median(own)) for group, own in found.items()}


def _typical_length_s(typical: Mapping[str, int], resource_group: str) -> int:
    """Return the assumed length of a session of this group that never started."""
    return typical.get(resource_group, typical.get("", UNKNOWN_LENGTH_S))


def _happened(life: _Life, session: Session, typical: Mapping[str, int], now_s: int) -> Outcome:
    # A replay gives each session its share from its start to its end.
    asked, submitted_at_s = replace(session.request, on_demand=False), life.submitted_at_s
    left_at_s = max(submitted_at_s, now_s if life.ended_at_s is None else life.ended_at_s)
    if life.placed_at_s is None:
        patience_s = None if life.ended_at_s is None else left_at_s - submitted_at_s
        job = Job(asked, submitted_at_s, _typical_length_s(typical, asked.resource_group), patience_s)
        return Outcome(job, None, left_at_s)
    # After a clock was set back a start could precede its submission.
    placed_at_s = max(submitted_at_s, life.placed_at_s)
    job = Job(asked, submitted_at_s, _held_s(life, now_s))
    shares = session.placement.shares if session.placement else ()
    taken_milli = sum(share.fgpu_milli for share in shares) or asked.fgpu_milli
    return Outcome(job, placed_at_s, placed_at_s + job.length_s, taken_milli)


def _to_milli(text: object) -> int:
    try:
        return parse_milli(str(text), field="")
    except BadAmount as e:
        raise ValueError(str(e).removeprefix(": ")) from None


def _names(text: object) -> tuple[str, ...]:
    return tuple(name for name in str(text).split(";") if name)


Whole = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[int, Field(ge=1, le=2**53)]
Milli = Annotated[int, BeforeValidator(_to_milli)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class TraceRow(BaseModel):
    """A row of a trace file; its fields are the columns. Empty cells are left out."""

    submitted_at_s: Whole
    user: str
    length_s: Whole | None = None
    fgpu: Annotated[Milli, Field(ge=1)] | None = None
    gpu_memory_mib: Positive | None = None
    compute_percent: Annotated[int, Field(ge=1, le=100)] | None = None
    gpu_models: Names = ()
    gpu_model: str = ""
    resource_group: str = "default"
    cpu: Milli = 0
    memory_mib: Whole = 0
    time_limit_s: Positive | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    groups: Names = ()
    waited_s: Whole | None = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> Self:
        for wrong, words in (
            (
                (self.fgpu is None) == (self.gpu_memory_mib is None),
                "fgpu: give either fgpu or gpu_memory_mib",
            ),
            (self.compute_percent and self.fgpu, "compute_percent: goes with gpu_memory_mib only"),
            (self.gpu_models and self.gpu_model, "gpu_models: give either gpu_models or gpu_model"),
        ):
            if wrong:
                raise ValueError(words)
        if self.gpu_model:
            self.gpu_models = (self.gpu_model,)
        return self

    @property
    def request(self) -> Request:
        """The request of the session."""
        asked = self.model_dump(
            exclude={"submitted_at_s", "length_s", "waited_s", "fgpu", "cpu", "gpu_model"}
        )
        return Request(server_name="", image="", fgpu_milli=self.fgpu or 0, cpu_milli=self.cpu, **asked)

    def job(self, typical: Mapping[str, int]) -> Job:
        """Return the job; ``typical`` are the lengths of sessions without one."""
        if self.length_s is not None:
            return Job(self.request, self.submitted_at_s, self.length_s)
        length_s = _typical_length_s(typical, self.resource_group)
        return Job(self.request, self.submitted_at_s, length_s, self.waited_s)

    def outcome(self, job: Job, last_s: int) -> Outcome:
        """Return the real outcome, if `waited_s` is known; ``last_s`` is the end of the trace."""
        if self.length_s is None:
            left_at_s = last_s if self.waited_s is None else self.submitted_at_s + self.waited_s
            return Outcome(job, None, max(self.submitted_at_s, left_at_s))
        placed_at_s = self.submitted_at_s + (self.waited_s or 0)
        return Outcome(job, placed_at_s, placed_at_s + self.length_s, self.fgpu or 0)


REQUIRED = ("submitted_at_s", "user", "length_s")


def read_trace(path: str) -> JobHistory:
    """Return the jobs of a trace file, and their real outcomes if every row has its wait.

    Raises:
        BadSettings: with the line, the field, and what would work.
    """
    try:
        # Spreadsheets write a byte order mark first.
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(file, path))
    except (UnicodeDecodeError, csv.Error) as e:
        raise BadSettings(f"{path}: is not CSV in UTF-8: {e}") from None
    if not rows:
        raise BadSettings(f"{path}: has no session; a row is one session, below a line of column names")
    typical = _typical_lengths_s(
        (row.resource_group, row.length_s) for row in rows if row.length_s is not None
    )
    rows.sort(key=lambda row: row.submitted_at_s)
    last_s = max(row.submitted_at_s + (row.waited_s or 0) + (row.length_s or 0) for row in rows)
    jobs = tuple(row.job(typical) for row in rows)
    known = all(row.waited_s is not None or row.length_s is None for row in rows)
    pairs = zip(rows, jobs, strict=True)
    return JobHistory(jobs, tuple(row.outcome(job, last_s) for row, job in pairs) if known else None)


def _rows(file: TextIO, path: str) -> Iterator[TraceRow]:
    reader = csv.reader(file, strict=True)
    names = [name.strip() for name in next(reader, [])]
    wrong = [name for name in names if name not in TraceRow.model_fields or names.count(name) > 1]
    missing = [name for name in REQUIRED if name not in names]
    if wrong or missing or {"fgpu", "gpu_memory_mib"}.isdisjoint(names):
        said = f"{wrong[0]!r} is no column, or there twice" if wrong else "columns are missing"
        raise BadSettings(
            f"{path}: line 1: {said}; {', '.join(REQUIRED)} and fgpu or gpu_memory_mib are needed, the columns are "
            f"{', '.join(TraceRow.model_fields)}"
        )
    for cells in reader:
        where = f"{path}: line {reader.line_num}"
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(names):
            raise BadSettings(f"{where}: has {len(cells)} fields, and {len(names)} columns are named")
        row: dict[str, Any] = {n: own for n, cell in zip(names, cells, strict=True) if (own := cell.strip())}
        try:
            yield TraceRow(**row)
        except ValidationError as e:
            first = e.errors(include_url=False)[0]
            field = f"{first['loc'][0]}: " if first["loc"] else ""
            given = f"{row.get(str(first['loc'][0]), '')[:40]!r}: " if first["loc"] else ""
            raise BadSettings(
                f"{where}: {field}{given}{first['msg'].removeprefix('Value error, ')}"
            ) from None
