"""Whether a configuration is loaded for what it says alone, as `fgpu status` does: also while the engine is down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_asked = ContextVar("fgpu_engine_is_asked", default=True)


def engine_is_asked() -> bool:
    """Return whether what is set up may ask the engine; where not, what only it knows is left at its default."""
    return _is_asked.get()


@contextmanager
def without_engine() -> Iterator[None]:
    """Keep configurations that are loaded during the block from asking an engine."""
    token = _is_asked.set(False)
    try:
        yield
    finally:
        _is_asked.reset(token)
