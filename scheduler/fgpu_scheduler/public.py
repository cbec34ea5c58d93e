"""Lazy loading of a package's public names."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def lazy_names(package: str, file: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` that loads the names which the package's ``file`` imports for type checkers.

    It parses the file, so the names are written once: as imports, which type checkers and linters understand.
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
        # The name may be that of a submodule.
        found = (
            getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{origin}.{name}")
        )
        # Later lookups find it without this function.
        setattr(sys.modules[package], name, found)
        return found

    return get
