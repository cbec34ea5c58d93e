"""What the service's application answers to, from its own table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tornado.web import RequestHandler, StaticFileHandler

from fgpuspawner.service.app import make_app
from fgpuspawner.service.handler import Service

METHODS = ("get", "post", "put", "patch", "delete")
PREFIX = "/services/fgpu/"


def served() -> Iterator[tuple[str, type[RequestHandler]]]:
    """Return the routes below the service's prefix, each part that varies as ``{id}``, with their handlers."""
    service = Service(*[None] * 5, PREFIX, "")  # type: ignore[arg-type]
    for rule in make_app(service).wildcard_router.rules:
        if rule.target is StaticFileHandler:
            continue  # Those of tornado itself, below no prefix.
        pattern = rule.matcher.regex.pattern.removesuffix("$").replace("[.]", ".").replace("\\.", ".")
        if pattern.startswith(PREFIX):
            yield re.sub(r"\([^)]*\)", "{id}", pattern.removeprefix(PREFIX)), rule.target


def methods_of(handler: type[RequestHandler]) -> set[str]:
    """Return the methods that a handler has."""
    return {m for m in METHODS if getattr(handler, m) is not getattr(RequestHandler, m)}
