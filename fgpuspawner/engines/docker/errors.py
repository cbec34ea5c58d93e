"""What docker-py raises, in the two kinds that matter: the daemon refuses, or it does not answer."""

from __future__ import annotations

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
