"""A package's public names, loaded when they are first asked for."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def lazy_names(package: str, file: str) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package which gives the names that its file imports for type checkers.

    So they are written once, as imports, where type checkers and linters find them. It reads the package's source.
    """
    origins = {
        alias.asname or alias.name: statement.module
        for statement in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(f"{package}.")
        for alias in statement.names
    }

    def get(name: str) -> object:
        origin = origins.get(name)
        if origin is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(origin)
        # A name can be that of a module inside.
        found = (
            getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{origin}.{name}")
        )
        # From now on it is found without this.
        setattr(sys.modules[package], name, found)
        return found

    return get
