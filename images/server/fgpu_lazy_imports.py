"""Delay the one import that makes every start of a Jupyter server slow.

jupyter-events imports jsonschema, which imports ``rfc3987_syntax``, which builds a grammar for
international addresses: 0.75 s of CPU per start, for two formats that no Jupyter schema uses.
Installed beside ``fgpu_lazy_imports.pth`` in an environment's site-packages, this module makes
``import rfc3987_syntax`` free; the package's own code runs, once, when something of it is first
called or looked up, and from then on the module is exactly what it would have been.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGE = "rfc3987_syntax"
# jsonschema says `from rfc3987_syntax import is_valid_syntax`, and a name imported that way must
# exist: the stand-in is a function that fetches the real one when it is called.
FUNCTION = "is_valid_syntax"


class _LazyLoader(Loader):
    """Fills the module with stand-ins, and with its own code on first use."""

    def __init__(self, real: Loader) -> None:
        self._real = real
        # Re-entrant: the package's own code may look things up in itself while it runs.
        self._lock = threading.RLock()
        self._begun = False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def look_up(name: str) -> object:
            # The import system asks for dunder names: they are no use of the package.
            if not name.startswith("__"):
                self._load(module)
                if name in module.__dict__:
                    return module.__dict__[name]
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")

        def stand_in(*args: object, **kwargs: object) -> object:
            self._load(module)
            real: Callable[..., object] = module.__dict__[FUNCTION]
            if real is stand_in:
                raise ImportError(f"cannot import name {FUNCTION!r} from {PACKAGE!r}")
            return real(*args, **kwargs)

        module.__dict__["__getattr__"] = look_up
        module.__dict__[FUNCTION] = stand_in

    def _load(self, module: ModuleType) -> None:
        with self._lock:
            if self._begun:
                return
            self._begun = True
            stand_in = module.__dict__[FUNCTION]
            try:
                self._real.exec_module(module)
            except BaseException:
                # As it was, so that the next use tries again and reports the same failure.
                module.__dict__[FUNCTION] = stand_in
                self._begun = False
                raise
            # Last: until then, another thread that looks something up waits for the lock.
            module.__dict__.pop("__getattr__", None)


class _Finder(MetaPathFinder):
    """Finds the one package where it always was, and wraps its loader."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LazyLoader(spec.loader)
        return spec


def install() -> None:
    """Put the finder first, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


install()
