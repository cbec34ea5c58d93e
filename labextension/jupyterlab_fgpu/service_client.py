"""Calls to the service `fgpu` (docs/rest-api.md), with this server's own token.

The token is put into the request's header and nowhere else: errors and log lines never hold it,
and an answer that repeats it is blanked before it is read.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, TypedDict
from urllib.parse import quote

from tornado.httpclient import AsyncHTTPClient, HTTPError, HTTPRequest, HTTPResponse
from tornado.simple_httpclient import HTTPTimeoutError, SimpleAsyncHTTPClient

from .environment import Service

API = "api/v1/"
MAX_ANSWER_BYTES = 4 * 1024 * 1024


class ServiceError(Exception):
    """A call that gave no answer to use. `message` is safe to show; `code` is stable."""

    def __init__(self, code: str, message: str, *, status: int = 502, field: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.field = field


class Unreachable(ServiceError):
    """The service is down, too slow, failing, or answers what this version does not understand."""


class Forbidden(ServiceError):
    """The service does not accept this server's token for this call."""


class Refused(ServiceError):
    """The service understood the call and said no; its code and message are passed on."""


class Gpu(TypedDict):
    """One device of a session's slice."""

    uuid: str
    model: str | None
    fgpu: str | None
    memory_mib: int | None
    compute_percent: int | None
    simulated: bool


class Session(TypedDict):
    """The part of the service's session object that is shown."""

    id: int | None
    server_name: str
    display_name: str
    state: str
    image_name: str | None
    resource_group: str | None
    amount: str | None
    fgpu: str | None
    gpu_memory_mib: int | None
    compute_percent: int | None
    gpus: list[Gpu]
    wait_reason: str | None
    wait_text: str | None
    position: int | None
    ahead: int | None
    expected_start_at_s: int | None
    forecast_basis: str | None
    pull_text: str | None
    message: str | None
    warning: str | None
    ends_at_s: int | None
    can_keep: bool
    url: str | None
    pending_url: str | None
    simulated: bool


class Queue(NamedTuple):
    """How many requests wait in one resource group."""

    group: str
    length: int


