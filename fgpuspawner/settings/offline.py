"""Loading a configuration without asking the engine, as `fgpu status` does, so that it works while that is down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_asked = ContextVar("fgpu_engine_is_asked", default=True)


def engine_is_asked() -> bool:
    """Return whether loading may ask the engine. If not, values that only the engine knows keep their defaults."""
    return _is_asked.get()


@contextmanager
def without_engine() -> Iterator[None]:
    """Keep configurations that are loaded during the block from asking an engine."""
    token = _is_asked.set(False)
    try:
        yield
    finally:
        _is_asked.reset(token)
