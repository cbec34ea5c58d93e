"""An index for the lengths of the sessions that a resource group ran last, however rare those are."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    ran = sa.text("started_at_s IS NOT NULL")
    op.create_index(
        "fgpu_sessions_ran",
        "fgpu_sessions",
        ["resource_group", "ended_at_s"],
        sqlite_where=ran,
        postgresql_where=ran,
    )
