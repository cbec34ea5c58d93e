"""The API's description: every route and method is in it, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from servedroutes import methods_of, served

from fgpuspawner.service.openapi import document

PATHS = document()["paths"]

API = "api/v1"


def test_exactly_the_served_routes_are_described() -> None:
    found = {
        path.removeprefix(API): methods_of(handler)
        for path, handler in served()
        if path.startswith(f"{API}/")
    }
    described = {path: set(operations) for path, operations in document()["paths"].items()}
    told = {re.sub(r"{\w+}", "{id}", path): methods for path, methods in described.items()}
    assert told == found, "see fgpuspawner/service/openapi.py"


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_schemas_are_defined_and_used() -> None:
    found = document()
    used = {reference.removeprefix("#/components/schemas/") for reference in references(found)}
    assert used == set(found["components"]["schemas"])


@pytest.mark.parametrize("path", PATHS)
def test_path_parts_are_parameters(path: str) -> None:
    for operation in PATHS[path].values():
        inside = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert inside == set(re.findall(r"{(\w+)}", path))
        assert ("404" in operation["responses"]) or not inside
