"""Statements compiled once for the driver: compiling is most of the time of a small write in SQLAlchemy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, CursorResult, Delete, Dialect, Insert, Select, Update

Row = Mapping[str, Any]


class Prepared:
    """A compiled statement. Values go to the driver unchanged: numbers, texts, booleans, None."""

    def __init__(self, statement: Insert | Update | Delete | Select[Any], names: Iterable[str] = ()) -> None:
        """``names`` are the columns that an INSERT or UPDATE sets."""
        self._statement = statement
        self._names = tuple(names)
        self._compiled: dict[str, tuple[str, Callable[[Row], Any]]] = {}

    def one(self, connection: Connection, row: Row) -> CursorResult[Any]:
        """Run the statement for one row."""
        sql, taken = self._compiled_for(connection.dialect)
        return connection.exec_driver_sql(sql, taken(row))

    def all(self, connection: Connection, rows: Sequence[Row]) -> None:
        """Run the statement for each of the rows."""
        if len(rows) == 1:
            self.one(connection, rows[0])
        elif rows:
            sql, taken = self._compiled_for(connection.dialect)
            connection.exec_driver_sql(sql, [taken(row) for row in rows])

    def _compiled_for(self, dialect: Dialect) -> tuple[str, Callable[[Row], Any]]:
        found = self._compiled.get(dialect.name)
        if found is None:
            # None: the columns in the statement itself.
            made = self._statement.compile(dialect=dialect, column_keys=self._names or None)
            found = self._compiled[dialect.name] = str(made), _value_getter(made.positiontup)
        return found


def _value_getter(order: Sequence[str] | None) -> Callable[[Row], Any]:
    """Return a function from a row to the values in the order of the placeholders; None: placeholders have names."""
    if order is None:
        return dict
    if len(order) > 1:
        return itemgetter(*order)
    return lambda row: tuple(row[name] for name in order)
