"""Alembic's entry; it runs on the connection, and in the transaction, that the store hands over."""

from alembic import context

from fgpu_scheduler.store.migrations import VERSION_TABLE
from fgpu_scheduler.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    # Alembic thinks that SQLite has none; it does, once BEGIN is our own and not the driver's.
    transactional_ddl=True,
)

with context.begin_transaction():
    context.run_migrations()
