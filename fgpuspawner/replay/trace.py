"""Trace files: one session in each row of CSV. docs/replay.md has the format."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from fgpu_scheduler import BadAmount, BadSettings, Job, Outcome, Request, parse_milli
from fgpuspawner.replay.history import History, typical_length_s, typical_lengths_s

LARGEST = 2**53
UNSAID = Request("", "", "", "default", fgpu_milli=0, cpu_milli=0, memory_mib=0)
"""The request where a column is missing or empty."""


class _BadField(Exception):
    """A field of a row is wrong."""


def _whole(text: str, field: str, *, least: int = 0, most: int = LARGEST) -> int:
    try:
        value = int(text) if text.isascii() else None
    except ValueError:
        value = None
    if value is None:
        raise _BadField(f"{field}: {text[:40]!r} is not a whole number such as 3600")
    if not least <= value <= most:
        raise _BadField(f"{field}: {text[:40]} is not between {least} and {most}")
    return value


def _milli(text: str, field: str, *, least: int = 0) -> int:
    found = parse_milli(text, field=field)
    if found < least:
        raise _BadField(f"{field}: {text} must be above 0")
    return found


def _text(text: str, field: str) -> str:
    return text


def _one(text: str, field: str) -> tuple[str, ...]:
    return (text,)


def _names(text: str, field: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(";") if name)


REQUIRED = ("submitted_at_s", "user", "length_s")
COLUMNS: Mapping[str, Callable[[str, str], Any]] = {
    "submitted_at_s": _whole,
    "user": _text,
    "length_s": _whole,
    "fgpu": partial(_milli, least=1),
    "gpu_memory_mib": partial(_whole, least=1),
    "compute_percent": partial(_whole, least=1, most=100),
    "gpu_models": _names,
    "gpu_model": _one,
    "resource_group": _text,
    "cpu": _milli,
    "memory_mib": _whole,
    "time_limit_s": partial(_whole, least=1),
    "priority": partial(_whole, least=-1000, most=1000),
    "groups": _names,
    "waited_s": _whole,
}
"""The parser of each column."""


def read_trace(path: str) -> History:
    """Return the jobs of a trace file, and what happened to them if every row has its wait.

    Raises:
        BadSettings: with the line, the field, and what would work.
    """
    try:
        # Spreadsheets write a byte order mark first.
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = list(_rows(file, path))
    except UnicodeDecodeError:
        raise BadSettings(f"{path}: is not a text in UTF-8") from None
    except csv.Error as e:
        raise BadSettings(f"{path}: is not CSV: {e}") from None
    if not rows:
        raise BadSettings(f"{path}: has no session; a row is one session, below a line of column names")
    typical = typical_lengths_s(
        (row.request.resource_group, row.length_s) for row in rows if row.length_s is not None
    )
    rows.sort(key=lambda row: row.submitted_at_s)
    last_s = max(row.submitted_at_s + (row.waited_s or 0) + (row.length_s or 0) for row in rows)
    jobs = tuple(row.job(typical) for row in rows)
    known = all(row.waited_s is not None or row.length_s is None for row in rows)
    pairs = zip(rows, jobs, strict=True)
    return History(jobs, tuple(row.outcome(job, last_s) for row, job in pairs) if known else None)


class _Row:
    """One row as written."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        # Besides the user, only the first column must not be empty.
        own = {name: COLUMNS[name](text, name) for name, text in cells.items() if text or name == REQUIRED[0]}
        if ("fgpu" in own) == ("gpu_memory_mib" in own):
            raise _BadField("fgpu: give either fgpu or gpu_memory_mib")
        if "compute_percent" in own and "fgpu" in own:
            raise _BadField("compute_percent: goes with gpu_memory_mib only")
        if "user" not in own:
            raise _BadField("user: is empty")
        if "gpu_model" in own:
            if "gpu_models" in own:
                raise _BadField("gpu_models: give either gpu_models or gpu_model")
            own["gpu_models"] = own.pop("gpu_model")
        self.submitted_at_s: int = own.pop("submitted_at_s")
        self.length_s: int | None = own.pop("length_s", None)
        self.waited_s: int | None = own.pop("waited_s", None)
        in_milli = {f"{name}_milli": own.pop(name) for name in ("fgpu", "cpu") if name in own}
        self.request = replace(UNSAID, **own, **in_milli)

    def job(self, typical: Mapping[str, int]) -> Job:
        if self.length_s is not None:
            return Job(self.request, self.submitted_at_s, self.length_s)
        length_s = typical_length_s(typical, self.request.resource_group)
        return Job(self.request, self.submitted_at_s, length_s, self.waited_s)

    def outcome(self, job: Job, last_s: int) -> Outcome:
        """Return what happened, if `waited_s` is known; ``last_s`` is the end of the trace."""
        if self.length_s is None:
            left_at_s = last_s if self.waited_s is None else self.submitted_at_s + self.waited_s
            return Outcome(job, None, max(self.submitted_at_s, left_at_s))
        placed_at_s = self.submitted_at_s + (self.waited_s or 0)
        return Outcome(job, placed_at_s, placed_at_s + self.length_s, self.request.fgpu_milli)


def _rows(file: TextIO, path: str) -> Iterator[_Row]:
    reader = csv.reader(file, strict=True)
    names = [name.strip() for name in next(reader, [])]
    for name in names:
        if name not in COLUMNS:
            raise BadSettings(
                f"{path}: line 1: there is no column {name!r}; the columns are {', '.join(COLUMNS)}"
            )
        if names.count(name) > 1:
            raise BadSettings(f"{path}: line 1: the column {name!r} is there twice")
    missing = [name for name in REQUIRED if name not in names]
    if missing or {"fgpu", "gpu_memory_mib"}.isdisjoint(names):
        raise BadSettings(
            f"{path}: line 1: the columns {', '.join(missing) or 'fgpu or gpu_memory_mib'} are missing; "
            f"{', '.join(REQUIRED)} and fgpu or gpu_memory_mib are needed"
        )
    for cells in reader:
        where = f"{path}: line {reader.line_num}"
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(names):
            raise BadSettings(f"{where}: has {len(cells)} fields, and {len(names)} columns are named")
        try:
            yield _Row({name: cell.strip() for name, cell in zip(names, cells, strict=True)})
        except (_BadField, BadAmount) as e:
            raise BadSettings(f"{where}: {e}") from None
