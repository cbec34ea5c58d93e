"""Connections to other machines that end when the machine is gone.

A cable that is cut says nothing: without this the other end would be waited for, for as long as it may be silent.
"""

from __future__ import annotations

import socket
from typing import Any

import docker
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Options of a socket: a machine that has not answered for 50 s is gone."""


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        options = [*HTTPConnection.default_socket_options, *KEEPALIVE]
        super().init_poolmanager(*args, **kwargs, socket_options=options)


def keep_alive(client: docker.APIClient) -> None:
    """Have a client's next connections end when its engine's machine is gone; a socket of this machine has no need."""
    for scheme in ("http://", "https://"):
        if client.base_url.startswith(scheme):
            client.get_adapter(scheme).close()
            client.mount(scheme, _Adapter())
