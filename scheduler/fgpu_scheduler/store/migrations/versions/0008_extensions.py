"""By how much the owner of a session has extended its time limit."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    extended = sa.Column("extended_s", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("fgpu_sessions", extended)
