"""A client of the cluster's API, in plain JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException, load_kube_config
from kubernetes_asyncio.stream import WsApiClient
from kubernetes_asyncio.stream.ws_client import ERROR_CHANNEL, STDOUT_CHANNEL, WsResponse
from kubespawner.clients import load_config

from fgpu_scheduler import BadSettings, FGPUError
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.kubernetes.dialects.base import Manifest
from fgpuspawner.isolation.report import Answer

T = TypeVar("T")

ANSWERS_WITHIN_S = 10.0
WATCHED_FOR_S = 45
"""Each watch is opened again after this time: a launch waits this long at most when a connection dies silently."""
WATCH_TIMEOUT = aiohttp.ClientTimeout(
    total=None, sock_connect=ANSWERS_WITHIN_S, sock_read=WATCHED_FOR_S + ANSWERS_WITHIN_S
)
LONGEST_WORDS = 300
PAGE = 100
"""Parsing a page takes some tens of milliseconds, during which nothing else runs; thousands of pods took seconds."""
NAMES_PAGE = 2000
NOT_LOGGED_IN, FORBIDDEN, NOT_FOUND, CONFLICT, GONE = 401, 403, 404, 409, 410
RENEWED_EVERY_S = 10.0
"""At least this long passes between two logins, since an API may refuse every token."""
JSON = "application/json"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
"""kubectl's view: a short row for each object."""
NO_ANSWER = (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError, ConfigException)
"""ConfigException: the token that the cluster gave the Hub cannot be read now."""


class Refused(FGPUError):
    """The cluster refuses a call; ``reason`` is the API's code for why (``NotFound``), ``status`` the HTTP status."""

    code = "cluster_refused"

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


def configuration(**settings: Any) -> Configuration:
    """Return the connection to the API that KubeSpawner would use. Blocks.

    It uses the service account of the Hub's own pod, else a kubeconfig (``KUBECONFIG``). ``settings`` are KubeSpawner's
    that `load_config` takes.

    Raises:
        BadSettings: there is neither, or it cannot be read.
    """
    try:
        load_config(**settings)
    except (ConfigException, OSError, ValueError, KeyError, TypeError) as e:
        raise BadSettings(
            f"the cluster's API cannot be reached: {e}; run the Hub in a pod with a service account, or name a file in "
            "the environment variable KUBECONFIG"
        ) from e
    found = Configuration.get_default_copy()
    if found.refresh_api_key_hook is None:
        # For a pod's own token the library sets a hook.
        found.refresh_api_key_hook = of_kubeconfig
    return found


def of_kubeconfig(_: Configuration) -> None:
    """Mark a configuration of a kubeconfig: `Api` renews its token, by the login program that the kubeconfig names."""


