"""The nodes that a session was placed on, and that its engine did not give it."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("fgpu_sessions", sa.Column("refused", sa.Text, nullable=False, server_default="[]"))
