"""A mapping that is carried on in parts: a change makes the parts anew that it touches, and shares all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import TypeVar
from zlib import crc32

K = TypeVar("K")
V = TypeVar("V")


def part_of_id(number: int) -> int:
    """Return the part of an id: those of a part came one after the other, and parts are in order as ids are."""
    return number >> 6


def part_of_name(name: str) -> int:
    """Return the part of a name: the same in every process."""
    return crc32(name.encode(errors="surrogatepass")) & 63


class PersistentMap(Mapping[K, V]):
    """A mapping of which no part is ever changed. In order of the parts, as these were first needed."""

    __slots__ = ("_part_of", "_parts")

    def __init__(self, part_of: Callable[[K], int], parts: Mapping[int, Mapping[K, V]] | None = None) -> None:
        """``part_of`` tells of a key in which part it is; ``parts`` are for this class to hand in."""
        self._part_of = part_of
        self._parts = parts or {}

    def then(self, changes: Mapping[K, V | None]) -> PersistentMap[K, V]:
        """Return the mapping after changes; None: the key is there no more."""
        parts, anew = dict(self._parts), dict[int, dict[K, V]]()
        for key, value in changes.items():
            number = self._part_of(key)
            part = anew.get(number)
            if part is None:
                part = parts[number] = anew[number] = dict(parts.get(number, ()))
            if value is None:
                part.pop(key, None)
            else:
                part[key] = value
        for number, part in anew.items():
            if not part:
                del parts[number]
        return PersistentMap(self._part_of, parts)

    def changed_keys(self, other: PersistentMap[K, V]) -> Iterator[K]:
        """Yield the keys of which not both have the same object; only parts that are not the same are looked into."""
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
        return f"Parts({dict(self)!r})"

    def values(self) -> ValuesView[V]:
        """Return the values, in the order of the keys, and sooner than one after the other."""
        return _Values(self)


class _Values(ValuesView[V]):
    def __init__(self, whole: PersistentMap[K, V]) -> None:
        super().__init__(whole)
        self._whole = whole

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(part.values() for part in self._whole._parts.values())
