"""Images: what administrators changed of the catalogue, and private images."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "fgpu_image_edits",
        sa.Column("slug", sa.Text, primary_key=True),
        sa.Column("entry", sa.Text),
        sa.Column("changes", sa.Text, nullable=False, server_default="{}"),
        sa.Column("position", sa.Integer),
        sa.Column("changed_by", sa.Text, nullable=False),
        sa.Column("changed_at_s", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "fgpu_private_images",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("reference", sa.Text, nullable=False, unique=True),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("message", sa.Text),
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("image_id", sa.Text),
        sa.Column("size_bytes", sa.BigInteger),
        sa.Column("session_id", sa.BigInteger, nullable=False),
        sa.Column("made_from", sa.Text, nullable=False),
        sa.Column("base", sa.Text, nullable=False),
        sa.Column("facts", sa.Text, nullable=False, server_default="{}"),
        sa.Column("recipe", sa.Text),
        sa.Column("shared_users", sa.Text, nullable=False, server_default="[]"),
        sa.Column("shared_groups", sa.Text, nullable=False, server_default="[]"),
        sa.Column("asked_by", sa.Text, nullable=False),
        sa.Column("asked_at_s", sa.BigInteger, nullable=False),
        sa.Column("made_at_s", sa.BigInteger),
        sqlite_autoincrement=True,
    )
