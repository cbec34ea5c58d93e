"""Running sessions can be resized: what each held before, and the wishes."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("fgpu_sessions", sa.Column("sizes", sa.Text, nullable=False, server_default="[]"))
    op.create_table(
        "fgpu_resizes",
        sa.Column("session_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("fgpu_milli", sa.BigInteger, nullable=False),
        sa.Column("gpu_memory_mib", sa.BigInteger),
        sa.Column("compute_percent", sa.Integer),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("message", sa.Text),
        sa.Column("asked_by", sa.Text, nullable=False),
        sa.Column("asked_at_s", sa.BigInteger, nullable=False),
    )
