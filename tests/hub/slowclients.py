"""Clients that begin a request and never end it, and a Hub that may have as many files open as services usually may."""

from __future__ import annotations

import contextlib
import socket

CLIENTS = 800
USUAL = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
"""Lines of a Hub that is started with as many open files as a service usually is."""
HEADERS = "POST {path} HTTP/1.1\r\nHost: hub.example\r\n"
BODY = f"{HEADERS}Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{{{"


def slow_clients(stack: contextlib.ExitStack, port: int, words: str) -> None:
    for _ in range(CLIENTS):
        client = stack.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", port), 60)))
        client.sendall(words.encode())
