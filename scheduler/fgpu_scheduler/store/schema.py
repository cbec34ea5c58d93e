"""The tables.

Names of columns end in their units. Sessions have no foreign key to nodes or devices, so that ended sessions keep what
they held after their node is deleted. Meters and first forecasts have none to the sessions, so that writes of one do not
wait for the other. Some rows are unpacked in the order of their columns.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from fgpu_scheduler.core.lifecycle import LIVE, SERVING
from fgpu_scheduler.core.model import SessionState

metadata = sa.MetaData()

# SQLite generates ids only in a column declared INTEGER.
Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _key(kind: Any, *names: str) -> list[sa.Column[Any]]:
    """Return columns of the primary key with given values."""
    return [sa.Column(name, kind, primary_key=True, autoincrement=False) for name in names]


def _filled(kind: Any, *names: str, unique: bool | None = None) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False, unique=unique) for name in names]


def _optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind) for name in names]


meta = sa.Table(
    "fgpu_meta",
    metadata,
    *_key(sa.Integer, "id"),
    *_filled(sa.BigInteger, "version"),
    *_filled(sa.Text, "installation_id"),
    sa.CheckConstraint("id = 1", name="fgpu_meta_one_row"),
)
"""One row. Every write first adds 1 to its ``version``, which serialises writers on PostgreSQL."""

nodes = sa.Table(
    "fgpu_nodes",
    metadata,
    *_key(sa.Text, "id"),
    *_filled(sa.Text, "resource_group"),
    *_filled(sa.BigInteger, "cpu_milli", "memory_mib"),
    # Observed, or set by an administrator. Whether its cluster closed the node is a column of its own, so that neither
    # overwrites the other.
    *_filled(sa.Text, "state"),
    *_filled(sa.Boolean, "closed"),
)

devices = sa.Table(
    "fgpu_devices",
    metadata,
    *_key(sa.Text, "uuid"),
    sa.Column("node_id", sa.Text, sa.ForeignKey("fgpu_nodes.id", name="fgpu_devices_node"), nullable=False),
    *_filled(sa.Integer, "device_index"),
    *_filled(sa.Text, "model"),
    *_filled(sa.BigInteger, "memory_mib", "capacity_milli"),
    *_filled(sa.Boolean, "simulated"),
    # No longer configured, but held by a session: not offered.
    *_filled(sa.Boolean, "retired"),
    *_filled(sa.Integer, "max_shares"),
    # An administrator's reason for cordoning it; null: not cordoned.
    *_optional(sa.Text, "cordon_reason"),
)

sessions = sa.Table(
    "fgpu_sessions",
    metadata,
    sa.Column("id", Id, primary_key=True),
    # Not "user": in PostgreSQL the unquoted word is the database's own user.
    *_filled(sa.Text, "user_name", "server_name", "image", "resource_group", "account", "state"),
    # ``name``: the session's name for people. ``setup``: its row in ``fgpu_setups``, 0: none.
    *_filled(sa.Text, "name"),
    *_filled(sa.BigInteger, "setup"),
    *_filled(sa.BigInteger, "fgpu_milli", "cpu_milli", "memory_mib", "submitted_at_s"),
    # ``extended_s``: seconds that its owner added to the time limit.
    *_filled(sa.BigInteger, "extended_s"),
    *_filled(sa.BigInteger, "parked_mib"),
    *_filled(sa.Boolean, "held", "on_demand"),
    *_filled(sa.Integer, "attempt", "priority"),
    # JSON arrays: Hub groups, the nodes that refused it after placement, and what it held before each
    # resize and parking.
    *_filled(sa.Text, "groups", "refused", "sizes"),
    *_optional(sa.Text, "node_id", "wait_reason", "end_cause", "ends_cause", "message", "launched"),
    # ``park_refused``: why it was not parked when a person asked for it.
    *_optional(sa.Text, "park_refused"),
    # JSON arrays. ``gpu_models``: most preferred first; null: any. ``folders``: null: none is chosen.
    *_optional(sa.Text, "gpu_models", "folders"),
    *_optional(sa.BigInteger, "scheduled_at_s", "started_at_s", "ended_at_s", "queued_at_s", "promised_at_s"),
    *_optional(sa.BigInteger, "ends_at_s", "idle_since_s", "kept_until_s", "replaces", "place_of"),
    *_optional(sa.BigInteger, "parked_at_s", "park_asked_at_s", "wanted_at_s"),
    *_optional(sa.BigInteger, "gpu_memory_mib", "time_limit_s"),
    # ``asked_priority``: the requested priority, if an administrator changed it.
    *_optional(sa.Integer, "compute_percent", "asked_priority"),
    # AUTOINCREMENT: ids are never reused, even if the newest row is deleted, because they name containers.
    sqlite_autoincrement=True,
)

shares = sa.Table(
    "fgpu_shares",
    metadata,
    sa.Column(
        "session_id", Id, sa.ForeignKey("fgpu_sessions.id", name="fgpu_shares_session"), primary_key=True
    ),
    *_key(sa.Integer, "position"),
    *_filled(sa.Text, "device_uuid"),
    *_filled(sa.BigInteger, "fgpu_milli", "memory_mib"),
    *_filled(sa.Integer, "compute_percent"),
    *_filled(sa.Text, "mode"),
    # A share of memory only has no compute.
    sa.CheckConstraint(
        "fgpu_milli > 0 AND memory_mib > 0 AND compute_percent >= 0", name="fgpu_shares_amounts"
    ),
)

usage = sa.Table(
    "fgpu_usage",
    metadata,
    *_key(sa.Text, "user_name", "resource_group", "account"),
    # fGPU x 1000 x seconds of ended sessions, decayed to ``at_s``.
    *_filled(sa.Double, "fgpu_milli_s"),
    *_filled(sa.BigInteger, "at_s"),
)

quotas = sa.Table(
    "fgpu_quotas",
    metadata,
    # An empty group: all groups together.
    *_key(sa.Text, "scope", "name", "resource_group"),
    *_optional(sa.BigInteger, "max_fgpu_milli"),
    *_optional(sa.Integer, "max_sessions", "max_pending"),
    *_optional(sa.BigInteger, "max_lifetime_s", "guaranteed_milli"),
)

edits = sa.Table(
    "fgpu_edits",
    metadata,
    # See `EditKind` for the kinds. ``fields`` is a JSON object.
    *_key(sa.Text, "kind", "name"),
    *_filled(sa.Text, "fields", "changed_by"),
    *_filled(sa.BigInteger, "changed_at_s"),
)

resizes = sa.Table(
    "fgpu_resizes",
    metadata,
    # The last resize request of a session, and its result.
    *_key(sa.BigInteger, "session_id"),
    *_filled(sa.BigInteger, "fgpu_milli"),
    *_optional(sa.BigInteger, "gpu_memory_mib"),
    *_optional(sa.Integer, "compute_percent"),
    *_filled(sa.Text, "state"),
    *_optional(sa.Text, "message"),
    *_filled(sa.Text, "asked_by"),
    *_filled(sa.BigInteger, "asked_at_s"),
)

setups = sa.Table(
    "fgpu_setups",
    metadata,
    sa.Column("id", Id, primary_key=True),
    *_filled(sa.Text, "user_name"),
    # A JSON object of variables, with values that may be secrets, and the start script.
    *_filled(sa.Text, "variables", "script"),
    *_filled(sa.BigInteger, "used_at_s"),
    sqlite_autoincrement=True,
)

own_presets = sa.Table(
    "fgpu_own_presets",
    metadata,
    *_key(sa.Text, "user_name", "name"),
    # A JSON object of launch options; a setup by its id.
    *_filled(sa.Text, "options"),
    *_filled(sa.BigInteger, "made_at_s"),
)

end_messages = sa.Table(
    "fgpu_end_messages",
    metadata,
    # The message for the owner if the session ends by a user's wish, written before the Hub is asked to end it.
    *_key(sa.BigInteger, "session_id"),
    *_filled(sa.Text, "message"),
    *_filled(sa.BigInteger, "said_at_s"),
)

first_forecasts = sa.Table(
    "fgpu_first_forecasts",
    metadata,
    # The first forecast of a start, and the planned range before it was corrected by earlier starts.
    *_key(sa.BigInteger, "session_id"),
    *_filled(sa.BigInteger, "told_at_s", "early_at_s", "middle_at_s", "late_at_s"),
    *_filled(sa.BigInteger, "planned_early_at_s", "planned_middle_at_s", "planned_late_at_s"),
)

audit = sa.Table(
    "fgpu_audit",
    metadata,
    sa.Column("id", Id, primary_key=True),
    *_filled(sa.BigInteger, "at_s"),
    *_filled(sa.Text, "actor", "action", "target", "details"),
    *_optional(sa.Text, "resource_group"),
    sqlite_autoincrement=True,
)

private_images = sa.Table(
    "fgpu_private_images",
    metadata,
    sa.Column("id", Id, primary_key=True),
    # The name for users, and the reference for engines.
    *_filled(sa.Text, "name", "reference", unique=True),
    *_filled(sa.Text, "owner", "state", "asked_by"),
    # The node of the engine that has it, and its id there.
    *_filled(sa.Text, "node_id"),
    *_optional(sa.Text, "image_id"),
    # The session, its image, the catalogue's image under that, and a JSON object of what the catalogue says about it.
    *_filled(sa.BigInteger, "session_id"),
    *_filled(sa.Text, "made_from", "base", "facts"),
    # JSON arrays.
    *_filled(sa.Text, "shared_users", "shared_groups"),
    *_filled(sa.Boolean, "server_kept", "owners_alone"),
    *_filled(sa.BigInteger, "asked_at_s"),
    *_optional(sa.BigInteger, "made_at_s", "size_bytes"),
    *_optional(sa.Text, "message", "recipe"),
    sqlite_autoincrement=True,
)

# By the image's id on its engines, not by name: another image with the same name needs another answer.
image_answers = sa.Table(
    "fgpu_image_answers",
    metadata,
    *_key(sa.Text, "image_id", "user_name"),
    *_filled(sa.Boolean, "accepted"),
    *_filled(sa.BigInteger, "answered_at_s"),
)

meters = sa.Table(
    "fgpu_meters",
    metadata,
    *_key(Id, "session_id"),
    *_filled(sa.BigInteger, "at_s"),
    # The held millionths of a GPU at that time, and the limit of its GPU memory.
    *_filled(sa.BigInteger, "gpu_millionths", "limit_mib"),
    *_filled(sa.BigInteger, "samples", "covered_s"),
    *_optional(sa.BigInteger, "peak_mib", "p95_mib"),
    *_optional(sa.Integer, "sm_p95_percent"),
    *_optional(sa.BigInteger, "energy_mj"),
    *_filled(sa.Boolean, "energy_estimated"),
    # A JSON object of the counts behind the percentiles, to continue from.
    *_filled(sa.Text, "counts"),
)

events = sa.Table(
    "fgpu_events",
    metadata,
    sa.Column("id", Id, primary_key=True),
    *_filled(sa.BigInteger, "at_s"),
    *_optional(sa.BigInteger, "session_id"),
    *_filled(sa.Text, "kind"),
    *_optional(sa.Text, "from_state", "to_state", "reason", "user_name"),
    sqlite_autoincrement=True,
)


def in_states(states: Collection[SessionState]) -> sa.ColumnElement[bool]:
    """Return the condition with literal states: SQLite uses a partial index only for literals."""
    return sessions.c.state.in_([sa.literal_column(f"'{state.value}'") for state in states])


def _index(
    name: str, *columns: str, where: sa.ColumnElement[bool] | None = None, unique: bool = False
) -> None:
    found = [sessions.c[column] for column in columns]
    sa.Index(f"fgpu_sessions_{name}", *found, unique=unique, sqlite_where=where, postgresql_where=where)


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
