"""A mapping in parts is the mapping that a dict would be, and says what is another object in two of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from random import Random

import pytest

from fgpu_scheduler.core.persistent_map import PersistentMap, part_of_id, part_of_name


@pytest.mark.parametrize("part_of", [part_of_id, lambda n: n % 5], ids=["by id", "by rest"])
def test_after_any_changes_it_is_what_a_dict_would_be(part_of: Callable[[int], int]) -> None:
    rng = Random(7)
    plain: dict[int, str] = {}
    parts = PersistentMap[int, str](part_of)
    for _ in range(500):
        changes = {rng.randrange(400): rng.choice(("a", "b", None)) for _ in range(rng.randrange(4))}
        before, was = parts, dict(parts)
        parts = parts.then(changes)
        for key, value in changes.items():
            plain.pop(key, None)
            if value is not None:
                plain[key] = value
        assert parts == plain
        assert dict(before) == was
        assert len(parts) == len(plain)
        assert sorted(parts.values()) == sorted(plain.values())
        assert set(parts.changed_keys(before)) == {
            n for n in {*was, *plain} if was.get(n) is not plain.get(n)
        }


def test_what_is_not_there_is_a_key_error_that_names_it() -> None:
    parts = PersistentMap[str, int](part_of_name).then({"a": 1})
    with pytest.raises(KeyError, match="'b'"):
        parts["b"]
    assert "b" not in parts
    assert parts.get("b") is None


def test_new_ids_come_last_whatever_ended_before_them() -> None:
    parts = PersistentMap[int, str](part_of_id).then({n: "x" for n in range(1, 300)})
    parts = parts.then({n: None for n in range(60, 200)}).then({300: "x", 301: "x"})
    assert list(parts) == [*range(1, 60), *range(200, 302)]


def test_names_are_found_again_by_another_process() -> None:
    parts = PersistentMap[str, int](part_of_name).then({f"user{n}\udc80": n for n in range(100)})
    assert part_of_name("user7\udc80") == part_of_name("user7" + chr(0xDC80))
    assert pickle.loads(pickle.dumps(parts)) == parts
