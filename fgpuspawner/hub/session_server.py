"""Asking a session's own server. It is its user's: it answers what it likes, and costs the Hub little.

Whoever asks what a session controls asks here. An answer has at most 64 KiB, comes within a total time however slowly
it drips, leads nowhere else, and is not unpacked.
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
"""A server that is not there yet is asked again so soon: it costs a refused connection."""
LONGEST_PAUSE_S = 2.0
"""Between two questions to a server that is there and gives wrong answers."""
VERSION = "X-JupyterHub-Version"


class NoAnswer(Exception):
    """The server gave no answer that can be used; the text is for the log."""


async def ask(
    url: str, *, headers: Mapping[str, str] | None = None, within_s: float = ANSWER_WITHIN_S
) -> HTTPResponse:
    """Return what a session's server answers, whatever its status.

    Raises:
        NoAnswer: none came in time, or one that is too large or makes no sense.
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
    # What a stranger answers can fail anywhere in a parser.
    except Exception as e:
        raise NoAnswer(f"{url}: {e!r}"[:500]) from e
    finally:
        client.close()


async def it_answers(ip: str, port: int, path: str) -> HTTPResponse:
    """Return when a server answers HTTP there, other than with an error of its own (status 500 and above)."""
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
    """Return when a session's server answers, in place of JupyterHub's `Server.wait_up`.

    Raises:
        TimeoutError: it did not in time.
    """
    at = urlparse(server.url)
    async with asyncio.timeout(timeout):
        answer = await it_answers(str(at.hostname), at.port or 80, f"{at.path}{extra_path}")
    try:
        Version(answer.headers.get(VERSION, ""))
    except InvalidVersion:
        # JupyterHub takes it for one: a Hub that restarts would fail to start.
        answer.headers.pop(VERSION, None)
    return answer
