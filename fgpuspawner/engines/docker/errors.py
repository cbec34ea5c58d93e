"""docker-py's exceptions in two kinds: the daemon refuses, or it does not answer."""

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
"""The daemon does not answer, or something between answers in its place."""

FAILED = (DockerException, *GONE)
"""Both kinds."""


def words(error: Exception) -> str:
    """Return the system's message in a client's error, which wraps it in a tuple; otherwise the whole text."""
    inside = re.search(r"Error\(\d+, '([^']+)'", str(error))
    return inside[1] if inside else str(error)


def rows(answer: Any) -> list[dict[str, Any]]:
    """Return the list that a daemon answered.

    Raises:
        requests.exceptions.InvalidJSONError: something else answered in its place.
    """
    if not isinstance(answer, list) or not all(isinstance(row, dict) for row in answer):
        raise requests.exceptions.InvalidJSONError("an answer that makes no sense")
    return answer


def state_of(answer: Any) -> dict[str, Any]:
    """Return the state in a daemon's description of a container.

    Raises:
        requests.exceptions.InvalidJSONError: see `rows`.
    """
    state = answer.get("State") if isinstance(answer, dict) else None
    if not isinstance(state, dict) or "Running" not in state:
        raise requests.exceptions.InvalidJSONError("an answer that makes no sense")
    return state
