"""Statements as the driver takes them, built once: of a small write SQLAlchemy's way to one is most of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, CursorResult, Delete, Dialect, Insert, Select, Update

Row = Mapping[str, Any]


class Prepared:
    """A statement and the names of its values. Values go to the driver as they are: numbers, texts, booleans, None."""

    def __init__(self, statement: Insert | Update | Delete | Select[Any], names: Iterable[str] = ()) -> None:
        """Take a statement; ``names`` are the columns that an INSERT or an UPDATE sets."""
        self._statement = statement
        self._names = tuple(names)
        self._compiled: dict[str, tuple[str, Callable[[Row], Any]]] = {}

    def one(self, connection: Connection, row: Row) -> CursorResult[Any]:
        """Run it once."""
        sql, taken = self._compiled_for(connection.dialect)
        return connection.exec_driver_sql(sql, taken(row))

    def all(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Run it for each of the rows, or not at all."""
        if len(rows) == 1:
            self.one(connection, rows[0])
        elif rows:
            sql, taken = self._compiled_for(connection.dialect)
            connection.exec_driver_sql(sql, [taken(row) for row in rows])

    def _compiled_for(self, dialect: Dialect) -> tuple[str, Callable[[Row], Any]]:
        found = self._compiled.get(dialect.name)
        if found is None:
            # None: those that the statement itself names.
            made = self._statement.compile(dialect=dialect, column_keys=self._names or None)
            found = self._compiled[dialect.name] = str(made), _value_getter(made.positiontup)
        return found


def _value_getter(order: Sequence[str] | None) -> Callable[[Row], Any]:
    """Return what takes the values out of a row in the order of the statement's marks; None: they have names."""
    if order is None:
        return dict
    if len(order) > 1:
        return itemgetter(*order)
    return lambda row: tuple(row[name] for name in order)
