"""Runs commands in containers and returns their whole output.

docker-py reads a command's output from the raw socket and so misses bytes that were buffered with the answer's header:
for a quick command on a busy machine that is everything. Here the output is read as the answer's body.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import docker
from docker.errors import APIError
from urllib3.exceptions import HTTPError

from fgpuspawner.isolation.report import Answer

STDOUT, STDERR = 1, 2
HEAD = struct.Struct(">BxxxL")
"""Header of each chunk: stream and length. See the engine's API, "attach to a container"."""


def run_in(
    client: docker.APIClient,
    container: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    user: str = "",
    most_bytes: int,
    streams: Sequence[int] = (STDOUT,),
) -> Answer:
    """Run a command in a container; return its exit status and output, little more than ``most_bytes`` of it.

    Blocks until it ends or has printed more.

    Raises:
        docker.errors.DockerException: the engine refuses, or does not answer.
        requests.exceptions.ConnectionError: the connection ends in the middle.
    """
    made = client.exec_create(
        container, list(command), stdin=False, tty=False, environment=dict(environment or {}), user=user
    )["Id"]
    url = f"{client.base_url}/v{client.api_version}/exec/{made}/start"
    answer = client.post(url, json={"Detach": False, "Tty": False}, stream=True, timeout=client.timeout)
    output = bytearray()
    with contextlib.closing(answer):
        if answer.status_code >= 400:
            raise APIError(answer.text, response=answer, explanation=answer.text)
        try:
            while len(output) <= most_bytes:
                head = answer.raw.read(HEAD.size)
                if len(head) < HEAD.size:
                    break
                stream, size = HEAD.unpack(head)
                output += _piece(answer.raw, size, most_bytes - len(output) + 1 if stream in streams else 0)
        except HTTPError as e:
            raise docker.errors.DockerException(f"the output of a command broke off: {e}") from e
    return Answer(bytes(output), client.exec_inspect(made)["ExitCode"])


def _piece(raw: Any, size: int, wanted: int) -> bytes:
    """Read a chunk and return its first ``wanted`` bytes."""
    kept = bytearray()
    while size > 0:
        got = raw.read(min(size, 65536))
        if not got:
            break
        size -= len(got)
        kept += got[: max(0, wanted - len(kept))]
    return bytes(kept)
