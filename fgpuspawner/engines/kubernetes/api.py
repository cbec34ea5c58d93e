"""A cluster's API, asked and answered in its own JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import ConfigException, load_kube_config
from kubernetes_asyncio.stream import WsApiClient
from kubernetes_asyncio.stream.ws_client import (
    ERROR_CHANNEL,
    STDOUT_CHANNEL,
    WsResponse,
)
from kubespawner.clients import load_config

from fgpu_scheduler import BadSettings, FGPUError
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.isolation.report import Answer

T = TypeVar("T")

Manifest = Mapping[str, Any]
"""An object as the API has it."""

ANSWERS_WITHIN_S = 10.0
WATCHED_FOR_S = 45
"""Each watch is opened again after this time. A launch waits this long at most when a connection dies silently."""
SAME = aiohttp.ClientTimeout(
    total=None, sock_connect=ANSWERS_WITHIN_S, sock_read=WATCHED_FOR_S + ANSWERS_WITHIN_S
)
LONGEST_WORDS = 300
PAGE, NAMES_PAGE = 100, 2000
NOT_LOGGED_IN, GONE = 401, 410
RENEWED_EVERY_S = 10.0
"""At least this long passes between two logins, since an API may refuse every token."""
LOOK_EVERY_S = 0.05
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
"""What kubectl shows: a row of each object."""
NO_ANSWER = (aiohttp.ClientError, OSError, TimeoutError, ValueError, ConfigException)
"""ConfigException: the token that the cluster gave the Hub cannot be read now."""


class Refused(FGPUError):
    """The cluster refuses; ``reason`` is its word for why (``NotFound``), ``status`` the HTTP status."""

    code = "cluster_refused"

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Expired(FGPUError):
    """The watched version is too old: the objects have to be listed again."""

    code = "watch_expired"


def configuration(**settings: Any) -> Configuration:
    """Return how the API is reached: as KubeSpawner reaches it. Blocks.

    By the service account of the Hub's own pod, else by a kubeconfig (``KUBECONFIG``). ``settings`` are those of
    KubeSpawner that `load_config` takes.

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
        # The client reads a pod's own token again without this.
        found.refresh_api_key_hook = Renewal()
    return found


class Renewal:
    """Reads the kubeconfig again, and runs the program that it names to log in, once the API has refused a token."""

    def __init__(self) -> None:
        self._refused = self._loading = False
        self._not_before_s = 0.0

    def refused(self) -> bool:
        """Note that the API refused the token; return whether a new login is allowed now."""
        self._refused = self._loading or time.monotonic() >= self._not_before_s
        return self._refused

    async def __call__(self, configuration: Configuration) -> None:
        """Have a token in a configuration that is about to be used.

        Raises:
            ConfigException, OSError, ValueError: there is none.
        """
        # One runs the program; the event loop of another thread may be waiting as well.
        while self._loading:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)
        if not self._refused:
            return
        self._loading = True
        try:
            fresh = Configuration()
            await load_kube_config(client_configuration=fresh)
            configuration.api_key = fresh.api_key
        finally:
            self._not_before_s = time.monotonic() + RENEWED_EVERY_S
            self._refused = self._loading = False


