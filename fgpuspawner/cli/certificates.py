"""Certificates that the operating system trusts, a lab's own authority among them."""

from __future__ import annotations

import ssl
from typing import Any

from requests.adapters import HTTPAdapter
from truststore import SSLContext


class SystemTrust(HTTPAdapter):
    """Connections that trust what the operating system trusts, beside the authorities that requests brings."""

    def init_poolmanager(self, *args: Any, **more: Any) -> None:
        super().init_poolmanager(*args, **more, ssl_context=SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def proxy_manager_for(self, *args: Any, **more: Any) -> Any:
        return super().proxy_manager_for(*args, **more, ssl_context=SSLContext(ssl.PROTOCOL_TLS_CLIENT))
