"""The meter: what each session held and used of its GPUs; and an index for the history of one user."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "fgpu_meters",
        sa.Column(
            "session_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("at_s", sa.BigInteger, nullable=False),
        sa.Column("gpu_millionths", sa.BigInteger, nullable=False),
        sa.Column("limit_mib", sa.BigInteger, nullable=False),
        sa.Column("samples", sa.BigInteger, nullable=False),
        sa.Column("covered_s", sa.BigInteger, nullable=False),
        sa.Column("peak_mib", sa.BigInteger),
        sa.Column("p95_mib", sa.BigInteger),
        sa.Column("sm_p95_percent", sa.Integer),
        sa.Column("energy_mj", sa.BigInteger),
        sa.Column("energy_estimated", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("counts", sa.Text, nullable=False, server_default="{}"),
    )
    op.create_index("fgpu_sessions_user", "fgpu_sessions", ["user_name", "id"])
