"""Requests to a session's own server, which belongs to its user and may answer anything.

All such requests of the Hub go through here. An answer is at most 64 KiB, must be complete within a total time, is not
decompressed, and redirects are not followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import urlparse

from jupyterhub.objects import Server
from packaging.version import InvalidVersion, Version
from tornado.httpclient import HTTPRequest, HTTPResponse
from tornado.simple_httpclient import SimpleAsyncHTTPClient

MOST_BODY_BYTES = 64 << 10
MOST_HEADER_BYTES = 16 << 10
ANSWER_WITHIN_S = 5.0
ASK_AGAIN_S = 0.03
"""Interval for a server that does not listen yet; a refused connection is cheap."""
LONGEST_PAUSE_S = 2.0
"""Longest interval for a server that listens and gives wrong answers."""
VERSION = "X-JupyterHub-Version"


class NoAnswer(Exception):
    """No usable answer; the text is for the log."""


async def ask(
    url: str, *, headers: Mapping[str, str] | None = None, within_s: float = ANSWER_WITHIN_S
) -> HTTPResponse:
    """Return what a session's server answers, whatever its status.

    Raises:
        NoAnswer: none in time, too large, or invalid.
    """
    client = SimpleAsyncHTTPClient(
        force_instance=True,
        max_body_size=MOST_BODY_BYTES,
        max_buffer_size=2 * MOST_BODY_BYTES,
        max_header_size=MOST_HEADER_BYTES,
    )
    request = HTTPRequest(
        url,
        headers=dict(headers or {}),
        follow_redirects=False,
        decompress_response=False,
        request_timeout=within_s,
    )
    try:
        async with asyncio.timeout(within_s):
            return await client.fetch(request, raise_error=False)
    # A stranger's answer can fail anywhere in a parser.
    except Exception as e:
        raise NoAnswer(f"{url}: {e!r}"[:500]) from e
    finally:
        client.close()


async def first_answer(ip: str, port: int, path: str) -> HTTPResponse:
    """Return the first answer of a server with a status below 500."""
    pause_s = ASK_AGAIN_S
    while True:
        try:
            # A refused connection costs a tenth of a refused request.
            async with asyncio.timeout(ANSWER_WITHIN_S):
                _, writer = await asyncio.open_connection(ip, port)
            writer.close()
        except OSError:
            await asyncio.sleep(ASK_AGAIN_S)
            continue
        try:
            answer = await ask(f"http://{ip}:{port}{path}")
            if answer.code < 500:
                return answer
        except NoAnswer:
            pass
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def wait_up(
    server: Server,
    timeout: float = 10,  # noqa: ASYNC109 - JupyterHub's
    http: bool = True,
    ssl_context: object = None,
    extra_path: str = "",
) -> HTTPResponse:
    """Replace JupyterHub's `Server.wait_up`: return when a session's server answers.

    Raises:
        TimeoutError: it did not in time.
    """
    at = urlparse(server.url)
    async with asyncio.timeout(timeout):
        answer = await first_answer(str(at.hostname), at.port or 80, f"{at.path}{extra_path}")
    try:
        Version(answer.headers.get(VERSION, ""))
    except InvalidVersion:
        # JupyterHub parses this header: an invalid version would stop a restarting Hub.
        answer.headers.pop(VERSION, None)
    return answer
