"""Whatever the API is asked: it does not fail, and its answers are as its description says."""

from __future__ import annotations

from typing import Any

import pytest
import requests
import schemathesis
from filledservice import Filled
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fgpuspawner.service.openapi import document
from hubprocess import module_world

SCHEMA = schemathesis.openapi.from_dict(document())
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = {
    f"{operation.ok().method.upper()} {operation.ok().path}": operation.ok()
    for operation in SCHEMA.get_all_operations()
    # It does not end: the stream has tests of its own.
    if operation.ok().path != "/events"
}


filled = module_world(Filled, "service")


def ask_much(world: Filled, operation: Any, role: str, examples: int) -> None:
    """Ask what the description allows, and check each answer."""
    token = getattr(world, role)
    base = f"{world.hub.url}/services/fgpu/api/v1"
    with requests.Session() as connection:

        @settings(
            max_examples=examples,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def asked(case: Any) -> None:
            answer = case.call(
                base_url=base, session=connection, headers={"Authorization": f"token {token}"}, timeout=30
            )
            case.validate_response(answer, checks=CHECKS)

        asked()


@pytest.mark.parametrize("role", ["alice", "admin"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_answers_are_as_described(filled: Filled, name: str, role: str) -> None:
    ask_much(filled, OPERATIONS[name], role, 8)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["alice", "bob", "carol", "admin", "alices_server"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_answers_are_as_described_at_length(filled: Filled, name: str, role: str) -> None:
    ask_much(filled, OPERATIONS[name], role, 200)
