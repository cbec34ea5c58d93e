"""Tells this server's kernels what its tabs see, without giving them the server's token.

A Unix socket in Linux' abstract namespace: it is no file that a read-only or saved file system
would have to hold, and it goes with the server. Who connects gets the status as one JSON object,
and only processes of the server's own user do.
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
    """Listens from its making until `close`; the kernels started meanwhile know its name.

    Raises OSError where there are no such sockets (elsewhere than on Linux).
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
        """Listen no more. What is being answered is cut off."""
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
            # Who does not read must not keep it for ever.
            sending = asyncio.ensure_future(
                asyncio.get_running_loop().sock_sendall(connection, answer)
            )
            try:
                await asyncio.wait([sending], timeout=SEND_TIMEOUT_S)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
