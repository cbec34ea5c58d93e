"""Several GPU models can be asked for, in order of liking: a JSON array in place of one name."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    # Not through a new column: SQLite before 3.35 drops none.
    op.execute("ALTER TABLE fgpu_sessions RENAME COLUMN gpu_model TO gpu_models")
    sessions = sa.table("fgpu_sessions", sa.column("gpu_models", sa.Text))
    connection, models = op.get_bind(), sessions.c.gpu_models
    known = connection.execute(sa.select(models).where(models.is_not(None)).distinct()).scalars().all()
    # The longest first: what is written is longer than all that is still to be found, even where a name looks like it.
    for model in sorted(known, key=len, reverse=True):
        connection.execute(sa.update(sessions).where(models == model).values(gpu_models=json.dumps([model])))
