"""One value of an image's entry: what may be written, and the words for what may not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

from fgpu_scheduler import BadAmount, parse_milli
from fgpuspawner.images.saying import bare, kind, shown

TEXT_MAX_LENGTH = 200
LIST_MAX_LENGTH = 1000
LARGEST_MIB = 10**9


class Refuse(Protocol):
    """Refuses an entry for what is at a key, given with the keys of the tables that it is in."""

    def __call__(self, path: tuple[str, ...], problem: str) -> NoReturn:
        """Raise what says so."""


class Values:
    """The values of one table, read by key; what is wrong is refused."""

    def __init__(self, table: Mapping[str, object], refuse: Refuse, *, inside: tuple[str, ...] = ()) -> None:
        self._table = table
        self._refuse_at = refuse
        self._inside = inside

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Refuse what is at this key."""
        self._refuse_at((*self._inside, key), problem)

    def check_keys(self, known: Iterable[str]) -> None:
        """Refuse a key that there is not."""
        keys = list(known)
        for key in self._table:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(keys)}"
                self.refuse(key, f"unknown key; {hint}")

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
        if key not in self._table:
            if fallback is None:
                self.refuse(key, f"missing; write {wanted}")
            return fallback
        value = self._table[key]
        if not isinstance(value, str):
            self.refuse(key, f"{shown(value)} is {kind(value)}; write {wanted}")
        if len(value) > max_length:
            self.refuse(key, f"{len(value)} characters; at most {max_length} are allowed")
        if any(not character.isprintable() for character in value):
            self.refuse(key, f"{shown(value)} has a line break or control character; remove it")
        if fallback is None and not value.strip():
            self.refuse(key, f"empty; write {wanted}")
        if pattern is not None and value != fallback and not pattern.fullmatch(value):
            self.refuse(key, f"{shown(value)} cannot be used; write {wanted}")
        return value

    def flag(self, key: str, *, fallback: bool = False) -> bool:
        """Return a truth value."""
        value = self._table.get(key, fallback)
        if not isinstance(value, bool):
            self.refuse(key, f"{shown(value)} is {kind(value)}; write true or false")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Return the names in a list; a list that names nobody is refused, not guessed at."""
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
        if key not in self._table:
            return ()
        value = self._table[key]
        if not isinstance(value, list):
            self.refuse(key, f"{shown(value)} is {kind(value)}; write a list such as {example}")
        for each in value:
            if not isinstance(each, str):
                self.refuse(key, f"{shown(each)} is {kind(each)}; every entry must be a text")
        if not value:
            self.refuse(key, f"empty; {instead}")
        if len(value) > LIST_MAX_LENGTH:
            self.refuse(key, f"{len(value)} entries; at most {LIST_MAX_LENGTH} are allowed")
        return tuple(value)

    def milli(self, key: str) -> int:
        """Return an amount in thousandths, above 0; 0 where there is none."""
        if key not in self._table:
            return 0
        value = self._table[key]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self.refuse(key, f'{shown(value)} is {kind(value)}; write a number such as "0.5"')
        try:
            found = parse_milli(str(value), field="")
        except BadAmount as e:
            self.refuse(key, str(e).removeprefix(": "))
        except ValueError:
            # Python writes no number of more than 4300 digits.
            self.refuse(key, f'{shown(value)} cannot be used; write a number such as "0.5"')
        if not found:
            self.refuse(key, f"{shown(value)} is no amount; leave the key out, or write more than 0")
        return found

    def mib(self, key: str) -> int:
        """Return an amount in MiB, above 0; 0 where there is none."""
        if key not in self._table:
            return 0
        value = self._table[key]
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(key, f"{shown(value)} is {kind(value)}; write whole MiB such as 4096")
        if not 0 < value <= LARGEST_MIB:
            self.refuse(key, f"{shown(value)} cannot be used; write 1 to {LARGEST_MIB} MiB")
        return value

    def table(self, key: str, known: Iterable[str]) -> Values:
        """Return the table at this key; one without anything where there is none."""
        value = self._table.get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, f'{shown(value)} is {kind(value)}; write a table such as {{ fgpu = "0.5" }}')
        if key in self._table and not value:
            self.refuse(key, "empty; leave the key out, or write an amount")
        found = Values(value, self._refuse_at, inside=(*self._inside, key))
        found.check_keys(known)
        return found


def path_shown(path: tuple[str, ...]) -> str:
    """Return a path of keys as it is written."""
    return ".".join(bare(key) for key in path)
