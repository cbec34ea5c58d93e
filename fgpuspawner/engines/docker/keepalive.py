"""Connections to other machines that end when the machine is gone.

A cut cable sends nothing, so without keepalive a reader would wait forever.
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
"""Socket options: a machine that is silent for 50 s is gone."""


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        options = [*HTTPConnection.default_socket_options, *KEEPALIVE]
        super().init_poolmanager(*args, **kwargs, socket_options=options)


def keep_alive(client: docker.APIClient) -> None:
    """Use these options for a client's next connections; a local socket needs none."""
    for scheme in ("http://", "https://"):
        if client.base_url.startswith(scheme):
            client.get_adapter(scheme).close()
            client.mount(scheme, _Adapter())
