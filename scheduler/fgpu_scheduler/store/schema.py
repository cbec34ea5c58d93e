"""The tables.

Columns say their unit as the values do. No foreign key leads to nodes or devices from a session: what
an ended session held stays on record after its node is gone.
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

# SQLite numbers rows by itself only in a column that is declared INTEGER.
Id = BigInteger().with_variant(Integer(), "sqlite")

meta = Table(
    "fgpu_meta",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("installation_id", Text, nullable=False),
    CheckConstraint("id = 1", name="fgpu_meta_one_row"),
)
"""One row. Every write adds 1 to its ``version``, first of all: on PostgreSQL that serialises writers."""

nodes = Table(
    "fgpu_nodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("resource_group", Text, nullable=False),
    Column("cpu_milli", BigInteger, nullable=False),
    Column("memory_mib", BigInteger, nullable=False),
    # What is found by looking, and what administrators said. What its cluster says is beside it, so that neither undoes
    # the other.
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
    # No longer configured, but a session holds a share: kept on record, and not offered.
    Column("retired", Boolean, nullable=False),
    Column("max_shares", Integer, nullable=False),
    # Why it is cordoned, in an administrator's words; null where it is not.
    Column("cordon_reason", Text),
)

sessions = Table(
    "fgpu_sessions",
    metadata,
    Column("id", Id, primary_key=True),
    # Not "user": on PostgreSQL that word, unquoted, is the database's own user.
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
    # A JSON array, the most liked first; null: any.
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
    # Where an administrator has given it another priority: the one that was asked for.
    Column("asked_priority", Integer),
    Column("queued_at_s", BigInteger),
    # What its owner has added to its time limit.
    Column("extended_s", BigInteger, nullable=False),
    # A JSON array of the nodes that it was placed on and not given.
    Column("refused", Text, nullable=False),
    # A JSON array of what it held before it was resized.
    Column("sizes", Text, nullable=False),
    # Ids are never reused, even after the newest row were deleted: they name containers.
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
    # Shares of memory only have no compute.
    CheckConstraint("fgpu_milli > 0 AND memory_mib > 0 AND compute_percent >= 0", name="fgpu_shares_amounts"),
)

usage = Table(
    "fgpu_usage",
    metadata,
    Column("user_name", Text, primary_key=True),
    Column("resource_group", Text, primary_key=True),
    # fGPU x 1000 x seconds of ended sessions, decayed to the instant beside it.
    Column("fgpu_milli_s", Double, nullable=False),
    Column("at_s", BigInteger, nullable=False),
)

quotas = Table(
    "fgpu_quotas",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    # Empty: of all together.
    Column("resource_group", Text, primary_key=True),
    Column("max_fgpu_milli", BigInteger),
    Column("max_sessions", Integer),
    Column("max_pending", Integer),
    Column("max_lifetime_s", BigInteger),
)

edits = Table(
    "fgpu_edits",
    metadata,
    # What administrators changed: see `EditKind` for the kinds. ``fields`` is a JSON object.
    Column("kind", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("fields", Text, nullable=False),
    Column("changed_by", Text, nullable=False),
    Column("changed_at_s", BigInteger, nullable=False),
)

resizes = Table(
    "fgpu_resizes",
    metadata,
    # The last wish for a session's slice, and what became of it.
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
    # What its owner is told, should the session be ended by a user's wish: written before the Hub is asked.
    Column("session_id", BigInteger, primary_key=True, autoincrement=False),
    Column("message", Text, nullable=False),
    Column("said_at_s", BigInteger, nullable=False),
)

foretold = Table(
    "fgpu_foretold",
    metadata,
    # No key to the sessions: a row is written beside them, and never in their way. What was told of a start first of all,
    # and the range that was planned before earlier starts had stretched it.
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
    # As it is asked for and shown, and as the engines know it.
    Column("name", Text, nullable=False, unique=True),
    Column("reference", Text, nullable=False, unique=True),
    Column("state", Text, nullable=False),
    Column("message", Text),
    # Which engine has it, and what it is there.
    Column("node_id", Text, nullable=False),
    Column("image_id", Text),
    Column("size_bytes", BigInteger),
    # The session, what that ran, and the image of the catalogue under it, with a JSON object of what that was then.
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

# By what the image is on its engines, whatever its name: of another one with its name the user is asked anew.
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
    # No key to the sessions: a row is written beside them, and never in their way.
    Column("session_id", Id, primary_key=True, autoincrement=False),
    Column("at_s", BigInteger, nullable=False),
    # Thousandths of a GPU that it holds, and its limit: what a device was worth then.
    Column("gpu_millionths", BigInteger, nullable=False),
    Column("limit_mib", BigInteger, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("covered_s", BigInteger, nullable=False),
    Column("peak_mib", BigInteger),
    Column("p95_mib", BigInteger),
    Column("sm_p95_percent", Integer),
    Column("energy_mj", BigInteger),
    Column("energy_estimated", Boolean, nullable=False),
    # A JSON object: what the percentiles are counted from, to go on with.
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
    """Return the condition with its words in the SQL: SQLite matches a partial index only so."""
    return sessions.c.state.in_([literal_column(f"'{state.value}'") for state in states])


is_live = in_states(LIVE)
is_serving = in_states(SERVING)

# Almost every session has ended. These two hold the few others, whatever the table grows to.
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
# For the lengths of what a resource group ran last: of a rare one without a look at all the others.
has_run = sessions.c.started_at_s.is_not(None)
Index(
    "fgpu_sessions_ran",
    sessions.c.resource_group,
    sessions.c.ended_at_s,
    sqlite_where=has_run,
    postgresql_where=has_run,
)
