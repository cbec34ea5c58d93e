"""docker-py's client, for daemons that may be anybody's by now: an answer takes only so much of the Hub's memory."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import docker
import requests

MOST_BYTES = 64 * 2**20
"""Of one answer: a thousand containers are 3 MB."""


class Client(docker.APIClient):
    """Gives an answer up that has no end. What is asked for as a stream, its reader bounds."""

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Send a request, as requests' own sessions do."""
        answer: requests.Response = super().send(request, **{**kwargs, "stream": True})
        if kwargs.get("stream"):
            return answer
        found = bytearray()
        with ExitStack() as failing:
            failing.callback(answer.close)
            for piece in answer.iter_content(65536):
                found += piece
                if len(found) > MOST_BYTES:
                    raise requests.exceptions.ConnectionError(
                        f"an answer of more than {MOST_BYTES >> 20} MiB"
                    )
            failing.pop_all()
        answer._content = bytes(found)
        return answer
