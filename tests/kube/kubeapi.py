"""A small client of a cluster's API for tests, with Python's standard library only.

kubeapi.py KUBECONFIG SECONDS   make the namespace ``jhub`` with the service account ``hub``, wait until pods can run, and
                                print a token of that account. For tests/kube/cluster.sh.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

NAMESPACE = "jhub"
ACCOUNT = "hub"
DAY_S = 86400
T = TypeVar("T")


async def disconnected() -> None:
    """Wait until all connections of the running event loop are closed.

    One with TLS that was cut, or was a channel, is closed when the cluster has answered. If the loop ends before that, a
    later test fails with a ResourceWarning.
    """
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        # What is left is the loop's own socket.
        while len(selector.get_map()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class ApiError(Exception):
    """The API refuses a call; ``status`` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass(frozen=True)
class KubeApi:
    """The API as one user has it."""

    host: str
    token: str
    tls: ssl.SSLContext
    timeout_s: float = 20

    @classmethod
    def of(cls, kubeconfig: Path) -> KubeApi:
        """Return the API as a kubeconfig says that ``cluster.sh`` wrote."""
        config = json.loads(kubeconfig.read_text())
        cluster = config["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        return cls(
            urlsplit(cluster["server"]).netloc,
            config["users"][0]["user"]["token"],
            ssl.create_default_context(cadata=authority),
        )

    def text(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Sequence[tuple[str, str]] = (),
        content: str = "application/json",
    ) -> str:
        """Return the answer to one call.

        Raises:
            ApiError: it is refused.
            OSError, http.client.HTTPException: there is no answer.
        """
        connection = http.client.HTTPSConnection(self.host, context=self.tls, timeout=self.timeout_s)
        try:
            headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content}
            asked = f"{path}?{urlencode(query)}" if query else path
            connection.request(method, asked, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            said = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ApiError(answer.status, said)
        return said

    def call(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        """Return what is in the answer to one call. Raises as `text` does."""
        return json.loads(self.text(method, path, body, **more))

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def ensure(self, path: str, body: object) -> None:
        """Make a thing, if there is none of its name."""
        try:
            self.call("POST", path, body)
        except ApiError as e:
            if e.status != 409:
                raise


def wait_for(what: str, found: Callable[[], T | None], *, timeout_s: float) -> T:
    """Return what is found as soon as it is; calls that fail are made again.

    Raises:
        TimeoutError: it was not found in time. It says what the last call said.
    """
    deadline_s = time.monotonic() + timeout_s
    last: object = "nothing"
    while time.monotonic() < deadline_s:
        try:
            result = found()
            if result is not None:
                return result
        except (ApiError, OSError, http.client.HTTPException) as e:
            last = e
        time.sleep(0.2)
    raise TimeoutError(f"{what} after {timeout_s:.0f} s; the last error: {last}")


def node_ready(api: KubeApi) -> bool | None:
    """Whether the cluster's one node takes pods; None is not yet."""
    nodes = api.get("/api/v1/nodes")["items"]
    conditions = {c["type"]: c["status"] for n in nodes for c in n["status"].get("conditions", ())}
    taints = [taint for n in nodes for taint in n["spec"].get("taints", ())]
    return True if conditions.get("Ready") == "True" and not taints else None


def make_ready(api: KubeApi, timeout_s: float) -> str:
    """Make what tests find in a new cluster, and return the Hub's token."""
    wait_for("no answer of the API", lambda: api.text("GET", "/readyz"), timeout_s=timeout_s)
    api.ensure("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    api.ensure(accounts, {"metadata": {"name": ACCOUNT}})
    # Without it no pod can be made.
    wait_for("no default account", lambda: api.get(f"{accounts}/default").get("secrets"), timeout_s=timeout_s)
    wait_for("the node is not ready", lambda: node_ready(api), timeout_s=timeout_s)
    asked = {"spec": {"expirationSeconds": DAY_S}}
    return str(api.call("POST", f"{accounts}/{ACCOUNT}/token", asked)["status"]["token"])


if __name__ == "__main__":
    print(make_ready(KubeApi.of(Path(sys.argv[1])), float(sys.argv[2])))
