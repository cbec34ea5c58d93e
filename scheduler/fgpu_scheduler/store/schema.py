"""The tables.

Names of columns end in their units. Sessions have no foreign key to nodes or devices, so that ended sessions keep what
they held after their node is deleted.
"""

from __future__ import annotations

from collections.abc import Collection

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

meta = Table(
    "fgpu_meta",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("installation_id", Text, nullable=False),
    CheckConstraint("id = 1", name="fgpu_meta_one_row"),
)
"""One row. Every write first adds 1 to its ``version``, which serialises writers on PostgreSQL."""

nodes = Table(
    "fgpu_nodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("resource_group", Text, nullable=False),
    Column("cpu_milli", BigInteger, nullable=False),
    Column("memory_mib", BigInteger, nullable=False),
    # Observed, or set by an administrator. Whether its cluster closed the node is a column of its own, so that neither
    # overwrites the other.
    Column("state", Text, nullable=False),
    Column("closed", Boolean, nullable=False),
)

devices = Table(
    "fgpu_devices",
    metadata,
    Column("uuid", Text, primary_key=True),
    Column("node_id", Text, ForeignKey("fgpu_nodes.id", name="fgpu_devices_node"), nullable=False),
    Column("device_index", Integer, nullable=False),
    Column("model", Text, nullable=False),
    Column("memory_mib", BigInteger, nullable=False),
    Column("capacity_milli", BigInteger, nullable=False),
    Column("simulated", Boolean, nullable=False),
    # No longer configured, but held by a session: not offered.
    Column("retired", Boolean, nullable=False),
    Column("max_shares", Integer, nullable=False),
    # An administrator's reason for cordoning it; null: not cordoned.
    Column("cordon_reason", Text),
)

