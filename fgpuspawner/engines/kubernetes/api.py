"""A client of the cluster's API, in plain JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
from kubernetes_asyncio.client import Configuration
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
RENEWED_EVERY_S = 60.0
JSON = "application/json"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
"""kubectl's view: a short row for each object."""
METADATA = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
NO_ANSWER = (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError, ConfigException)
"""ConfigException: the token that the cluster gave the Hub cannot be read now."""


class Refused(FGPUError):
    """The cluster refuses a call; ``status`` is the HTTP status."""

    code = "cluster_refused"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
        found.refresh_api_key_hook = renewing()
    return found


def renewing() -> Callable[[Configuration], Coroutine[Any, Any, None]]:
    """Return a hook that reads the kubeconfig again every minute: it may name a program that logs in."""
    due_s = time.monotonic() + RENEWED_EVERY_S

    async def renew(reached: Configuration) -> None:
        nonlocal due_s
        if time.monotonic() < due_s:
            return
        due_s = time.monotonic() + RENEWED_EVERY_S
        fresh = Configuration()
        await load_kube_config(client_configuration=fresh)
        reached.api_key = fresh.api_key

    return renew


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
        self._client: WsApiClient | None = None

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            if (connector := client.rest_client.pool_manager.connector) is not None:
                # TLS would wait for half a minute for the answer of a cluster that is silent.
                await connector.close(abort_ssl=True)
            await client.close()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        accept: str = JSON,
    ) -> dict[str, Any]:
        """Return the answer to one request."""
        async with self._request(method, path, query, body=body, accept=accept) as answer:
            found = json.loads(await answer.read())
        if not isinstance(found, dict) or not found.keys() & {"kind", "gitVersion"}:
            raise EngineSilent("something else answers in place of the cluster's API")
        return found

    async def text(self, path: str, query: Sequence[tuple[str, str]]) -> bytes:
        """Return a text, such as a log."""
        async with self._request("GET", path, query, accept="*/*") as answer:
            return await answer.read()

    async def make(self, path: str, manifest: Manifest) -> None:
        """Make an object; one of this name may be there already."""
        with _unless(CONFLICT):
            await self.ask("POST", path, body=dict(manifest))

    async def delete(self, path: str, *, grace_s: int = 1, uid: str | None = None) -> None:
        """Delete a pod; it may be gone already, or with ``uid`` be another one by now.

        The grace is never 0: the API would forget the pod at once, while its processes run on.
        """
        more = {} if uid is None else {"preconditions": {"uid": uid}}
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": max(1, grace_s), **more}
        with _unless(CONFLICT, NOT_FOUND):
            await self.ask("DELETE", path, body=options)

    async def pages(
        self, path: str, query: Sequence[tuple[str, str]] = (), *, limit: int = 0, accept: str = JSON
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the list at a path page by page, all as of one instant."""
        after = ""
        while True:
            more = [("limit", str(limit or PAGE)), *([("continue", after)] if after else [])]
            try:
                page = await self.ask("GET", path, query=(*query, *more), accept=accept)
            except Refused as e:
                if e.status == GONE:
                    raise EngineSilent(f"the cluster's API is too slow: {e}") from e
                raise
            yield page
            after = str((page.get("metadata") or {}).get("continue") or "")
            if not after:
                return

    async def listed(
        self, path: str, query: Sequence[tuple[str, str]] = (), *, keep: Callable[[Manifest], T | None]
    ) -> list[T]:
        """Return ``keep(object)`` for each object at a path, without the Nones."""
        return [
            kept
            async for page in self.pages(path, query)
            for item in page.get("items") or ()
            if (kept := keep(item)) is not None
        ]

    async def names(self, path: str, query: Sequence[tuple[str, str]]) -> set[str]:
        """Return the names of the objects at a path; the API sends little more than the names."""
        found: set[str] = set()
        rows = (*query, ("includeObject", "None"))
        async for page in self.pages(path, rows, limit=NAMES_PAGE, accept=TABLE):
            columns = [column["name"] for column in page.get("columnDefinitions") or ()]
            if "Name" not in columns:
                raise EngineSilent("the cluster's API lists no names")
            at = columns.index("Name")
            found.update(str(row["cells"][at]) for row in page.get("rows") or ())
        return found

    async def version(self) -> tuple[int, int]:
        """Return the cluster's version, such as (1, 34)."""
        found = await self.ask("GET", "/version")
        # Clouds write "28+".
        return int(found["major"]), int(str(found["minor"]).rstrip("+"))

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
        async with self._request("GET", path, (*query, *more), patience=WATCH_TIMEOUT) as answer:
            async for line in answer.content:
                event = json.loads(line)
                found = event["object"]
                if event["type"] == "ERROR":
                    raise _refusal(int(found.get("code", 500)), json.dumps(found).encode())
                yield event

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
                    # Without an exit status the command could not be run.
                    with contextlib.suppress(LookupError, ValueError):
                        status = WsApiClient.parse_error_data(data[1:])
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
        query = [("command", word) for word in command]
        query += [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("stdin", "true")] if stdin else []
        headers: dict[str, str] = {}
        url = f"{self._configuration.host}{pod}/exec"
        try:
            client = await self._logged_in(headers)
            opened = await client.request(
                "GET", url, query_params=query, headers=headers, _preload_content=False
            )
            assert not isinstance(opened, WsResponse)
            return await opened
        except aiohttp.WSServerHandshakeError as e:
            raise Refused(e.status, f"HTTP {e.status}") from e
        except NO_ANSWER as e:
            raise _silent(e) from e

    async def _logged_in(self, headers: dict[str, str]) -> WsApiClient:
        """Return the client, with the token in ``headers``; for each call, because tokens change."""
        if self._client is None:
            self._client = WsApiClient(self._configuration)
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        return self._client

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        *,
        body: object = None,
        accept: str = JSON,
        patience: aiohttp.ClientTimeout | float = ANSWERS_WITHIN_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Accept": accept, "Content-Type": JSON}
        try:
            client = await self._logged_in(headers)
            async with await client.rest_client.request(
                method,
                f"{self._configuration.host}{path}" + (f"?{urlencode(query)}" if query else ""),
                headers=headers,
                body=body,
                _preload_content=False,
                _request_timeout=patience,
            ) as answer:
                if answer.status >= 400:
                    raise _refusal(answer.status, await answer.read())
                try:
                    yield answer
                except BaseException:
                    # Not read to its end, as a watch that is cut: TLS would wait for the cluster's answer.
                    if answer.connection is not None and answer.connection.transport is not None:
                        answer.connection.transport.abort()
                    raise
        except NO_ANSWER as e:
            raise _silent(e) from e


@contextlib.contextmanager
def _unless(*passes: int) -> Iterator[None]:
    """Let refusals with these statuses pass."""
    try:
        yield
    except Refused as e:
        if e.status not in passes:
            raise


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
            return Refused(status, "Unauthorized")
        return EngineSilent(f"something else answers in place of the cluster's API: HTTP {status}")
    words = " ".join(str(said.get("message") or said.get("reason") or status).split())
    return Refused(status, words[:LONGEST_WORDS])
