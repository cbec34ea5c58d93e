"""The tables.

Names of columns end in their units. Sessions have no foreign key to nodes or devices, so that ended sessions keep what
they held after their node is deleted. The tables `meters` and `foretold` have none to the sessions, so that writes of one
do not wait for the other. The order of columns counts where rows are unpacked.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    literal_column,
)

from fgpu_scheduler.core.lifecycle import LIVE, SERVING
from fgpu_scheduler.core.model import SessionState

metadata = MetaData()

# SQLite generates ids only in a column declared INTEGER.
Id = BigInteger().with_variant(Integer(), "sqlite")


def _key(kind: Any, *names: str) -> list[Column[Any]]:
    """Return columns of the primary key whose values are given, not generated."""
    return [Column(name, kind, primary_key=True, autoincrement=False) for name in names]


def _filled(kind: Any, *names: str, unique: bool | None = None) -> list[Column[Any]]:
    return [Column(name, kind, nullable=False, unique=unique) for name in names]


def _optional(kind: Any, *names: str) -> list[Column[Any]]:
    return [Column(name, kind) for name in names]


meta = Table(
    "fgpu_meta",
    metadata,
    *_key(Integer, "id"),
    *_filled(BigInteger, "version"),
    *_filled(Text, "installation_id"),
    CheckConstraint("id = 1", name="fgpu_meta_one_row"),
)
"""One row. Every write first adds 1 to its ``version``, which serialises writers on PostgreSQL."""

nodes = Table(
    "fgpu_nodes",
    metadata,
    *_key(Text, "id"),
    *_filled(Text, "resource_group"),
    *_filled(BigInteger, "cpu_milli", "memory_mib"),
    # Observed, or set by an administrator. Whether its cluster closed the node is a column of its own, so that neither
    # overwrites the other.
    *_filled(Text, "state"),
    *_filled(Boolean, "closed"),
)

devices = Table(
    "fgpu_devices",
    metadata,
    *_key(Text, "uuid"),
    Column("node_id", Text, ForeignKey("fgpu_nodes.id", name="fgpu_devices_node"), nullable=False),
    *_filled(Integer, "device_index"),
    *_filled(Text, "model"),
    *_filled(BigInteger, "memory_mib", "capacity_milli"),
    *_filled(Boolean, "simulated"),
    # No longer configured, but held by a session: not offered.
    *_filled(Boolean, "retired"),
    *_filled(Integer, "max_shares"),
    # An administrator's reason for cordoning it; null: not cordoned.
    *_optional(Text, "cordon_reason"),
)

sessions = Table(
    "fgpu_sessions",
    metadata,
    Column("id", Id, primary_key=True),
    # Not "user": in PostgreSQL the unquoted word is the database's own user.
    *_filled(Text, "user_name", "server_name", "image", "resource_group"),
    *_filled(BigInteger, "fgpu_milli", "cpu_milli", "memory_mib"),
    *_filled(Text, "state"),
    *_filled(BigInteger, "submitted_at_s"),
    *_filled(Boolean, "held"),
    *_filled(Integer, "attempt"),
    *_optional(Text, "node_id", "wait_reason"),
    *_optional(BigInteger, "scheduled_at_s", "started_at_s", "ended_at_s"),
    *_optional(Text, "end_cause", "message", "launched"),
    *_optional(BigInteger, "replaces", "gpu_memory_mib"),
    *_optional(Integer, "compute_percent"),
    # A JSON array, most preferred first; null: any.
    *_optional(Text, "gpu_models"),
    *_optional(BigInteger, "time_limit_s"),
    *_filled(Integer, "priority"),
    # A JSON array.
    *_filled(Text, "groups"),
    *_optional(BigInteger, "promised_at_s", "ends_at_s"),
    *_optional(Text, "ends_cause"),
    *_optional(BigInteger, "idle_since_s", "kept_until_s", "place_of"),
    # The requested priority, if an administrator changed it.
    *_optional(Integer, "asked_priority"),
    *_optional(BigInteger, "queued_at_s"),
    # Seconds that its owner added to the time limit.
    *_filled(BigInteger, "extended_s"),
    # JSON arrays: the nodes that refused it after placement, and what it held before each resize.
    *_filled(Text, "refused", "sizes"),
    # AUTOINCREMENT: ids are never reused, even if the newest row is deleted, because they name containers.
    sqlite_autoincrement=True,
)

shares = Table(
    "fgpu_shares",
    metadata,
    Column("session_id", Id, ForeignKey("fgpu_sessions.id", name="fgpu_shares_session"), primary_key=True),
    *_key(Integer, "position"),
    *_filled(Text, "device_uuid"),
    *_filled(BigInteger, "fgpu_milli", "memory_mib"),
    *_filled(Integer, "compute_percent"),
    *_filled(Text, "mode"),
    # A share of memory only has no compute.
    CheckConstraint("fgpu_milli > 0 AND memory_mib > 0 AND compute_percent >= 0", name="fgpu_shares_amounts"),
)

usage = Table(
    "fgpu_usage",
    metadata,
    *_key(Text, "user_name", "resource_group"),
    # fGPU x 1000 x seconds of ended sessions, decayed to ``at_s``.
    *_filled(Double, "fgpu_milli_s"),
    *_filled(BigInteger, "at_s"),
)

quotas = Table(
    "fgpu_quotas",
    metadata,
    # An empty group: all groups together.
    *_key(Text, "scope", "name", "resource_group"),
    *_optional(BigInteger, "max_fgpu_milli"),
    *_optional(Integer, "max_sessions", "max_pending"),
    *_optional(BigInteger, "max_lifetime_s"),
)

edits = Table(
    "fgpu_edits",
    metadata,
    # See `EditKind` for the kinds. ``fields`` is a JSON object.
    *_key(Text, "kind", "name"),
    *_filled(Text, "fields", "changed_by"),
    *_filled(BigInteger, "changed_at_s"),
)

resizes = Table(
    "fgpu_resizes",
    metadata,
    # The last resize request of a session, and its result.
    *_key(BigInteger, "session_id"),
    *_filled(BigInteger, "fgpu_milli"),
    *_optional(BigInteger, "gpu_memory_mib"),
    *_optional(Integer, "compute_percent"),
    *_filled(Text, "state"),
    *_optional(Text, "message"),
    *_filled(Text, "asked_by"),
    *_filled(BigInteger, "asked_at_s"),
)

end_messages = Table(
    "fgpu_end_messages",
    metadata,
    # The message for the owner if the session ends by a user's wish, written before the Hub is asked to end it.
    *_key(BigInteger, "session_id"),
    *_filled(Text, "message"),
    *_filled(BigInteger, "said_at_s"),
)

foretold = Table(
    "fgpu_foretold",
    metadata,
    # The first forecast of a start, and the planned range before it was corrected by earlier starts.
    *_key(BigInteger, "session_id"),
    *_filled(BigInteger, "told_at_s", "early_at_s", "middle_at_s", "late_at_s"),
    *_filled(BigInteger, "planned_early_at_s", "planned_middle_at_s", "planned_late_at_s"),
)

audit = Table(
    "fgpu_audit",
    metadata,
    Column("id", Id, primary_key=True),
    *_filled(BigInteger, "at_s"),
    *_filled(Text, "actor", "action", "target", "details"),
    *_optional(Text, "resource_group"),
    sqlite_autoincrement=True,
)

private_images = Table(
    "fgpu_private_images",
    metadata,
    Column("id", Id, primary_key=True),
    *_filled(Text, "owner"),
    # The name for users, and the reference for engines.
    *_filled(Text, "name", "reference", unique=True),
    *_filled(Text, "state"),
    *_optional(Text, "message"),
    # The node of the engine that has it, and its id there.
    *_filled(Text, "node_id"),
    *_optional(Text, "image_id"),
    *_optional(BigInteger, "size_bytes"),
    # The session, its image, the catalogue's image under that, and a JSON object of what the catalogue says about it.
    *_filled(BigInteger, "session_id"),
    *_filled(Text, "made_from", "base", "facts"),
    *_optional(Text, "recipe"),
    # JSON arrays.
    *_filled(Text, "shared_users", "shared_groups"),
    *_filled(Boolean, "server_kept", "owners_alone"),
    *_filled(Text, "asked_by"),
    *_filled(BigInteger, "asked_at_s"),
    *_optional(BigInteger, "made_at_s"),
    sqlite_autoincrement=True,
)

# By the image's id on its engines, not by name: another image with the same name needs another answer.
image_answers = Table(
    "fgpu_image_answers",
    metadata,
    *_key(Text, "image_id", "user_name"),
    *_filled(Boolean, "accepted"),
    *_filled(BigInteger, "answered_at_s"),
)

meters = Table(
    "fgpu_meters",
    metadata,
    *_key(Id, "session_id"),
    *_filled(BigInteger, "at_s"),
    # The held millionths of a GPU at that time, and the limit of its GPU memory.
    *_filled(BigInteger, "gpu_millionths", "limit_mib"),
    *_filled(BigInteger, "samples", "covered_s"),
    *_optional(BigInteger, "peak_mib", "p95_mib"),
    *_optional(Integer, "sm_p95_percent"),
    *_optional(BigInteger, "energy_mj"),
    *_filled(Boolean, "energy_estimated"),
    # A JSON object of the counts behind the percentiles, to continue from.
    *_filled(Text, "counts"),
)

events = Table(
    "fgpu_events",
    metadata,
    Column("id", Id, primary_key=True),
    *_filled(BigInteger, "at_s"),
    *_optional(BigInteger, "session_id"),
    *_filled(Text, "kind"),
    *_optional(Text, "from_state", "to_state", "reason", "user_name"),
    sqlite_autoincrement=True,
)


def in_states(states: Collection[SessionState]) -> ColumnElement[bool]:
    """Return the condition with literal states: SQLite uses a partial index only for literals."""
    return sessions.c.state.in_([literal_column(f"'{state.value}'") for state in states])


def _index(name: str, *columns: str, where: ColumnElement[bool] | None = None, unique: bool = False) -> None:
    found = [sessions.c[column] for column in columns]
    Index(f"fgpu_sessions_{name}", *found, unique=unique, sqlite_where=where, postgresql_where=where)


is_live = in_states(LIVE)
is_serving = in_states(SERVING)
has_run = sessions.c.started_at_s.is_not(None)

# Almost all sessions have ended. These two indexes contain only the few others.
_index("live", "id", where=is_live)
_index("serving", "user_name", "server_name", where=is_serving, unique=True)
_index("ended", "ended_at_s")
_index("user", "user_name", "id")
_index("user_ended", "user_name", "ended_at_s")
# For the newest runs of a resource group, without scanning those of the other groups.
_index("ran", "resource_group", "ended_at_s", where=has_run)
