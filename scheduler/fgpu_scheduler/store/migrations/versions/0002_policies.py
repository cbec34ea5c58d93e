"""Explicit GPU memory and compute, time limits, priorities, promises, warnings; usage and quotas."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

SHARES = "session_id, position, device_uuid, fgpu_milli, memory_mib, compute_percent, mode"


def _id() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for column in (
        sa.Column("gpu_memory_mib", sa.BigInteger),
        sa.Column("compute_percent", sa.Integer),
        sa.Column("gpu_model", sa.Text),
        sa.Column("time_limit_s", sa.BigInteger),
        sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        sa.Column("groups", sa.Text, nullable=False, server_default="[]"),
        sa.Column("promised_at_s", sa.BigInteger),
        sa.Column("ends_at_s", sa.BigInteger),
        sa.Column("ends_cause", sa.Text),
        sa.Column("idle_since_s", sa.BigInteger),
        sa.Column("kept_until_s", sa.BigInteger),
        sa.Column("place_of", sa.BigInteger),
    ):
        op.add_column("fgpu_sessions", column)
    op.add_column("fgpu_devices", sa.Column("max_shares", sa.Integer, nullable=False, server_default="20"))
    op.create_table(
        "fgpu_usage",
        sa.Column("user_name", sa.Text, primary_key=True),
        sa.Column("resource_group", sa.Text, primary_key=True),
        sa.Column("fgpu_milli_s", sa.Double, nullable=False),
        sa.Column("at_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "fgpu_quotas",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("resource_group", sa.Text, primary_key=True),
        sa.Column("max_fgpu_milli", sa.BigInteger),
        sa.Column("max_sessions", sa.Integer),
        sa.Column("max_pending", sa.Integer),
        sa.Column("max_lifetime_s", sa.BigInteger),
    )
    _allow_shares_without_compute()


def _allow_shares_without_compute() -> None:
    amounts = sa.CheckConstraint(
        "fgpu_milli > 0 AND memory_mib > 0 AND compute_percent >= 0", name="fgpu_shares_amounts"
    )
    if op.get_context().dialect.name != "sqlite":
        op.drop_constraint("fgpu_shares_amounts", "fgpu_shares", type_="check")
        op.create_check_constraint("fgpu_shares_amounts", "fgpu_shares", amounts.sqltext)
        return
    # SQLite changes no constraint of a table: the table is made anew.
    op.rename_table("fgpu_shares", "fgpu_shares_before")
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
        amounts,
    )
    op.execute(f"INSERT INTO fgpu_shares ({SHARES}) SELECT {SHARES} FROM fgpu_shares_before")
    op.drop_table("fgpu_shares_before")
