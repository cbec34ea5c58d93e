"""The tables of the first release. Do not change this file after it: changes of the tables are new revisions."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "2026.11"
down_revision = None

# SQLite generates ids only in a column declared INTEGER.
ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
LIVE = "state IN ('PENDING', 'SCHEDULED', 'PREPARING', 'PULLING', 'RUNNING', 'TERMINATING')"
SERVING = "state IN ('PENDING', 'SCHEDULED', 'PREPARING', 'PULLING', 'RUNNING')"


def keys(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, primary_key=True, autoincrement=False) for name in names]


def filled(kind: Any, *names: str, **how: Any) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=False, **how) for name in names]


def optional(kind: Any, *names: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind) for name in names]


def index(name: str, *columns: str, where: str | None = None, **how: Any) -> None:
    found = None if where is None else sa.text(where)
    op.create_index(name, "fgpu_sessions", list(columns), sqlite_where=found, postgresql_where=found, **how)


def upgrade() -> None:
    op.create_table(
        "fgpu_meta",
        *keys(sa.Integer, "id"),
        *filled(sa.BigInteger, "version"),
        *filled(sa.Text, "installation_id"),
        sa.CheckConstraint("id = 1", name="fgpu_meta_one_row"),
    )
    op.create_table(
        "fgpu_nodes",
        *keys(sa.Text, "id"),
        *filled(sa.BigInteger, "cpu_milli", "memory_mib"),
        *filled(sa.Boolean, "closed"),
        *filled(sa.Text, "resource_group", "state"),
    )
    op.create_table(
        "fgpu_devices",
        sa.Column(
            "node_id", sa.Text, sa.ForeignKey("fgpu_nodes.id", name="fgpu_devices_node"), nullable=False
        ),
        *keys(sa.Text, "uuid"),
        *filled(sa.BigInteger, "memory_mib", "capacity_milli"),
        *filled(sa.Boolean, "simulated", "retired"),
        *filled(sa.Integer, "device_index", "max_shares"),
        *filled(sa.Text, "model"),
        *optional(sa.Text, "cordon_reason"),
    )
    op.create_table(
        "fgpu_sessions",
        sa.Column("id", ID, primary_key=True),
        *filled(sa.BigInteger, "fgpu_milli", "cpu_milli", "memory_mib", "submitted_at_s", "extended_s"),
        *filled(sa.Boolean, "held"),
        *filled(sa.Integer, "attempt", "priority"),
        *filled(sa.Text, "user_name", "server_name", "image", "resource_group", "state", "groups"),
        *filled(sa.Text, "refused", "sizes"),
        *optional(sa.BigInteger, "scheduled_at_s", "started_at_s", "ended_at_s", "replaces"),
        *optional(sa.BigInteger, "gpu_memory_mib", "time_limit_s", "promised_at_s", "ends_at_s"),
        *optional(sa.BigInteger, "idle_since_s", "kept_until_s", "place_of", "queued_at_s"),
        *optional(sa.Integer, "compute_percent", "asked_priority"),
        *optional(sa.Text, "node_id", "wait_reason", "end_cause", "message", "launched", "gpu_models"),
        *optional(sa.Text, "ends_cause"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "fgpu_shares",
        sa.Column(
            "session_id", ID, sa.ForeignKey("fgpu_sessions.id", name="fgpu_shares_session"), primary_key=True
        ),
        *keys(sa.Integer, "position"),
        *filled(sa.BigInteger, "fgpu_milli", "memory_mib"),
        *filled(sa.Integer, "compute_percent"),
        *filled(sa.Text, "device_uuid", "mode"),
        sa.CheckConstraint(
            "fgpu_milli > 0 AND memory_mib > 0 AND compute_percent >= 0", name="fgpu_shares_amounts"
        ),
    )
    op.create_table(
        "fgpu_usage",
        *keys(sa.Text, "user_name", "resource_group"),
        *filled(sa.BigInteger, "at_s"),
        *filled(sa.Double, "fgpu_milli_s"),
    )
    op.create_table(
        "fgpu_quotas",
        *keys(sa.Text, "scope", "name", "resource_group"),
        *optional(sa.BigInteger, "max_fgpu_milli", "max_lifetime_s"),
        *optional(sa.Integer, "max_sessions", "max_pending"),
    )
    op.create_table(
        "fgpu_edits",
        *keys(sa.Text, "kind", "name"),
        *filled(sa.BigInteger, "changed_at_s"),
        *filled(sa.Text, "fields", "changed_by"),
    )
    op.create_table(
        "fgpu_resizes",
        *keys(sa.BigInteger, "session_id"),
        *filled(sa.BigInteger, "fgpu_milli", "asked_at_s"),
        *filled(sa.Text, "state", "asked_by"),
        *optional(sa.BigInteger, "gpu_memory_mib"),
        *optional(sa.Integer, "compute_percent"),
        *optional(sa.Text, "message"),
    )
    op.create_table(
        "fgpu_end_messages",
        *keys(sa.BigInteger, "session_id"),
        *filled(sa.BigInteger, "said_at_s"),
        *filled(sa.Text, "message"),
    )
    op.create_table(
        "fgpu_foretold",
        *keys(sa.BigInteger, "session_id"),
        *filled(sa.BigInteger, "told_at_s", "early_at_s", "middle_at_s", "late_at_s", "planned_early_at_s"),
        *filled(sa.BigInteger, "planned_middle_at_s", "planned_late_at_s"),
    )
    op.create_table(
        "fgpu_audit",
        sa.Column("id", ID, primary_key=True),
        *filled(sa.BigInteger, "at_s"),
        *filled(sa.Text, "actor", "action", "target", "details"),
        *optional(sa.Text, "resource_group"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "fgpu_private_images",
        sa.Column("id", ID, primary_key=True),
        *filled(sa.BigInteger, "session_id", "asked_at_s"),
        *filled(sa.Boolean, "server_kept", "owners_alone"),
        *filled(sa.Text, "owner", "state", "node_id", "made_from", "base", "facts", "shared_users"),
        *filled(sa.Text, "shared_groups", "asked_by"),
        *filled(sa.Text, "name", "reference", unique=True),
        *optional(sa.BigInteger, "size_bytes", "made_at_s"),
        *optional(sa.Text, "message", "image_id", "recipe"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "fgpu_image_answers",
        *keys(sa.Text, "image_id", "user_name"),
        *filled(sa.BigInteger, "answered_at_s"),
        *filled(sa.Boolean, "accepted"),
    )
    op.create_table(
        "fgpu_meters",
        *keys(ID, "session_id"),
        *filled(sa.BigInteger, "at_s", "gpu_millionths", "limit_mib", "samples", "covered_s"),
        *filled(sa.Boolean, "energy_estimated"),
        *filled(sa.Text, "counts"),
        *optional(sa.BigInteger, "peak_mib", "p95_mib", "energy_mj"),
        *optional(sa.Integer, "sm_p95_percent"),
    )
    op.create_table(
        "fgpu_events",
        sa.Column("id", ID, primary_key=True),
        *filled(sa.BigInteger, "at_s"),
        *filled(sa.Text, "kind"),
        *optional(sa.BigInteger, "session_id"),
        *optional(sa.Text, "from_state", "to_state", "reason", "user_name"),
        sqlite_autoincrement=True,
    )
    index("fgpu_sessions_live", "id", where=LIVE)
    index("fgpu_sessions_serving", "user_name", "server_name", where=SERVING, unique=True)
    index("fgpu_sessions_ended", "ended_at_s")
    index("fgpu_sessions_user", "user_name", "id")
    index("fgpu_sessions_user_ended", "user_name", "ended_at_s")
    index("fgpu_sessions_ran", "resource_group", "ended_at_s", where="started_at_s IS NOT NULL")
