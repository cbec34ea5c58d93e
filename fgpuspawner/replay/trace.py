"""A trace file: one session per row, in CSV. docs/replay.md has the format."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from fgpu_scheduler import BadAmount, BadSettings, Request, parse_milli
from fgpu_scheduler.replay import Job, Outcome
from fgpuspawner.replay.history import History, typical_length_s, typical_lengths_s

REQUIRED = ("submitted_at_s", "user", "length_s")
OPTIONAL = (
    "fgpu",
    "gpu_memory_mib",
    "compute_percent",
    "gpu_model",
    "resource_group",
    "cpu",
    "memory_mib",
    "time_limit_s",
    "priority",
    "groups",
    "waited_s",
)
COLUMNS = (*REQUIRED, *OPTIONAL)
LARGEST = 2**53
DEFAULT_GROUP = "default"


class _BadField(Exception):
    """What is wrong with one field of a row."""


def read_trace(path: str) -> History:
    """Return the jobs of a trace file, and what happened to them if every row tells how long it waited.

    Raises:
        BadSettings: the file cannot be read as a trace; the line and the field, and what would work.
    """
    try:
        # Spreadsheets put a byte order mark first.
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
    """One row, as it is written."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self.submitted_at_s = _whole(cells, "submitted_at_s")
        self.length_s = _whole(cells, "length_s") if cells["length_s"] else None
        self.waited_s = _whole(cells, "waited_s") if cells.get("waited_s") else None
        explicit = bool(cells.get("gpu_memory_mib"))
        if explicit == bool(cells.get("fgpu")):
            raise _BadField("fgpu: give either fgpu or gpu_memory_mib")
        if cells.get("compute_percent") and not explicit:
            raise _BadField("compute_percent: goes with gpu_memory_mib only")
        if not cells["user"]:
            raise _BadField("user: is empty")
        self.request = Request(
            user=cells["user"],
            server_name="",
            image="",
            resource_group=cells.get("resource_group") or DEFAULT_GROUP,
            fgpu_milli=0 if explicit else _milli(cells, "fgpu", least=1),
            cpu_milli=_milli(cells, "cpu", least=0) if cells.get("cpu") else 0,
            memory_mib=_whole(cells, "memory_mib") if cells.get("memory_mib") else 0,
            gpu_memory_mib=_whole(cells, "gpu_memory_mib", least=1) if explicit else None,
            compute_percent=_whole(cells, "compute_percent", least=1, most=100)
            if cells.get("compute_percent")
            else None,
            gpu_model=cells.get("gpu_model") or None,
            time_limit_s=_whole(cells, "time_limit_s", least=1) if cells.get("time_limit_s") else None,
            priority=_whole(cells, "priority", least=-1000, most=1000) if cells.get("priority") else 0,
            groups=tuple(g for g in cells.get("groups", "").split(";") if g),
        )

    def job(self, typical: Mapping[str, int]) -> Job:
        """Return the row as a job; one that never started lasts as long as others do."""
        if self.length_s is not None:
            return Job(self.request, self.submitted_at_s, self.length_s)
        length_s = typical_length_s(typical, self.request.resource_group)
        return Job(self.request, self.submitted_at_s, length_s, self.waited_s)

    def outcome(self, job: Job, last_s: int) -> Outcome:
        """Return what happened, where `waited_s` is known; ``last_s`` is when the trace ends."""
        if self.length_s is None:
            left_at_s = last_s if self.waited_s is None else self.submitted_at_s + self.waited_s
            return Outcome(job, None, max(self.submitted_at_s, left_at_s))
        placed_at_s = self.submitted_at_s + (self.waited_s or 0)
        return Outcome(job, placed_at_s, placed_at_s + self.length_s, self.request.fgpu_milli)


def _rows(file: TextIO, path: str) -> Iterator[_Row]:
    reader = csv.reader(file, strict=True)
    names = [name.strip() for name in next(reader, [])]
    _check_columns(names, path)
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


def _check_columns(names: Iterable[str], path: str) -> None:
    found: dict[str, None] = {}
    for name in names:
        if name not in COLUMNS:
            raise BadSettings(
                f"{path}: line 1: there is no column {name!r}; the columns are {', '.join(COLUMNS)}"
            )
        if name in found:
            raise BadSettings(f"{path}: line 1: the column {name!r} is there twice")
        found[name] = None
    missing = [name for name in REQUIRED if name not in found]
    if missing or not ({"fgpu", "gpu_memory_mib"} & found.keys()):
        raise BadSettings(
            f"{path}: line 1: the columns {', '.join(missing) or 'fgpu or gpu_memory_mib'} are missing; "
            f"{', '.join(REQUIRED)} and fgpu or gpu_memory_mib are needed"
        )


def _whole(cells: Mapping[str, str], field: str, *, least: int = 0, most: int = LARGEST) -> int:
    shown = cells[field]
    try:
        value = int(shown) if shown.isascii() else None
    except ValueError:
        value = None
    if value is None:
        raise _BadField(f"{field}: {shown[:40]!r} is not a whole number such as 3600")
    if not least <= value <= most:
        raise _BadField(f"{field}: {shown[:40]} is not between {least} and {most}")
    return value


def _milli(cells: Mapping[str, str], field: str, *, least: int) -> int:
    found = parse_milli(cells[field], field=field)
    if found < least:
        raise _BadField(f"{field}: {cells[field]} must be above 0")
    return found
