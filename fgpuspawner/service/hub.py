"""Calls to the Hub's own API: start a server again, and end one. Tokens are sent in headers only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import quote

from tornado.httpclient import HTTPError, HTTPRequest, HTTPResponse
from tornado.simple_httpclient import SimpleAsyncHTTPClient

from fgpuspawner.scopes import SESSION_HEADER

LOG_WITHIN_S = 20.0
TIMEOUT_S = 60.0
"""The Hub answers a long start or end with 202 well before this."""


class HubUnreachable(Exception):
    """The Hub did not answer at all."""


class HubSilent(HubUnreachable):
    """The Hub received the request but did not answer in time; it may still act on it."""


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """The Hub's answer: the status, and its message in case of an error."""

    status: int
    message: str = ""


class Hub:
    """The Hub's API at ``api_url``. Every call raises `HubUnreachable` where it does not answer."""

    def __init__(self, api_url: str) -> None:
        self._api_url = api_url.rstrip("/")
        self._http = SimpleAsyncHTTPClient(force_instance=True, max_clients=100)

    async def start_server(
        self, user: str, server_name: str, *, options: dict[str, object], token: str
    ) -> HubAnswer:
        """Start a server with these user options."""
        body = json.dumps({"user_options": options}).encode()
        return await self._call("POST", user, server_name, token, body)

    async def stop_server(self, user: str, server_name: str, *, session_id: int, token: str) -> HubAnswer:
        """Stop a server, or cancel its start, unless it has another session by now.

        Raises:
            HubSilent: the Hub did not answer in time, and may still do it.
        """
        return await self._call("DELETE", user, server_name, token, means={SESSION_HEADER: str(session_id)})

    async def log(self, session_id: int, *, token: str) -> tuple[int, bytes]:
        """Return the status, and the end of what a session's server has printed, not masked."""
        request = HTTPRequest(
            f"{self._api_url}/fgpu/log/{session_id}",
            headers={"Authorization": f"token {token}"},
            connect_timeout=5.0,
            request_timeout=LOG_WITHIN_S,
        )
        response = await self._fetch(request)
        return response.code, response.body

    async def has_time(self) -> None:
        """Return once the Hub has finished its current work and answers."""
        await self._fetch(HTTPRequest(f"{self._api_url}/", connect_timeout=5.0, request_timeout=TIMEOUT_S))

    def close(self) -> None:
        self._http.close()

    async def _call(
        self,
        method: str,
        user: str,
        server_name: str,
        token: str,
        body: bytes | None = None,
        means: dict[str, str] | None = None,
    ) -> HubAnswer:
        where = f"servers/{quote(server_name, safe='')}" if server_name else "server"
        request = HTTPRequest(
            f"{self._api_url}/users/{quote(user, safe='')}/{where}",
            method=method,
            headers={
                "Authorization": f"token {token}",
                "Accept": "application/json",
                **(means or {}),
            },
            body=body,
            connect_timeout=5.0,
            request_timeout=TIMEOUT_S,
            follow_redirects=False,
        )
        response = await self._fetch(request)
        return HubAnswer(response.code, _message(response.body) if response.code >= 400 else "")

    async def _fetch(self, request: HTTPRequest) -> HTTPResponse:
        try:
            return await self._http.fetch(request, raise_error=False)
        except HTTPError as e:
            raise HubSilent(f"the Hub has not answered: {e}") from None
        except OSError as e:
            raise HubUnreachable(f"the Hub does not answer: {e}") from None


def _message(body: bytes) -> str:
    try:
        said = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return " ".join(str(said).split())[:300]
