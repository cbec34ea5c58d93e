"""Alembic's entry point, which runs on the store's connection and in its transaction."""

from alembic import context

from fgpu_scheduler.store.migrations import VERSION_TABLE
from fgpu_scheduler.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    # Alembic assumes that SQLite has none. It does when the store sends BEGIN instead of the driver.
    transactional_ddl=True,
)

with context.begin_transaction():
    context.run_migrations()