def at_once(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return what is asked for, in an event loop of its own. Blocks; may be called where another loop runs."""
    with ThreadPoolExecutor(1, thread_name_prefix="fgpu-cluster") as threads:
        return threads.submit(lambda: asyncio.run(ask())).result()


async def is_closed_to_strangers(reached: Configuration) -> bool:
    """Return whether the API refuses to list pods without a login.

    Raises:
        EngineSilent: it does not answer.
    """
    stranger = Configuration()
    stranger.host, stranger.verify_ssl, stranger.ssl_ca_cert = (
        reached.host,
        reached.verify_ssl,
        reached.ssl_ca_cert,
    )
    api = Api(stranger)
    try:
        await api.ask("GET", "/api/v1/pods", query=[("limit", "1")])
    except Refused as e:
        return e.status in (401, 403)
    finally:
        await api.close()
    return False


class Api:
    """To be used in one running event loop.

    Each call raises `Refused` where the cluster answers and refuses, and `EngineSilent` where it does not answer in time,
    or something else does.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._client: ApiClient | None = None
        self._commands: WsApiClient | None = None

    async def close(self) -> None:
        """Close what is open."""
        for client in (self._client, self._commands):
            if client is not None:
                await client.close()
        self._client = self._commands = None

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content: str = "application/json",
        accept: str = "application/json",
    ) -> dict[str, Any]:
        """Return the answer to one request."""
        token = self._token
        try:
            for is_first in (True, False):
                async with (
                    asyncio.timeout(ANSWERS_WITHIN_S),
                    self._asked(method, path, query, body, content, accept=accept) as answer,
                ):
                    text, status = await answer.read(), answer.status
                if not (is_first and status == NOT_LOGGED_IN and self._may_log_in_again(token)):
                    break
            if status >= 400:
                raise _refusal(status, text)
            found = json.loads(text)
        except NO_ANSWER as e:
            raise _silent(e) from e
        if not isinstance(found, dict) or "kind" not in found:
            raise EngineSilent("something else answers in place of the cluster's API")
        return found

    @property
    def _token(self) -> object:
        return self._configuration.api_key.get("BearerToken")

    def _may_log_in_again(self, token: object) -> bool:
        """Return whether a call that was refused with this token may have another one now."""
        hook = self._configuration.refresh_api_key_hook
        return isinstance(hook, Renewal) and (token != self._token or hook.refused())

    async def pages(
        self,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        *,
        limit: int | None = None,
        accept: str = "application/json",
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield what is at a path of the API, a page at a time, all as it was at one instant.

        A page is read in some tens of milliseconds, in which nothing else runs: thousands of pods at once took seconds.

        Raises:
            Expired: the API no longer has the state of that instant, since reading took too long.
        """
        after = ""
        while True:
            more = [("limit", str(limit or PAGE)), *([("continue", after)] if after else [])]
            try:
                page = await self.ask("GET", path, query=(*query, *more), accept=accept)
            except Refused as e:
                if e.status == GONE:
                    raise Expired(str(e)) from e
                raise
            yield page
            after = str((page.get("metadata") or {}).get("continue") or "")
            if not after:
                return

    async def listed(
        self, path: str, query: Sequence[tuple[str, str]] = (), *, keep: Callable[[Manifest], T | None]
    ) -> list[T]:
        """Return what is kept of each object at a path of the API."""
        try:
            pages = self.pages(path, query)
            every = [keep(item) async for page in pages for item in page.get("items") or ()]
        except Expired as e:
            raise EngineSilent(f"the cluster's API is too slow: {e}") from e
        return [one for one in every if one is not None]

    async def names(self, path: str, query: Sequence[tuple[str, str]]) -> set[str]:
        """Return the names of what is at a path of the API now; the API writes nothing else of it, or little."""
        found: set[str] = set()
        try:
            rows = (*query, ("includeObject", "None"))
            async for page in self.pages(path, rows, limit=NAMES_PAGE, accept=TABLE):
                if page["kind"] == "Table":
                    (at,) = (n for n, c in enumerate(page["columnDefinitions"]) if c["name"] == "Name")
                    found |= {str(row["cells"][at]) for row in page.get("rows") or ()}
                else:
                    found |= {str(item["metadata"]["name"]) for item in page.get("items") or ()}
        except (Expired, KeyError, IndexError, TypeError, ValueError) as e:
            raise EngineSilent(f"what is in the cluster cannot be told: {e or type(e).__name__}") from e
        return found

    async def version(self) -> tuple[int, int]:
        """Return the cluster's version, such as (1, 34)."""
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S), self._asked("GET", "/version") as answer:
                text = await answer.read()
                if answer.status >= 400:
                    raise _refusal(answer.status, text)
                found = json.loads(text)
                # Clouds write "28+".
                return int(found["major"]), int(str(found["minor"]).rstrip("+"))
        except (*NO_ANSWER, KeyError, TypeError) as e:
            raise _silent(e) from e

    async def watch(
        self, path: str, query: Sequence[tuple[str, str]], version: str
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield each event after ``version`` until the API ends it.

        Raises:
            Expired: it is too long ago.
        """
        more = (
            ("watch", "true"),
            ("resourceVersion", version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(WATCHED_FOR_S)),
        )
        try:
            async with self._asked("GET", path, (*query, *more), None, "application/json", SAME) as answer:
                if answer.status >= 400:
                    raise _refusal(answer.status, await answer.read())
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _refusal(
                            int(event["object"].get("code", 500)), json.dumps(event["object"]).encode()
                        )
                    yield event
        except Refused as e:
            if e.status == GONE:
                raise Expired(str(e)) from e
            raise
        except (*NO_ANSWER, KeyError, TypeError) as e:
            raise _silent(e) from e

    async def run(self, pod: str, container: str, command: Sequence[str], *, most_bytes: int) -> Answer:
        """Run a command in a pod's container; return its exit status and output.

        ``pod`` is its path in the API. Reading stops soon after ``most_bytes``. There is no status if the command
        could not be run or the connection was cut.
        """
        token = self._token
        try:
            channel = await self._opened(pod, container, command)
        except Refused as e:
            if e.status != NOT_LOGGED_IN or not self._may_log_in_again(token):
                raise
            channel = await self._opened(pod, container, command)
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

    async def _opened(
        self, pod: str, container: str, command: Sequence[str]
    ) -> aiohttp.ClientWebSocketResponse[Any]:
        query = [("command", word) for word in command]
        query += [("container", container), ("stdout", "true"), ("stderr", "true")]
        if self._commands is None:
            self._commands = WsApiClient(self._configuration)
        headers: dict[str, str] = {}
        try:
            await self._commands.update_params_for_auth(headers, [], ["BearerToken"])
            opened = await self._commands.request(
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
    async def _asked(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content: str = "application/json",
        patience: aiohttp.ClientTimeout | None = None,
        accept: str = "application/json",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._client is None:
            self._client = ApiClient(self._configuration)
        headers = {"Accept": accept, "Content-Type": content}
        # Asked each time: tokens of pods are renewed while the Hub runs.
        await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        answer = await self._client.rest_client.request(
            method,
            f"{self._configuration.host}{path}" + (f"?{urlencode(query)}" if query else ""),
            headers=headers,
            body=body,
            _preload_content=False,
            _request_timeout=patience or ANSWERS_WITHIN_S,
        )
        try:
            yield answer
        finally:
            answer.close()


def _silent(error: Exception) -> EngineSilent:
    return EngineSilent(f"the cluster's API does not answer: {error or type(error).__name__}")


def _refusal(status: int, text: bytes) -> Refused | EngineSilent:
    """Return what an answer says that is no success. Only the cluster itself refuses, and says so in its own form."""
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict) or said.get("kind") != "Status":
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