class ServiceClient:
    """The few calls that this extension makes, each within `timeout_s`."""

    def __init__(self, service: Service, *, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._http: AsyncHTTPClient | None = None

    async def server_name(self) -> str | None:
        """Return the name of the server that the token belongs to; None for a person's token."""
        name: str | None = _optional(await self._call("GET", "me"), "server_name", str)
        return name

    async def sessions(self) -> list[Session]:
        """Return the caller's own live sessions."""
        answer = await self._call("GET", "sessions")
        return [parse_session(raw) for raw in _list(answer, "sessions") if _is_mine(raw)]

    async def queue(self, group: str | None) -> Queue:
        """Return the length of one resource group's queue (the service's default if None)."""
        query = "" if group is None else f"?group={quote(group, safe='')}"
        answer = await self._call("GET", "queue" + query)
        return Queue(_required(answer, "group", str), _required(answer, "length", int))

    async def stop(self, session_id: int) -> Session:
        """End or cancel a session with this server's rights, and return it as it then stands."""
        answer = await self._call("DELETE", f"sessions/{session_id}")
        return parse_session(answer.get("session"))

    async def keep(self, session_id: int) -> Session:
        """Keep an idle session that is about to be ended, and return it as it then stands."""
        answer = await self._call("POST", f"sessions/{session_id}/keep")
        return parse_session(answer.get("session"))

    def _client(self) -> AsyncHTTPClient:
        if self._http is None:
            # Made at the first call, when the event loop that it belongs to runs; an instance of
            # our own, because others may configure the shared one.
            self._http = SimpleAsyncHTTPClient(force_instance=True, max_body_size=MAX_ANSWER_BYTES)
        return self._http

    async def _call(self, method: str, path: str) -> dict[str, Any]:
        request = HTTPRequest(
            self._service.url + API + path,
            method=method,
            body=b"" if method == "POST" else None,
            headers={
                "Accept": "application/json",
                "Authorization": f"token {self._service.token}",
            },
            connect_timeout=self._timeout_s,
            request_timeout=self._timeout_s,
            # A redirect would carry the token to wherever it points.
            follow_redirects=False,
        )
        try:
            response = await self._client().fetch(request, raise_error=False)
        except (HTTPError, OSError, ValueError) as error:
            # ValueError: an address or a header that tornado refuses to send.
            raise _no_answer(error) from None
        body = self._body(response)
        if 200 <= response.code < 300:
            if not isinstance(body, dict):
                raise _malformed("it is not a JSON object")
            return body
        raise _error(response.code, body)

    def _body(self, response: HTTPResponse) -> Any:
        text = response.body.decode("utf-8", "replace").replace(self._service.token, "[token]")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None


def parse_session(raw: Any) -> Session:
    """Return the shown part of a session object; a wrong type raises Unreachable and names it."""
    if not isinstance(raw, dict):
        raise _malformed("a session is not an object")
    server_name = _required(raw, "server_name", str)
    pull = _optional(raw, "pull", dict) or {}
    return Session(
        id=_required(raw, "id", int),
        server_name=server_name,
        display_name=_optional(raw, "display_name", str) or server_name,
        state=_required(raw, "state", str),
        image_name=_optional(raw, "image_name", str),
        resource_group=_optional(raw, "resource_group", str),
        amount=_optional(raw, "amount", str),
        fgpu=_optional(raw, "fgpu", str),
        gpu_memory_mib=_optional(raw, "gpu_memory_mib", int),
        compute_percent=_optional(raw, "compute_percent", int),
        gpus=[_parse_gpu(gpu) for gpu in _list(raw, "gpus")],
        wait_reason=_optional(raw, "wait_reason", str),
        wait_text=_optional(raw, "wait_text", str),
        position=_optional(raw, "position", int),
        ahead=_optional(raw, "ahead", int),
        expected_start_at_s=_optional(raw, "expected_start_at_s", int),
        forecast_basis=_optional(raw, "forecast_basis", str),
        pull_text=_optional(pull, "text", str),
        message=_optional(raw, "message", str),
        warning=_optional(raw, "warning", str),
        ends_at_s=_optional(raw, "ends_at_s", int),
        can_keep=bool(_optional(raw, "can_keep", bool)),
        url=_optional(raw, "url", str),
        pending_url=_optional(raw, "pending_url", str),
        simulated=_required(raw, "simulated", bool),
    )


def _parse_gpu(raw: Any) -> Gpu:
    if not isinstance(raw, dict):
        raise _malformed("a GPU is not an object")
    return Gpu(
        uuid=_required(raw, "uuid", str),
        model=_optional(raw, "model", str),
        fgpu=_optional(raw, "fgpu", str),
        memory_mib=_optional(raw, "memory_mib", int),
        compute_percent=_optional(raw, "compute_percent", int),
        simulated=_required(raw, "simulated", bool),
    )


def _is_mine(raw: Any) -> bool:
    # An administrator's answer could hold others' sessions; they are not for this panel.
    return not isinstance(raw, dict) or raw.get("mine") is not False


def _optional(raw: dict[str, Any], name: str, kind: type) -> Any:
    value = raw.get(name)
    # bool is a kind of int in Python, but `true` is no number in JSON.
    if value is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
        return value
    raise _malformed(f"{name} is not of the type that docs/rest-api.md gives it")


def _required(raw: dict[str, Any], name: str, kind: type) -> Any:
    value = _optional(raw, name, kind)
    if value is None:
        raise _malformed(f"{name} is missing")
    return value


def _list(raw: dict[str, Any], name: str) -> list[Any]:
    value = raw.get(name)
    if not isinstance(value, list):
        raise _malformed(f"{name} is not a list")
    return value


def _malformed(why: str) -> Unreachable:
    return Unreachable("bad_answer", f"The fGPU service's answer was not understood: {why}.")


def _no_answer(error: Exception) -> Unreachable:
    # Only the kind of failure is told: the text of a connection error may hold addresses.
    if isinstance(error, HTTPTimeoutError):
        return Unreachable("slow", "The fGPU service did not answer in time.", status=504)
    return Unreachable("down", "The fGPU service cannot be reached.")


def _error(status: int, body: Any) -> ServiceError:
    given = body.get("error") if isinstance(body, dict) else None
    given = given if isinstance(given, dict) else {}
    code, message, field = given.get("code"), given.get("message"), given.get("field")
    code = code if isinstance(code, str) else None
    message = message if isinstance(message, str) else None
    field = field if isinstance(field, str) else None
    if status in (401, 403):
        text = message or "The fGPU service does not accept this server's token."
        return Forbidden(code or "forbidden", text, status=403, field=field)
    if 400 <= status < 500:
        text = message or f"The fGPU service refused the call ({status})."
        return Refused(code or "refused", text, status=status, field=field)
    return Unreachable(code or "failing", f"The fGPU service is failing (status {status}).")
