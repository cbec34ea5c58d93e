"""docker-py's client with a limit on the size of answers, as another machine's daemon is not trusted."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import docker
import requests

MOST_BYTES = 64 * 2**20
"""For one answer; a thousand containers take 3 MB."""


class Client(docker.APIClient):
    """Aborts answers above `MOST_BYTES`. Streams are limited by their readers."""

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
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
