"""What administrators change by page: quotas, priorities, the banner, words at an end; and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("fgpu_sessions", sa.Column("asked_priority", sa.Integer))
    op.add_column("fgpu_sessions", sa.Column("queued_at_s", sa.BigInteger))
    op.create_table(
        "fgpu_quota_edits",
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("resource_group", sa.Text, primary_key=True),
        sa.Column("removed", sa.Boolean, nullable=False),
        sa.Column("max_fgpu_milli", sa.BigInteger),
        sa.Column("max_sessions", sa.Integer),
        sa.Column("max_pending", sa.Integer),
        sa.Column("max_lifetime_s", sa.BigInteger),
        sa.Column("changed_by", sa.Text, nullable=False),
        sa.Column("changed_at_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "fgpu_banner",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("level", sa.Text, nullable=False),
        sa.Column("until_at_s", sa.BigInteger),
        sa.Column("set_by", sa.Text, nullable=False),
        sa.Column("set_at_s", sa.BigInteger, nullable=False),
        sa.CheckConstraint("id = 1", name="fgpu_banner_one_row"),
    )
    op.create_table(
        "fgpu_end_messages",
        sa.Column("session_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("said_at_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "fgpu_audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("at_s", sa.BigInteger, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("details", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
