"""Open notebooks, as a browser has them: one websocket each, through the proxy, for as long as it holds."""

from __future__ import annotations

import json
import time
import uuid
from types import TracebackType
from typing import Any

import requests
import websocket

from hubprocess import HubProcess, until

SAYS_WITHIN_S = 15


class Notebooks:
    """A websocket to the echo server of each session. A connection is opened once and never reopened."""

    def __init__(self, hub: HubProcess) -> None:
        self._hub = hub
        self._open: dict[int, websocket.WebSocket] = {}
        self.asked = 0
        self.opened = 0

    def __enter__(self) -> Notebooks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._open.values():
            connection.close()

    def open(self, user: str, session_id: int) -> None:
        """Open a user's session if that was not done yet."""
        if session_id not in self._open:
            self._open[session_id] = until(lambda: self._connected(user), what=f"{user} can connect")
            self.opened += 1

    def _connected(self, user: str) -> websocket.WebSocket | None:
        url = f"{self._hub.url.replace('http', 'ws')}/user/{user}/echo"
        try:
            return websocket.create_connection(url, timeout=SAYS_WITHIN_S)
        except (OSError, websocket.WebSocketException):
            return None  # The Hub says that it is ready just before the proxy routes to it.

    def say(self, session_id: int) -> None:
        """Ask a session something over its old connection, and look that it is that session which answers."""
        self.asked += 1
        connection = self._open[session_id]
        try:
            connection.send(f"question {self.asked}")
            answer = connection.recv()
        except (OSError, websocket.WebSocketException) as error:
            proxy = (self._hub.folder / "proxy.log").read_text(errors="replace")
            states = ", ".join(f"{name} {state}" for name, state in self._hub.states().items())
            raise AssertionError(
                f"session {session_id} at {time.strftime('%X')}: {error}; {states}; the proxy: {proxy[-3000:]}"
            ) from error
        assert answer == f"{session_id}: question {self.asked}"

    def forget(self, session_id: int) -> None:
        """Close what was open to a session that is to end."""
        connection = self._open.pop(session_id, None)
        if connection is not None:
            connection.close()

    def known(self) -> set[int]:
        """Return the sessions that are open."""
        return set(self._open)


class Kernel:
    """A kernel of a real Jupyter server, and the one websocket to it."""

    def __init__(self, hub: HubProcess, user: str, token: str) -> None:
        self._server = f"{hub.url}/user/{user}"
        self._headers = {"Authorization": f"token {token}"}
        made = until(self._made, within_s=60, what="the server starts a kernel")
        self._id = str(made["id"])
        self._connection = self.connected()

    def _made(self) -> dict[str, Any] | None:
        answer = requests.post(f"{self._server}/api/kernels", headers=self._headers, timeout=60)
        return dict(answer.json()) if answer.status_code == 201 else None

    def connected(self) -> websocket.WebSocket:
        """Return a new connection to the kernel."""
        url = f"{self._server}/api/kernels/{self._id}/channels".replace("http", "ws", 1)
        return websocket.create_connection(url, header=self._headers, timeout=60)

    def run(self, code: str) -> str:
        """Run an expression over the connection that was opened first, and return what it is."""
        return run(self._connection, code)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def run(connection: websocket.WebSocket, code: str) -> str:
    """Run an expression in a kernel and return what it is."""
    asked = uuid.uuid4().hex
    header = {
        "msg_id": asked,
        "msg_type": "execute_request",
        "username": "",
        "session": asked,
        "version": "5.3",
    }
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    connection.send(json.dumps(message))
    while True:
        said = json.loads(connection.recv())
        if said.get("parent_header", {}).get("msg_id") != asked:
            continue
        if said["msg_type"] == "execute_result":
            return str(said["content"]["data"]["text/plain"])
        assert said["msg_type"] != "error", said["content"]
