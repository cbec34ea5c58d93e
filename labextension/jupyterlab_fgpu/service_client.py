"""Calls to the service `fgpu` (docs/rest-api.md) with this server's own token, and its answers.

The token is put into the request's header and nowhere else: errors and log lines never hold it,
and an answer that repeats it is blanked before it is read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tornado.httpclient import AsyncHTTPClient, HTTPError, HTTPRequest, HTTPResponse
from tornado.simple_httpclient import HTTPTimeoutError, SimpleAsyncHTTPClient

from .environment import Service

API = "api/v1/"
MAX_ANSWER_BYTES = 4 * 1024 * 1024
RESIZED_WITHIN_S = 20.0
LOOK_EVERY_S = 0.3


SCHEMAS: dict[str, Any] = json.loads(
    Path(__file__).with_name("service_schema.json").read_text(encoding="utf-8")
)
"""The schemas of the API's objects; written by the service's own build."""
TYPES = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "string": str,
}


class ServiceError(Exception):
    """A call without a usable answer. `message` is safe to show; `code` is stable."""

    def __init__(self, code: str, message: str, *, status: int = 502, field: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.field = field


class Unreachable(ServiceError):
    """The service is down, too slow, failing, or its answer is not understood."""


class Forbidden(ServiceError):
    """The service does not accept this server's token for this call."""


class Refused(ServiceError):
    """The service understood the call and said no; its code and message are passed on."""


Session = dict[str, Any]
"""An object `Session` of the API, as all others below; service_schema.json has its fields."""


def parse(name: str, raw: Any) -> dict[str, Any]:
    """Return an object of the API by its known fields; a wrong type raises Unreachable."""
    return dict(_value({"$ref": name}, raw, name))


def _value(schema: dict[str, Any], raw: Any, name: str) -> Any:
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        # Null is allowed, and an older service's missing field counts as null.
        return None if raw is None else _value(schema["anyOf"][0], raw, name)
    if raw is None:
        raise malformed(f"{name} is missing")
    kind = schema["type"]
    # bool is a kind of int in Python, but `true` is no number in JSON.
    if not isinstance(raw, TYPES[kind]) or isinstance(raw, bool) != (kind == "boolean"):
        raise malformed(f"{name} is not of the type that docs/rest-api.md gives it")
    if kind == "array":
        return [_value(schema["items"], one, name) for one in raw]
    if kind == "object":
        given = {**defaults(schema), **raw}
        return {key: _value(own, given.get(key), key) for key, own in schema["properties"].items()}
    return raw


def defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what stands for fields that an older service does not have yet."""
    return {key: own["default"] for key, own in schema["properties"].items() if "default" in own}


def is_mine(raw: Any) -> bool:
    """Return whether a session of the answer is the caller's own."""
    # An administrator's answer could hold others' sessions; they are not for this panel.
    return not isinstance(raw, dict) or raw.get("mine") is not False


def items(raw: dict[str, Any], name: str) -> list[Any]:
    """Return a member that must be a list."""
    value = raw.get(name)
    if not isinstance(value, list):
        raise malformed(f"{name} is not a list")
    return value


def malformed(why: str) -> Unreachable:
    """Return what to raise for an answer that this version does not understand."""
    return Unreachable("bad_answer", f"The fGPU service's answer was not understood: {why}.")


