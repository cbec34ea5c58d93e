"""One value of an image's entry: what may be written, and the words for what may not."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from fgpu_scheduler import BadAmount, parse_milli

TEXT_MAX_LENGTH = 200
LIST_MAX_LENGTH = 1000
LARGEST_MIB = 10**9


class BadEntry(Exception):
    """What is wrong at a key of an entry, given with the keys of the tables that it is in."""

    def __init__(self, path: tuple[str, ...], problem: str) -> None:
        super().__init__(problem)
        self.path = path

    def __str__(self) -> str:
        # Keys are quoted only where TOML asks for quotes.
        keys = (key if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", key) else shown(key) for key in self.path)
        return f"{'.'.join(keys)}: {self.args[0]}"


class Values:
    """The values of one table, read by key. What is wrong raises `BadEntry`."""

    def __init__(self, table: Mapping[str, object], *, inside: tuple[str, ...] = ()) -> None:
        self._table = table
        self._inside = inside

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Refuse what is at this key."""
        raise BadEntry((*self._inside, key), problem)

    def check_keys(self, known: Iterable[str]) -> None:
        """Refuse a key that there is not."""
        keys = list(known)
        for key in self._table:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(keys)}"
                self.refuse(key, f"unknown key; {hint}")

    def _get(self, key: str, kinds: type | tuple[type, ...], wanted: str, fallback: Any) -> Any:
        # A truth value is a number in Python, and none here.
        value = self._table.get(key, fallback)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            self.refuse(key, f"{shown(value)} is {_kind(value)}; write {wanted}")
        return value

    def text(
        self,
        key: str,
        pattern: re.Pattern[str] | None = None,
        wanted: str = "a text",
        *,
        fallback: str | None = None,
        max_length: int = TEXT_MAX_LENGTH,
    ) -> str:
        """Return a text; without a fallback the key must be there and say something."""
        if key not in self._table and fallback is None:
            self.refuse(key, f"missing; write {wanted}")
        value: str = self._get(key, str, wanted, fallback)
        if len(value) > max_length:
            self.refuse(key, f"{len(value)} characters; at most {max_length} are allowed")
        if not value.isprintable():
            self.refuse(key, f"{shown(value)} has a line break or control character; remove it")
        if fallback is None and not value.strip():
            self.refuse(key, f"empty; write {wanted}")
        if pattern is not None and value != fallback and not pattern.fullmatch(value):
            self.refuse(key, f"{shown(value)} cannot be used; write {wanted}")
        return value

    def flag(self, key: str, *, fallback: bool = False) -> bool:
        """Return a truth value."""
        return bool(self._get(key, bool, "true or false", fallback))

    def names(self, key: str) -> tuple[str, ...]:
        """Return the names in a list. An empty list is refused, since its meaning would be a guess."""
        found = self._list(key, '["lab"]', "leave the key out to allow everybody, or name somebody")
        for name in found:
            if not name.strip() or not name.isprintable():
                self.refuse(key, f"{shown(name)} is no name; remove it")
        return found

    def words(self, key: str, pattern: re.Pattern[str], wanted: str, example: str) -> tuple[str, ...]:
        """Return the texts in a list, each of this pattern, none twice."""
        found = self._list(key, example, "leave the key out, or list something")
        for number, word in enumerate(found):
            if not pattern.fullmatch(word):
                self.refuse(key, f"{shown(word)} cannot be used; write {wanted}")
            if word in found[:number]:
                self.refuse(key, f"{shown(word)} is there twice; write it once")
        return found

    def _list(self, key: str, example: str, instead: str) -> tuple[str, ...]:
        value = self._get(key, list, f"a list such as {example}", [])
        for each in value:
            if not isinstance(each, str):
                self.refuse(key, f"{shown(each)} is {_kind(each)}; every entry must be a text")
        if key in self._table and not value:
            self.refuse(key, f"empty; {instead}")
        if len(value) > LIST_MAX_LENGTH:
            self.refuse(key, f"{len(value)} entries; at most {LIST_MAX_LENGTH} are allowed")
        return tuple(value)

    def milli(self, key: str) -> int:
        """Return an amount in thousandths, above 0; 0 where there is none."""
        wanted = 'a number such as "0.5"'
        value = self._get(key, (str, int, float), wanted, 0)
        try:
            found = parse_milli(str(value), field="")
        except BadAmount as e:
            self.refuse(key, str(e).removeprefix(": "))
        except ValueError:
            # Python writes no number of more than 4300 digits.
            self.refuse(key, f"{shown(value)} cannot be used; write {wanted}")
        if key in self._table and not found:
            self.refuse(key, f"{shown(value)} is no amount; leave the key out, or write more than 0")
        return found

    def mib(self, key: str) -> int:
        """Return an amount in MiB, above 0; 0 where there is none."""
        value: float = self._get(key, (int, float), "whole MiB such as 4096", 0)
        if key in self._table and not (0 < value <= LARGEST_MIB and value == int(value)):
            self.refuse(key, f"{shown(value)} cannot be used; write whole MiB, 1 to {LARGEST_MIB}")
        return int(value)

    def table(self, key: str, known: Iterable[str]) -> Values:
        """Return the table at this key; one without anything where there is none."""
        value = self._get(key, dict, 'a table such as { fgpu = "0.5" }', {})
        if key in self._table and not value:
            self.refuse(key, "empty; leave the key out, or write an amount")
        found = Values(value, inside=(*self._inside, key))
        found.check_keys(known)
        return found


def shown(value: object) -> str:
    """Return a value as it looks in a file, on one line and at most 80 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        # Python writes no number of more than 4300 digits, and nothing that is in a thousand tables.
        return "what is too long to be shown"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _kind(value: object) -> str:
    kinds = {bool: "a truth value", str: "a text", list: "a list", dict: "a table"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else "a date or time")
