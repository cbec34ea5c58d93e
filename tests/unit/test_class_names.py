"""A class name stands for one thing in the whole product."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_THE_API = ("service/objects.py", "service/admin/objects.py", "service/api/")
"""The API's models and handlers have the names of what they show."""


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for folder in ("fgpuspawner", "scheduler"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            if not any(part in where for part in OF_THE_API):
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        places[node.name].append(where)
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice
