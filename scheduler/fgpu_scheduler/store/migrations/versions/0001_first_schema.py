"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

LIVE = "state IN ('PENDING', 'SCHEDULED', 'PREPARING', 'PULLING', 'RUNNING', 'TERMINATING')"
SERVING = "state IN ('PENDING', 'SCHEDULED', 'PREPARING', 'PULLING', 'RUNNING')"


def _id() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "fgpu_meta",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("installation_id", sa.Text, nullable=False),
        sa.CheckConstraint("id = 1", name="fgpu_meta_one_row"),
    )
    op.create_table(
        "fgpu_nodes",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("resource_group", sa.Text, nullable=False),
        sa.Column("cpu_milli", sa.BigInteger, nullable=False),
        sa.Column("memory_mib", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
    )
    op.create_table(
        "fgpu_devices",
        sa.Column("uuid", sa.Text, primary_key=True),
        sa.Column(
            "node_id", sa.Text, sa.ForeignKey("fgpu_nodes.id", name="fgpu_devices_node"), nullable=False
        ),
        sa.Column("device_index", sa.Integer, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("memory_mib", sa.BigInteger, nullable=False),
        sa.Column("capacity_milli", sa.BigInteger, nullable=False),
        sa.Column("simulated", sa.Boolean, nullable=False),
        sa.Column("retired", sa.Boolean, nullable=False),
    )
    op.create_table(
        "fgpu_sessions",
        sa.Column("id", _id(), primary_key=True),
        sa.Column("user_name", sa.Text, nullable=False),
        sa.Column("server_name", sa.Text, nullable=False),
        sa.Column("image", sa.Text, nullable=False),
        sa.Column("resource_group", sa.Text, nullable=False),
        sa.Column("fgpu_milli", sa.BigInteger, nullable=False),
        sa.Column("cpu_milli", sa.BigInteger, nullable=False),
        sa.Column("memory_mib", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("submitted_at_s", sa.BigInteger, nullable=False),
        sa.Column("held", sa.Boolean, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("node_id", sa.Text),
        sa.Column("wait_reason", sa.Text),
        sa.Column("scheduled_at_s", sa.BigInteger),
        sa.Column("started_at_s", sa.BigInteger),
        sa.Column("ended_at_s", sa.BigInteger),
        sa.Column("end_cause", sa.Text),
        sa.Column("message", sa.Text),
        sa.Column("launched", sa.Text),
        sa.Column("replaces", sa.BigInteger),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "fgpu_sessions_live",
        "fgpu_sessions",
        ["id"],
        sqlite_where=sa.text(LIVE),
        postgresql_where=sa.text(LIVE),
    )
    op.create_index(
        "fgpu_sessions_serving",
        "fgpu_sessions",
        ["user_name", "server_name"],
        unique=True,
        sqlite_where=sa.text(SERVING),
        postgresql_where=sa.text(SERVING),
    )
    op.create_index("fgpu_sessions_ended", "fgpu_sessions", ["ended_at_s"])
    op.create_index("fgpu_sessions_user_ended", "fgpu_sessions", ["user_name", "ended_at_s"])
    op.create_table(
        "fgpu_shares",
        sa.Column(
            "session_id",
            _id(),
            sa.ForeignKey("fgpu_sessions.id", name="fgpu_shares_session"),
            primary_key=True,
        ),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("device_uuid", sa.Text, nullable=False),
        sa.Column("fgpu_milli", sa.BigInteger, nullable=False),
        sa.Column("memory_mib", sa.BigInteger, nullable=False),
        sa.Column("compute_percent", sa.Integer, nullable=False),
        sa.Column("mode", sa.Text, nullable=False),
        sa.CheckConstraint(
            "fgpu_milli > 0 AND memory_mib > 0 AND compute_percent > 0", name="fgpu_shares_amounts"
        ),
    )
    op.create_table(
        "fgpu_events",
        sa.Column("id", _id(), primary_key=True),
        sa.Column("at_s", sa.BigInteger, nullable=False),
        sa.Column("session_id", sa.BigInteger),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("from_state", sa.Text),
        sa.Column("to_state", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("user_name", sa.Text),
        sqlite_autoincrement=True,
    )
