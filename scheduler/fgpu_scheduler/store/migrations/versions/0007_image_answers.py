"""Whose image somebody has accepted, and what is known of how a private image was made."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    # Of images that were made before nothing is known.
    op.add_column("fgpu_private_images", sa.Column("server_kept", sa.Boolean))
    op.add_column("fgpu_private_images", sa.Column("owners_alone", sa.Boolean))
    op.create_table(
        "fgpu_image_answers",
        sa.Column("image_id", sa.Text, primary_key=True),
        sa.Column("user_name", sa.Text, primary_key=True),
        sa.Column("accepted", sa.Boolean, nullable=False),
        sa.Column("answered_at_s", sa.BigInteger, nullable=False),
    )
