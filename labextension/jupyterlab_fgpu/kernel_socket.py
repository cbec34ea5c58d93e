"""Gives this server's kernels the status that its tabs see, without the server's token.

It is a Unix socket in Linux' abstract namespace, which needs no file in a read-only or saved file
system and ends with the server. Only processes of the server's own user get the status, as one
JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Awaitable, MutableMapping
from typing import Any, Callable

from tornado.netutil import add_accept_handler

from .kernel_reading import SOCKET_VARIABLE, peer_uid

SEND_TIMEOUT_S = 5.0
BACKLOG = 16


class KernelSocket:
    """Listens from creation until `close`; kernels started in that time get its name.

    Raises OSError on systems without such sockets (other than Linux).
    """

    def __init__(
        self,
        payload: Callable[[], Awaitable[dict[str, Any]]],
        env: MutableMapping[str, str] = os.environ,
    ) -> None:
        self._payload = payload
        self._tasks: set[asyncio.Task[None]] = set()
        name = f"fgpu-{secrets.token_hex(16)}"
        if not hasattr(socket, "SO_PEERCRED"):
            raise OSError("no sockets that tell whose process connects")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind("\0" + name)
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._stop_accepting = add_accept_handler(self._socket, self._accept)
        env[SOCKET_VARIABLE] = name

    def close(self) -> None:
        """Stop listening, and cut off answers under way."""
        self._stop_accepting()
        self._socket.close()
        for task in self._tasks:
            task.cancel()

    def _accept(self, connection: socket.socket, _: Any) -> None:
        if peer_uid(connection) != os.geteuid():
            connection.close()
            return
        task = asyncio.ensure_future(self._answer(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.setblocking(False)
            answer = json.dumps(await self._payload()).encode()
            # A client that does not read must not block it.
            sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(connection, answer))
            try:
                await asyncio.wait([sending], timeout=SEND_TIMEOUT_S)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
