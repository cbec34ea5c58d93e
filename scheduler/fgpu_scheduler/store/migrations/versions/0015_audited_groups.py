"""The audit log knows whose resource group a line is. Of older lines nobody knows: these have none."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("fgpu_audit", sa.Column("resource_group", sa.Text))