def run_blocking(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a new event loop and return its result. Blocks; may be called where another loop runs."""
    with ThreadPoolExecutor(1, thread_name_prefix="fgpu-cluster") as threads:
        return threads.submit(lambda: asyncio.run(call())).result()


async def refuses_anonymous(reached: Configuration) -> bool:
    """Return whether the API refuses to list pods without a login; raises EngineSilent if it does not answer."""
    anonymous = Configuration()
    for name in ("host", "verify_ssl", "ssl_ca_cert"):
        setattr(anonymous, name, getattr(reached, name))
    async with Api(anonymous) as api:
        try:
            await api.ask("GET", "/api/v1/pods", query=[("limit", "1")])
        except Refused as e:
            return e.status in (NOT_LOGGED_IN, FORBIDDEN)
    return False


class Api:
    """A client for use in one running event loop.

    Calls raise `Refused` if the cluster answers and refuses, and `EngineSilent` if it does not answer in time, or
    something else answers.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._login = asyncio.Lock()
        self._no_login_before_s = 0.0
        self._client: ApiClient | None = None
        self._exec_client: WsApiClient | None = None

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        for client in (self._client, self._exec_client):
            if client is not None:
                await client.close()
        self._client = self._exec_client = None

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content: str = JSON,
        accept: str = JSON,
    ) -> dict[str, Any]:
        """Return the answer to one request."""
        try:
            found = json.loads(await self._read(method, path, query, body, content, accept))
        except NO_ANSWER as e:
            raise _silent(e) from e
        if not isinstance(found, dict) or not found.keys() & {"kind", "gitVersion"}:
            raise EngineSilent("something else answers in place of the cluster's API")
        return found

    async def text(self, path: str, query: Sequence[tuple[str, str]]) -> bytes:
        """Return a text, such as a log."""
        try:
            return await self._read("GET", path, query, None, JSON, "*/*")
        except NO_ANSWER as e:
            raise _silent(e) from e

    async def _read(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        body: object,
        content: str,
        accept: str,
    ) -> bytes:
        async def call() -> bytes:
            async with (
                asyncio.timeout(ANSWERS_WITHIN_S),
                self._request(method, path, query, body, content, accept) as answer,
            ):
                text = await answer.read()
            if answer.status >= 400:
                raise _refusal(answer.status, text)
            return text

        return await self._logged_in(call)

    async def make(self, path: str, manifest: Manifest) -> None:
        """Make an object; one of this name may be there already."""
        try:
            await self.ask("POST", path, body=dict(manifest))
        except Refused as e:
            if e.status != CONFLICT:
                raise

    async def delete(self, path: str, *, grace_s: int = 1, uid: str | None = None) -> None:
        """Delete a pod; it may be gone already, or with ``uid`` be another one by now.

        The grace is never 0: the API would forget the pod at once, while its processes run on.
        """
        more = {} if uid is None else {"preconditions": {"uid": uid}}
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": max(1, grace_s), **more}
        try:
            await self.ask("DELETE", path, body=options)
        except Refused as e:
            if e.status not in (CONFLICT, NOT_FOUND):
                raise

    async def _logged_in(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call, which is repeated once with a new login if the API refuses the token."""
        token = self._token
        try:
            return await call()
        except Refused as e:
            if e.status != NOT_LOGGED_IN or self._configuration.refresh_api_key_hook is not of_kubeconfig:
                raise
            async with self._login:
                if token == self._token:
                    if time.monotonic() < self._no_login_before_s:
                        raise
                    self._no_login_before_s = time.monotonic() + RENEWED_EVERY_S
                    fresh = Configuration()
                    try:
                        await load_kube_config(client_configuration=fresh)
                    except NO_ANSWER as failed:
                        raise _silent(failed) from failed
                    self._configuration.api_key = fresh.api_key
        return await call()

    @property
    def _token(self) -> object:
        return self._configuration.api_key.get("BearerToken")

    async def pages(
        self,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        *,
        limit: int | None = None,
        accept: str = JSON,
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the list at a path page by page, all as of one instant; refused with `GONE` if that takes too long."""
        after = ""
        while True:
            more = [("limit", str(limit or PAGE)), *([("continue", after)] if after else [])]
            page = await self.ask("GET", path, query=(*query, *more), accept=accept)
            yield page
            after = str((page.get("metadata") or {}).get("continue") or "")
            if not after:
                return

    async def listed(
        self, path: str, query: Sequence[tuple[str, str]] = (), *, keep: Callable[[Manifest], T | None]
    ) -> list[T]:
        """Return ``keep(object)`` for each object at a path, without the Nones."""
        every = await self._all(path, query, lambda page: map(keep, page.get("items") or ()))
        return [one for one in every if one is not None]

    async def names(self, path: str, query: Sequence[tuple[str, str]]) -> set[str]:
        """Return the names of the objects at a path; the API sends little more than the names."""

        def of_page(page: Manifest) -> list[str]:
            (at,) = (n for n, c in enumerate(page["columnDefinitions"]) if c["name"] == "Name")
            return [str(row["cells"][at]) for row in page.get("rows") or ()]

        rows = (*query, ("includeObject", "None"))
        return set(await self._all(path, rows, of_page, limit=NAMES_PAGE, accept=TABLE))

    async def _all(
        self,
        path: str,
        query: Sequence[tuple[str, str]],
        of_page: Callable[[Manifest], Iterable[T]],
        **how: Any,
    ) -> list[T]:
        try:
            return [one async for page in self.pages(path, query, **how) for one in of_page(page)]
        except NO_ANSWER as e:
            raise _silent(e) from e
        except Refused as e:
            if e.status == GONE:
                raise EngineSilent(f"the cluster's API is too slow: {e}") from e
            raise

    async def version(self) -> tuple[int, int]:
        """Return the cluster's version, such as (1, 34)."""
        found = await self.ask("GET", "/version")
        try:
            # Clouds write "28+".
            return int(found["major"]), int(str(found["minor"]).rstrip("+"))
        except NO_ANSWER as e:
            raise _silent(e) from e

    async def may(self, verb: str, resource: str, *, group: str = "", namespace: str = "") -> bool:
        """Return whether the caller has a right, in a namespace or in the whole cluster."""
        kind, _, part = resource.partition("/")
        where = {"namespace": namespace} if namespace else {}
        asked = {"verb": verb, "group": group, "resource": kind, "subresource": part, **where}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answer = await self.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=body)
        return bool(answer["status"]["allowed"])

    async def watch(
        self, path: str, query: Sequence[tuple[str, str]], version: str
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield each event after ``version`` until the API ends the watch; refused with `GONE` if it is too old."""
        more = (
            ("watch", "true"),
            ("resourceVersion", version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(WATCHED_FOR_S)),
        )
        try:
            async with self._request("GET", path, (*query, *more), patience=WATCH_TIMEOUT) as answer:
                if answer.status >= 400:
                    raise _refusal(answer.status, await answer.read())
                async for line in answer.content:
                    event = json.loads(line)
                    found = event["object"]
                    if event["type"] == "ERROR":
                        raise _refusal(int(found.get("code", 500)), json.dumps(found).encode())
                    yield event
        except NO_ANSWER as e:
            raise _silent(e) from e

    async def run(self, pod: str, container: str, command: Sequence[str], *, most_bytes: int) -> Answer:
        """Run a command in a pod's container; return its exit status and output.

        ``pod`` is its path in the API. Reading stops soon after ``most_bytes``. There is no status if the command
        could not be run or the connection was cut.
        """
        channel = await self.channel(pod, container, command)
        output = bytearray()
        status: int | None = None
        try:
            async for message in channel:
                data = message.data if isinstance(message.data, bytes) else str(message.data).encode()
                if data[:1] == bytes([STDOUT_CHANNEL]):
                    output += data[1:]
                elif data[:1] == bytes([ERROR_CHANNEL]):
                    status = _exit_status(data[1:])
                if len(output) > most_bytes:
                    break
        except NO_ANSWER as e:
            raise _silent(e) from e
        finally:
            await channel.close()
        return Answer(bytes(output[: most_bytes + 1]), status)

    async def channel(
        self, pod: str, container: str, command: Sequence[str], *, stdin: bool = False
    ) -> aiohttp.ClientWebSocketResponse[Any]:
        """Run a command as `run` does, and return the channel to it: each message begins with its stream's number."""
        return await self._logged_in(lambda: self._exec_channel(pod, container, command, stdin))

    async def _exec_channel(
        self, pod: str, container: str, command: Sequence[str], stdin: bool
    ) -> aiohttp.ClientWebSocketResponse[Any]:
        query = [("command", word) for word in command]
        query += [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("stdin", "true")] if stdin else []
        if self._exec_client is None:
            self._exec_client = WsApiClient(self._configuration)
        headers: dict[str, str] = {}
        try:
            await self._exec_client.update_params_for_auth(headers, [], ["BearerToken"])
            opened = await self._exec_client.request(
                "GET",
                f"{self._configuration.host}{pod}/exec",
                query_params=query,
                headers=headers,
                _preload_content=False,
            )
            assert not isinstance(opened, WsResponse)
            return await opened
        except aiohttp.WSServerHandshakeError as e:
            raise Refused(e.status, "", f"HTTP {e.status}") from e
        except NO_ANSWER as e:
            raise _silent(e) from e

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content: str = JSON,
        accept: str = JSON,
        patience: aiohttp.ClientTimeout | float = ANSWERS_WITHIN_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._client is None:
            self._client = ApiClient(self._configuration)
        headers = {"Accept": accept, "Content-Type": content}
        # Before each call: tokens of pods are renewed while the Hub runs.
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        answer = await self._client.rest_client.request(
            method,
            f"{self._configuration.host}{path}" + (f"?{urlencode(query)}" if query else ""),
            headers=headers,
            body=body,
            _preload_content=False,
            _request_timeout=patience,
        )
        try:
            yield answer
        finally:
            answer.close()


def _silent(error: Exception) -> EngineSilent:
    return EngineSilent(f"the cluster's API does not answer: {error or type(error).__name__}")


def _refusal(status: int, text: bytes) -> Refused | EngineSilent:
    """Return the error of an HTTP answer. It is the cluster's refusal only if it has the API's form."""
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict) or said.get("kind") != "Status":
        if status == NOT_LOGGED_IN:
            # Of a proxy that checks tokens for the cluster.
            return Refused(status, "Unauthorized", "Unauthorized")
        return EngineSilent(f"something else answers in place of the cluster's API: HTTP {status}")
    reason = str(said.get("reason", ""))
    words = " ".join(str(said.get("message") or reason or status).split())
    return Refused(status, reason, words[:LONGEST_WORDS])


def _exit_status(text: bytes) -> int | None:
    """Return a command's exit status as the API reports it; None if it could not be run."""
    said = json.loads(text)
    if said.get("status") == "Success":
        return 0
    for cause in (said.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    return None
