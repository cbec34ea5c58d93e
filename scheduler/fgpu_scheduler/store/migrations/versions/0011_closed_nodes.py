"""A node's cluster may let it take no more sessions."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    closed = sa.Column("closed", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("fgpu_nodes", closed)
