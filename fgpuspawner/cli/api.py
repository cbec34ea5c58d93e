"""The REST APIs of a Hub and of its service, called by the command ``fgpu`` with a user's token.

The token comes from the environment or from a file for its owner only. It is sent in a header, and is in no error,
no log and no output. Redirects are not followed: one would carry it to wherever it points.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import click
import requests
from requests.adapters import HTTPAdapter
from truststore import SSLContext

from fgpu_scheduler import FGPUError
from fgpuspawner.cli.command import FILE, UsageError, read_secret
from fgpuspawner.scopes import SERVICE

URL, TOKEN = "FGPU_HUB_URL", "JUPYTERHUB_API_TOKEN"
HUB_IN_SESSION, SERVICE_IN_SESSION = "JUPYTERHUB_API_URL", "FGPU_SERVICE_URL"
"""What a session has in its environment in place of `URL`."""

CONNECT_WITHIN_S, ANSWER_WITHIN_S = 10, 60
CODES = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    502: "hub_failed",
    503: "hub_unavailable",
}
"""Of answers that have no code of their own."""
NO_HUB = "no_hub"
"""The code for an answer that is not of a Hub or its service, such as a proxy's page."""
AWAY = frozenset({NO_HUB, "hub_unavailable", "hub_failed", "store_unavailable", "too_many_requests"})
"""Codes of errors that may pass on their own, as while a Hub restarts."""


token_option = click.option(
    "--token-file", metavar="FILE", type=FILE, help=f"a file with the token, instead of {TOKEN}"
)


