"""What docker-py raises, in the two kinds that matter: the daemon refuses, or it does not answer."""

from __future__ import annotations

import re
from typing import Any

import requests
from docker.errors import DockerException

GONE = (
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.InvalidJSONError,
)
"""A daemon does not answer, or something in between answers in its place."""

FAILED = (DockerException, *GONE)
"""Any of both."""


def words(error: Exception) -> str:
    """Return what the system says in an error of a client, which has it inside of a tuple; or else all of it."""
    inside = re.search(r"Error\(\d+, '([^']+)'", str(error))
    return inside[1] if inside else str(error)


def rows(answer: Any) -> list[dict[str, Any]]:
    """Return what a daemon lists.

    Raises:
        requests.exceptions.InvalidJSONError: something else answers in its place, and nothing follows from that.
    """
    if not isinstance(answer, list) or not all(isinstance(row, dict) for row in answer):
        raise requests.exceptions.InvalidJSONError("an answer that makes no sense")
    return answer


def state_of(answer: Any) -> dict[str, Any]:
    """Return the state in what a daemon says of a container.

    Raises:
        requests.exceptions.InvalidJSONError: see `rows`.
    """
    state = answer.get("State") if isinstance(answer, dict) else None
    if not isinstance(state, dict) or "Running" not in state:
        raise requests.exceptions.InvalidJSONError("an answer that makes no sense")
    return state
