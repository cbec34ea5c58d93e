"""One GPU can be cordoned."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("fgpu_devices", sa.Column("cordon_reason", sa.Text))
