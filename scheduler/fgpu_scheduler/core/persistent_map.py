"""An immutable mapping in parts: a change copies only the parts that it touches and shares all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import TypeVar
from zlib import crc32

K = TypeVar("K")
V = TypeVar("V")


def part_of_id(number: int) -> int:
    """Return the part that holds an id. Ids of one part are consecutive, and parts are in the order of their ids."""
    return number >> 6


def part_of_name(name: str) -> int:
    """Return the part that holds a name; it is the same in every process."""
    return crc32(name.encode(errors="surrogatepass")) & 63


class PersistentMap(Mapping[K, V]):
    """An immutable mapping; its successors share the unchanged parts. Its keys are in the order of the parts."""

    __slots__ = ("_part_of", "_parts")

    def __init__(self, part_of: Callable[[K], int], parts: Mapping[int, Mapping[K, V]] | None = None) -> None:
        """``part_of`` returns the part of a key; only this class passes ``parts``."""
        self._part_of = part_of
        self._parts = parts or {}

    def then(self, changes: Mapping[K, V | None]) -> PersistentMap[K, V]:
        """Return the mapping after changes; the value None removes a key."""
        parts, copied = dict(self._parts), dict[int, dict[K, V]]()
        for key, value in changes.items():
            number = self._part_of(key)
            part = copied.get(number)
            if part is None:
                part = parts[number] = copied[number] = dict(parts.get(number, ()))
            if value is None:
                part.pop(key, None)
            else:
                part[key] = value
        return PersistentMap(self._part_of, {number: part for number, part in parts.items() if part})

    def changed_keys(self, other: PersistentMap[K, V]) -> Iterator[K]:
        """Yield the keys that do not have the same object in both mappings. Shared parts are skipped."""
        nothing: Mapping[K, V] = {}
        for number in self._parts.keys() | other._parts.keys():
            own, others = self._parts.get(number, nothing), other._parts.get(number, nothing)
            if own is not others:
                yield from (key for key, value in own.items() if others.get(key) is not value)
                yield from (key for key in others if key not in own)

    def __getitem__(self, key: K) -> V:
        part = self._parts.get(self._part_of(key))
        if part is None:
            raise KeyError(key)
        return part[key]

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(self._parts.values())

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def __repr__(self) -> str:
        return f"PersistentMap({dict(self)!r})"

    def values(self) -> ValuesView[V]:
        """Return the values in the order of the keys, faster than by one lookup per key."""
        return _Values(self)


class _Values(ValuesView[V]):
    def __init__(self, whole: PersistentMap[K, V]) -> None:
        super().__init__(whole)
        self._whole = whole

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(part.values() for part in self._whole._parts.values())
