"""docker-py's client, for engines that may vanish or mean harm: errors, limits on answers, commands in containers."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError

from fgpuspawner.isolation.report import Answer

GONE = (
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.InvalidJSONError,
)
"""The daemon does not answer, or something between answers in its place."""
FAILED = (DockerException, *GONE)
"""The daemon refuses, or does not answer."""

MOST_BYTES = 64 * 2**20
"""For one answer; a thousand containers take 3 MB."""
STDOUT, STDERR = 1, 2
OUTPUT_HEADER = struct.Struct(">BxxxL")
"""Before each chunk of output: stream and length. See the engine's API, "attach to a container"."""
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Socket options: a machine that is silent for 50 s is gone. A cut cable sends nothing, and a reader would wait forever.
"""


class _KeepAliveAdapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        options = [*HTTPConnection.default_socket_options, *KEEPALIVE]
        super().init_poolmanager(*args, **kwargs, socket_options=options)


class Client(docker.APIClient):
    """Aborts answers above `MOST_BYTES`, and ends connections to a machine that is gone.

    Streams, such as that of the events, are limited by their readers.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for scheme in ("http://", "https://"):
            if self.base_url.startswith(scheme):
                # The first connection asked for the version. A local socket needs no options.
                self.get_adapter(scheme).close()
                self.mount(scheme, _KeepAliveAdapter())

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        answer: requests.Response = super().send(request, **{**kwargs, "stream": True})
        if kwargs.get("stream"):
            return answer
        found = bytearray()
        with contextlib.ExitStack() as failing:
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


def system_message(error: Exception) -> str:
    """Return the system's message in a client's error, which wraps it in a tuple; otherwise the whole text."""
    inside = re.search(r"Error\(\d+, '([^']+)'", str(error))
    return inside[1] if inside else str(error)


def checked_rows(answer: Any) -> list[dict[str, Any]]:
    """Return the list that a daemon answered.

    Raises:
        requests.exceptions.InvalidJSONError: something else answered in its place.
    """
    if not isinstance(answer, list) or not all(isinstance(row, dict) for row in answer):
        raise requests.exceptions.InvalidJSONError("an answer that makes no sense")
    return answer


def checked_state(answer: Any) -> dict[str, Any]:
    """Return the state in a daemon's description of a container; raises like `checked_rows`."""
    state = answer.get("State") if isinstance(answer, dict) else None
    if not isinstance(state, dict) or "Running" not in state:
        raise requests.exceptions.InvalidJSONError("an answer that makes no sense")
    return state


def archive_of(files: Mapping[str, Path | bytes]) -> bytes:
    """Return a tar archive of these files and folders, or contents, all of them root's."""

    def of_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, source in files.items():
            if isinstance(source, Path):
                tar.add(source.resolve(), arcname=name, filter=of_root)
            else:
                entry = tarfile.TarInfo(name)
                entry.size = len(source)
                tar.addfile(entry, io.BytesIO(source))
    return packed.getvalue()


def written_bytes(client: docker.APIClient, container: str) -> int | None:
    """Return the bytes that a container has written outside its volumes, by id; None if the engine does not say."""
    listed = client.containers(all=True, size=True, filters={"id": container})
    size = listed[0].get("SizeRw") if listed else None
    return None if size is None else int(size)


def post(client: docker.APIClient, path: str, content: Mapping[str, Any]) -> requests.Response:
    """Make a call that docker-py has not, or makes in another way; return the answer before its body is read.

    Raises:
        docker.errors.APIError: the engine refuses.
    """
    url = f"{client.base_url}/v{client.api_version}{path}"
    answer = client.post(url, json=content, stream=True, timeout=client.timeout)
    if answer.status_code >= 400:
        with contextlib.closing(answer):
            raise APIError(answer.text, response=answer, explanation=answer.text)
    return answer


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

    Blocks until it ends or has printed more. docker-py reads output from the raw socket and so misses bytes that were
    buffered with the answer's header: for a quick command on a busy machine that is everything. Here the output is read
    as the answer's body.

    Raises:
        docker.errors.DockerException: the engine refuses, or does not answer.
        requests.exceptions.ConnectionError: the connection ends in the middle.
    """
    made = client.exec_create(
        container, list(command), stdin=False, tty=False, environment=dict(environment or {}), user=user
    )["Id"]
    answer = post(client, f"/exec/{made}/start", {"Detach": False, "Tty": False})
    output = bytearray()
    with contextlib.closing(answer):
        try:
            while len(output) <= most_bytes:
                header = answer.raw.read(OUTPUT_HEADER.size)
                if len(header) < OUTPUT_HEADER.size:
                    break
                stream, left = OUTPUT_HEADER.unpack(header)
                while left > 0 and (got := answer.raw.read(min(left, 65536))):
                    left -= len(got)
                    if stream in streams:
                        output += got[: most_bytes + 1 - len(output)]
        except HTTPError as e:
            raise DockerException(f"the output of a command broke off: {e}") from e
    return Answer(bytes(output), client.exec_inspect(made)["ExitCode"])