class SystemTrust(HTTPAdapter):
    """Connections that trust the operating system's authorities, beside those that requests brings."""

    def init_poolmanager(self, *args: Any, **more: Any) -> None:
        super().init_poolmanager(*args, **more, ssl_context=SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def proxy_manager_for(self, *args: Any, **more: Any) -> Any:
        return super().proxy_manager_for(*args, **more, ssl_context=SSLContext(ssl.PROTOCOL_TLS_CLIENT))


class CallFailed(FGPUError):
    """A call that was refused, or not answered: with the API's own code, field and words."""

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


@dataclass(frozen=True, slots=True)
class ApiClient:
    """Where a Hub's API and its service's are, and the token for both. A call that fails raises `CallFailed`."""

    hub: str
    service: str
    token: str = field(repr=False)
    in_session: bool = False

    @classmethod
    def from_environment(cls, token_file: str | None) -> ApiClient:
        """Return the APIs that the environment names."""
        token = read_secret(token_file, "token") if token_file else os.environ.get(TOKEN, "")
        # What a header cannot hold, or would end: what else is wrong with it, the Hub says.
        if not re.fullmatch(r"[!-~]+", token):
            where = token_file or f"{TOKEN} in the environment"
            raise UsageError(
                f"there is no token in {where}; make one on the Hub's page Tokens, or name a --token-file"
            )
        url = os.environ.get(URL, "").rstrip("/").removesuffix("/hub")
        if url:
            return cls(_checked(f"{url}/hub/api"), f"{url}/services/{SERVICE}/api/v1", token)
        hub, service = (os.environ.get(name, "").rstrip("/") for name in (HUB_IN_SESSION, SERVICE_IN_SESSION))
        if not hub or not service:
            raise UsageError(f"{URL} is not set; set it to the Hub's address, such as https://hub.example")
        return cls(_checked(hub), f"{_checked(service)}/api/v1", token, in_session=True)

    def service_call(self, method: str, path: str, **query: object) -> dict[str, Any]:
        """Return what the service answers."""
        return self._call(method, f"{self.service}/{path}", params=query)

    def change(self, method: str, path: str, body: dict[str, object]) -> dict[str, Any]:
        """Send the service a JSON object, and return what it answers."""
        return self._call(method, f"{self.service}/{path}", json=body)

    def hub_call(self, method: str, path: str, *, body: object = None, **query: object) -> dict[str, Any]:
        """Return what the Hub answers; of a list one page, its members as ``items``."""
        paged = {"Accept": "application/jupyterhub-pagination+json"}
        return self._call(method, f"{self.hub}/{path}", params=query, json=body, headers=paged)

    def start_server(self, user: str, server_name: str, options: dict[str, object]) -> None:
        """Ask the Hub for a server; it starts or waits when this returns."""
        where = f"servers/{quote(server_name, safe='')}" if server_name else "server"
        self._call("POST", f"{self.hub}/users/{quote(user, safe='')}/{where}", json={"user_options": options})

    def _call(self, method: str, url: str, **more: Any) -> dict[str, Any]:
        with requests.Session() as http:
            # A proxy for the world outside is none for a session's way to its Hub.
            http.trust_env = not self.in_session
            if url.startswith("https"):
                http.mount("https://", SystemTrust())
            try:
                answer = http.request(
                    method,
                    url,
                    auth=self._sign,
                    allow_redirects=False,
                    timeout=(CONNECT_WITHIN_S, ANSWER_WITHIN_S),
                    **more,
                )
            except requests.exceptions.SSLError as e:
                raise CallFailed("hub_untrusted", f"{_host(url)}: {_distrust(str(e))}") from None
            except requests.RequestException:
                # Only that it does not: the library's words are long, and have the address with its query.
                raise CallFailed("hub_unavailable", f"{_host(url)} does not answer") from None
        to = urlsplit(answer.headers.get("Location", "")) if answer.is_redirect else None
        if to is not None and to.hostname:
            words = f"redirects to {to.scheme}://{to.netloc.rpartition('@')[2]}; set {URL} to the Hub's own address"
            raise CallFailed("redirected", f"{_host(url)} {words}")
        succeeded = 200 <= answer.status_code < 300
        text = answer.text.replace(self.token, "[token]")
        try:
            body = json.loads(text.strip() or ("{}" if succeeded else ""))
        except (ValueError, RecursionError):
            body = None
        if succeeded and isinstance(body, dict):
            return body
        if succeeded and isinstance(body, list):
            return {"items": body}
        raise _failed(answer, body, url)

    def _sign(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        # In this way the library looks for no other name and password, as in ~/.netrc.
        request.headers["Authorization"] = f"token {self.token}"
        return request


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.username is not None or parts.query or parts.fragment:
        raise UsageError(f"{URL} is no address of a Hub; set it to one such as https://hub.example")
    return url


def _distrust(said: str) -> str:
    why = re.search(r"certificate verify failed: (.+?) \(", said)
    if why is None:
        return "no encrypted connection; is the address right?"
    words = f"its certificate is not trusted here: {why[1].rstrip('.')}"
    if "issuer" in said or "self-signed" in said or "self signed" in said:
        words += "; add its authority to this machine's certificates, or name a file with it in SSL_CERT_FILE"
    return words


def _host(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _failed(answer: requests.Response, body: Any, url: str) -> CallFailed:
    status = answer.status_code
    code = CODES.get(status, "hub_refused")
    if not isinstance(body, dict):
        words = f"answered {status}, and not as a Hub does; is {URL} the Hub's address?"
        return CallFailed(NO_HUB, f"{_host(url)} {'is not ready' if status == 503 else words}")
    said = body.get("error")
    if isinstance(said, dict):
        return CallFailed(str(said.get("code")), str(said.get("message")), said.get("field"))
    # The Hub's own words. What our spawner refuses has its code in the status line, where JupyterHub puts it.
    message = str(body.get("message") or f"the Hub answered {status}")
    if re.fullmatch(r"[a-z]+(_[a-z]+)+", answer.reason or ""):
        code = answer.reason
    field, colon, _ = message.partition(": ")
    return CallFailed(code, message, field if colon and re.fullmatch(r"[a-z_]+", field) else None)