class ServiceClient:
    """The few calls that this extension makes, each within `timeout_s`."""

    def __init__(self, service: Service, *, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._http: AsyncHTTPClient | None = None

    async def me(self) -> dict[str, Any]:
        """Return which server the token belongs to, its owner, and the administrator's banner."""
        return parse("Me", await self._call("GET", "me"))

    async def sessions(self) -> list[Session]:
        """Return the caller's own live sessions."""
        answer = await self._call("GET", "sessions")
        return [parse("Session", raw) for raw in items(answer, "sessions") if is_mine(raw)]

    async def queue(self, group: str | None) -> dict[str, Any]:
        """Return the length of one resource group's queue (the service's default if None)."""
        query = "" if group is None else f"?group={quote(group, safe='')}"
        return parse("Queue", await self._call("GET", "queue" + query))

    async def capacity(self) -> dict[str, Any]:
        """Return capacity, and what the caller holds and could get, as the API has it."""
        return parse("Capacity", await self._call("GET", "capacity"))

    async def history(self, session_id: int) -> dict[str, Any]:
        """Return a session's measurements of the last minutes."""
        return parse("SessionMeter", await self._call("GET", f"sessions/{session_id}/meter"))

    async def advice(self, image: str) -> str | None:
        """Return what the caller's last sessions of an image would have needed, in words."""
        answer = await self._call("GET", f"advice?image={quote(image, safe='')}")
        texts = [a.get("text") for a in items(answer, "advice") if isinstance(a, dict)]
        return next((text for text in texts if isinstance(text, str)), None)

    async def forecast(self, options: Mapping[str, str], *, instead_of: int | None = None) -> dict[str, Any]:
        """Return the forecast of a request with these options, as the API has it.

        ``instead_of`` is a session to be ended first; None: in addition to all sessions.
        """
        more = {} if instead_of is None else {"instead_of": str(instead_of)}
        return await self._call("GET", f"forecast?{urlencode({**options, **more})}")

    async def stop(self, session_id: int) -> Session:
        """End or cancel a session with this server's rights, and return it as it is then."""
        return await self._session("DELETE", session_id)

    async def request(self, action: str, session_id: int) -> Session:
        """Ask for something, such as `keep` or `park`, and return the session as it is then."""
        return await self._session("POST", session_id, f"/{action}")

    async def rename(self, session_id: int, name: object) -> Session:
        """Give a session of the user another name, and return it."""
        return await self._change(session_id, {"name": name})

    async def setup(self, session_id: int) -> dict[str, Any]:
        """Return the session's own ``variables`` by name, and its start ``script``."""
        answer = await self._call("GET", f"sessions/{session_id}/setup")
        variables, script = answer.get("variables"), answer.get("script")
        named = isinstance(variables, dict) and all(isinstance(value, str) for value in variables.values())
        if not named or not isinstance(script, str):
            raise malformed("variables and script are not of the type that docs/rest-api.md gives them")
        return {"variables": variables, "script": script}

    async def resize(self, session_id: int, amount: Mapping[str, Any]) -> Session:
        """Ask for another amount of the session's GPU, and return the session once it has it.

        If the Hub takes longer than some seconds, the request stays. Raises Refused if the
        session keeps its amount.
        """
        session = await self._change(session_id, amount)
        end_s = time.monotonic() + RESIZED_WITHIN_S
        while (session["resize"] or {}).get("state") == "ASKED" and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_EVERY_S)
            session = await self._session("GET", session_id)
        resize = session["resize"]
        if resize is None:
            raise Refused("not_resized", "The session has ended.", status=409)
        if resize["state"] == "REFUSED":
            text = resize["message"] or "The session keeps what it has."
            raise Refused("not_resized", text, status=409)
        return session

    async def _change(self, session_id: int, sent: Mapping[str, Any]) -> Session:
        try:
            return await self._session("PATCH", session_id, sent=sent)
        except Refused as error:
            # Without its option's name, which Lab does not use.
            text = error.message.removeprefix(f"{error.field}: ")
            raise Refused(error.code, text, status=error.status, field=error.field) from None

    async def _session(
        self, method: str, session_id: int, action: str = "", sent: Mapping[str, Any] | None = None
    ) -> Session:
        answer = await self._call(method, f"sessions/{session_id}{action}", sent)
        return parse("Session", answer.get("session"))

    def _client(self) -> AsyncHTTPClient:
        if self._http is None:
            # Made at the first call, when the event loop that it belongs to runs; an instance of
            # our own, because others may configure the shared one.
            self._http = SimpleAsyncHTTPClient(force_instance=True, max_body_size=MAX_ANSWER_BYTES)
        return self._http

    async def _call(self, method: str, path: str, sent: Mapping[str, Any] | None = None) -> dict[str, Any]:
        body = b"" if method == "POST" else None
        headers = {"Accept": "application/json", "Authorization": f"token {self._service.token}"}
        if sent is not None:
            body = json.dumps(sent).encode()
            headers["Content-Type"] = "application/json"
        request = HTTPRequest(
            self._service.url + API + path,
            method=method,
            body=body,
            headers=headers,
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
        found = self._body(response)
        if 200 <= response.code < 300:
            if not isinstance(found, dict):
                raise malformed("it is not a JSON object")
            return found
        raise _error(response.code, found)

    def _body(self, response: HTTPResponse) -> Any:
        text = response.body.decode("utf-8", "replace").replace(self._service.token, "[token]")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None


def _no_answer(error: Exception) -> Unreachable:
    # Only the kind of failure: the text of a connection error may contain addresses.
    if isinstance(error, HTTPTimeoutError):
        return Unreachable("slow", "The fGPU service did not answer in time.", status=504)
    return Unreachable("down", "The fGPU service cannot be reached.")


def _error(status: int, body: Any) -> ServiceError:
    given = body.get("error") if isinstance(body, dict) else None
    given = given if isinstance(given, dict) else {}
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    code, message, field = map(texts.get, ("code", "message", "field"))
    if status in (401, 403):
        text = message or "The fGPU service does not accept this server's token."
        return Forbidden(code or "forbidden", text, status=403, field=field)
    if 400 <= status < 500:
        text = message or f"The fGPU service refused the call ({status})."
        return Refused(code or "refused", text, status=status, field=field)
    return Unreachable(code or "failing", f"The fGPU service is failing (status {status}).")
