"""The first release. `fgpu_scheduler.store.migrations.upgrade` creates its tables."""

revision = "2026.11.28.4"
down_revision = None


def upgrade() -> None:
    """Change nothing: no database is older."""
