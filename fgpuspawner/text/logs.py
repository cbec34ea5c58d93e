"""A session's log for people: the last lines, without control characters and without secrets. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST_LINES = 1000
LINES_SHOWN = 200
LONGEST_LINE = 2000
MASK = "[masked]"
SHORTEST_SECRET = 4
"""Shorter values are words such as "1" and "yes", which stand everywhere."""

_NAME = r"(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|private[_-]?key|credential)[\w.-]{0,40}"
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'&,;]+)"
MASKED = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        # Names and passwords in addresses, then values of what is named like a secret, then well-known kinds of tokens.
        (r"(://)[^/\s@]+@", rf"\1{MASK}@"),
        (r"(authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?(?:bearer |token |basic )?)[^\s\"',;]+", rf"\1{MASK}"),
        (r"(\bbearer )[\w.~+/=-]{8,}", rf"\1{MASK}"),
        (rf"({_NAME}[\"']?\s{{0,4}}[=:]\s{{0,4}}){_VALUE}", rf"\1{MASK}"),
        (rf"((?<![\w-])--?[\w-]{{0,30}}{_NAME} ){_VALUE}", rf"\1{MASK}"),
        (r"\b(?:gh[pousr]_|github_pat_|hf_)\w{20,}|\b(?:glpat-|sk-|xox[abprs]-)[\w-]{10,}", MASK),
        (r"\bAKIA[0-9A-Z]{16}\b|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|\b[0-9a-f]{32}\b", MASK),
    )
)
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")


def shown_lines(text: bytes, *, most: int, secrets: Iterable[str] = ()) -> list[str]:
    """Return the last lines of a log. ``secrets`` are values that are masked wherever they stand."""
    whole = text.decode("utf-8", "replace")
    for secret in sorted((s for s in secrets if len(s) >= SHORTEST_SECRET), key=len, reverse=True):
        whole = whole.replace(secret, MASK)
    # A progress bar writes over its own line: the last of it counts.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in ESCAPES.sub("", whole).split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    # Masked before it is cut: half a password is a secret, too.
    return [masked(_plain(line[: 2 * LONGEST_LINE]))[:LONGEST_LINE] for line in lines[-most:]]


def masked(line: str) -> str:
    """Return a line without what looks like a password or a token."""
    for pattern, replacement in MASKED:
        line = pattern.sub(replacement, line)
    return line


def as_text(line: str) -> str:
    """Return a line without terminal control characters, and without what looks like a password."""
    return masked(_plain(line[:LONGEST_LINE]))


def _plain(line: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line.expandtabs())
