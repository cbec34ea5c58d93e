"""What was told of each start, to be held against the start."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

INSTANTS = ("told_at_s", "early_at_s", "middle_at_s", "late_at_s")
PLANNED = ("planned_early_at_s", "planned_middle_at_s", "planned_late_at_s")


def upgrade() -> None:
    op.create_table(
        "fgpu_foretold",
        sa.Column("session_id", sa.BigInteger, primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in (*INSTANTS, *PLANNED)),
    )
