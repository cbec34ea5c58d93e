"""Tables of the command line. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def table(heading: Sequence[str], rows: Sequence[Sequence[object]], *, right_from: int = 99) -> list[str]:
    """Return the lines of a table; columns from ``right_from`` on are flush right."""
    columns = list(zip(heading, *rows, strict=True))
    for n, column in enumerate(columns):
        texts = [str(cell) for cell in column]
        width = max(map(len, texts))
        columns[n] = tuple(text.ljust(width) if n < right_from else text.rjust(width) for text in texts)
    return ["  ".join(map(str, row)).rstrip() for row in zip(*columns, strict=True)]


def printable(text: str) -> str:
    """Return a user-chosen name without control characters, which could command the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