sessions = Table(
    "fgpu_sessions",
    metadata,
    Column("id", Id, primary_key=True),
    # Not "user": in PostgreSQL the unquoted word is the database's own user.
    Column("user_name", Text, nullable=False),
    Column("server_name", Text, nullable=False),
    Column("image", Text, nullable=False),
    Column("resource_group", Text, nullable=False),
    Column("fgpu_milli", BigInteger, nullable=False),
    Column("cpu_milli", BigInteger, nullable=False),
    Column("memory_mib", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("submitted_at_s", BigInteger, nullable=False),
    Column("held", Boolean, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("node_id", Text),
    Column("wait_reason", Text),
    Column("scheduled_at_s", BigInteger),
    Column("started_at_s", BigInteger),
    Column("ended_at_s", BigInteger),
    Column("end_cause", Text),
    Column("message", Text),
    Column("launched", Text),
    Column("replaces", BigInteger),
    Column("gpu_memory_mib", BigInteger),
    Column("compute_percent", Integer),
    # A JSON array, most preferred first; null: any.
    Column("gpu_models", Text),
    Column("time_limit_s", BigInteger),
    Column("priority", Integer, nullable=False),
    # A JSON array.
    Column("groups", Text, nullable=False),
    Column("promised_at_s", BigInteger),
    Column("ends_at_s", BigInteger),
    Column("ends_cause", Text),
    Column("idle_since_s", BigInteger),
    Column("kept_until_s", BigInteger),
    Column("place_of", BigInteger),
    # The requested priority, if an administrator changed it.
    Column("asked_priority", Integer),
    Column("queued_at_s", BigInteger),
    # Seconds that its owner added to the time limit.
    Column("extended_s", BigInteger, nullable=False),
    # A JSON array of the nodes that refused it after placement.
    Column("refused", Text, nullable=False),
    # A JSON array of what it held before each resize.
    Column("sizes", Text, nullable=False),
    # AUTOINCREMENT: ids are never reused, even if the newest row is deleted, because they name containers.
    sqlite_autoincrement=True,
)

shares = Table(
    "fgpu_shares",
    metadata,
    Column("session_id", Id, ForeignKey("fgpu_sessions.id", name="fgpu_shares_session"), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("device_uuid", Text, nullable=False),
    Column("fgpu_milli", BigInteger, nullable=False),
    Column("memory_mib", BigInteger, nullable=False),
    Column("compute_percent", Integer, nullable=False),
    Column("mode", Text, nullable=False),
    # A share of memory only has no compute.
    CheckConstraint("fgpu_milli > 0 AND memory_mib > 0 AND compute_percent >= 0", name="fgpu_shares_amounts"),
)

usage = Table(
    "fgpu_usage",
    metadata,
    Column("user_name", Text, primary_key=True),
    Column("resource_group", Text, primary_key=True),
    # fGPU x 1000 x seconds of ended sessions, decayed to ``at_s``.
    Column("fgpu_milli_s", Double, nullable=False),
    Column("at_s", BigInteger, nullable=False),
)

quotas = Table(
    "fgpu_quotas",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    # Empty: all groups together.
    Column("resource_group", Text, primary_key=True),
    Column("max_fgpu_milli", BigInteger),
    Column("max_sessions", Integer),
    Column("max_pending", Integer),
    Column("max_lifetime_s", BigInteger),
)

edits = Table(
    "fgpu_edits",
    metadata,
    # See `EditKind` for the kinds. ``fields`` is a JSON object.
    Column("kind", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("fields", Text, nullable=False),
    Column("changed_by", Text, nullable=False),
    Column("changed_at_s", BigInteger, nullable=False),
)

resizes = Table(
    "fgpu_resizes",
    metadata,
    # The last resize request of a session, and its result.
    Column("session_id", BigInteger, primary_key=True, autoincrement=False),
    Column("fgpu_milli", BigInteger, nullable=False),
    Column("gpu_memory_mib", BigInteger),
    Column("compute_percent", Integer),
    Column("state", Text, nullable=False),
    Column("message", Text),
    Column("asked_by", Text, nullable=False),
    Column("asked_at_s", BigInteger, nullable=False),
)

end_messages = Table(
    "fgpu_end_messages",
    metadata,
    # The message for the owner if the session ends by a user's wish, written before the Hub is asked to end it.
    Column("session_id", BigInteger, primary_key=True, autoincrement=False),
    Column("message", Text, nullable=False),
    Column("said_at_s", BigInteger, nullable=False),
)

foretold = Table(
    "fgpu_foretold",
    metadata,
    # No foreign key to the sessions, so that writes of one do not wait for the other. The first forecast of a start, and
    # the planned range before it was corrected by earlier starts.
    Column("session_id", BigInteger, primary_key=True, autoincrement=False),
    Column("told_at_s", BigInteger, nullable=False),
    Column("early_at_s", BigInteger, nullable=False),
    Column("middle_at_s", BigInteger, nullable=False),
    Column("late_at_s", BigInteger, nullable=False),
    Column("planned_early_at_s", BigInteger, nullable=False),
    Column("planned_middle_at_s", BigInteger, nullable=False),
    Column("planned_late_at_s", BigInteger, nullable=False),
)

audit = Table(
    "fgpu_audit",
    metadata,
    Column("id", Id, primary_key=True),
    Column("at_s", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("details", Text, nullable=False),
    Column("resource_group", Text),
    sqlite_autoincrement=True,
)

private_images = Table(
    "fgpu_private_images",
    metadata,
    Column("id", Id, primary_key=True),
    Column("owner", Text, nullable=False),
    # The name for users, and the reference for engines.
    Column("name", Text, nullable=False, unique=True),
    Column("reference", Text, nullable=False, unique=True),
    Column("state", Text, nullable=False),
    Column("message", Text),
    # The node of the engine that has it, and its id there.
    Column("node_id", Text, nullable=False),
    Column("image_id", Text),
    Column("size_bytes", BigInteger),
    # The session, its image, the catalogue's image under that, and a JSON object of what the catalogue says about it.
    Column("session_id", BigInteger, nullable=False),
    Column("made_from", Text, nullable=False),
    Column("base", Text, nullable=False),
    Column("facts", Text, nullable=False),
    Column("recipe", Text),
    # JSON arrays.
    Column("shared_users", Text, nullable=False),
    Column("shared_groups", Text, nullable=False),
    Column("server_kept", Boolean, nullable=False),
    Column("owners_alone", Boolean, nullable=False),
    Column("asked_by", Text, nullable=False),
    Column("asked_at_s", BigInteger, nullable=False),
    Column("made_at_s", BigInteger),
    sqlite_autoincrement=True,
)

# By the image's id on its engines, not by name: another image with the same name needs another answer.
image_answers = Table(
    "fgpu_image_answers",
    metadata,
    Column("image_id", Text, primary_key=True),
    Column("user_name", Text, primary_key=True),
    Column("accepted", Boolean, nullable=False),
    Column("answered_at_s", BigInteger, nullable=False),
)

meters = Table(
    "fgpu_meters",
    metadata,
    # No foreign key to the sessions, so that writes of one do not wait for the other.
    Column("session_id", Id, primary_key=True, autoincrement=False),
    Column("at_s", BigInteger, nullable=False),
    # The held millionths of a GPU at that time, and the limit of its GPU memory.
    Column("gpu_millionths", BigInteger, nullable=False),
    Column("limit_mib", BigInteger, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("covered_s", BigInteger, nullable=False),
    Column("peak_mib", BigInteger),
    Column("p95_mib", BigInteger),
    Column("sm_p95_percent", Integer),
    Column("energy_mj", BigInteger),
    Column("energy_estimated", Boolean, nullable=False),
    # A JSON object of the counts behind the percentiles, to continue from.
    Column("counts", Text, nullable=False),
)

events = Table(
    "fgpu_events",
    metadata,
    Column("id", Id, primary_key=True),
    Column("at_s", BigInteger, nullable=False),
    Column("session_id", BigInteger),
    Column("kind", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text),
    Column("reason", Text),
    Column("user_name", Text),
    sqlite_autoincrement=True,
)


def in_states(states: Collection[SessionState]) -> ColumnElement[bool]:
    """Return the condition with literal states: SQLite uses a partial index only for literals."""
    return sessions.c.state.in_([literal_column(f"'{state.value}'") for state in states])


is_live = in_states(LIVE)
is_serving = in_states(SERVING)

# Almost all sessions have ended. These two indexes contain only the few others.
Index("fgpu_sessions_live", sessions.c.id, sqlite_where=is_live, postgresql_where=is_live)
Index(
    "fgpu_sessions_serving",
    sessions.c.user_name,
    sessions.c.server_name,
    unique=True,
    sqlite_where=is_serving,
    postgresql_where=is_serving,
)
Index("fgpu_sessions_ended", sessions.c.ended_at_s)
Index("fgpu_sessions_user", sessions.c.user_name, sessions.c.id)
Index("fgpu_sessions_user_ended", sessions.c.user_name, sessions.c.ended_at_s)
# For the newest runs of a resource group, without scanning those of the other groups.
has_run = sessions.c.started_at_s.is_not(None)
Index(
    "fgpu_sessions_ran",
    sessions.c.resource_group,
    sessions.c.ended_at_s,
    sqlite_where=has_run,
    postgresql_where=has_run,
)
