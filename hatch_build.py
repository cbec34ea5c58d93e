"""The hook with which hatchling builds isolation/ into the wheel, or into a checkout that is installed from.

Without a C compiler the install works all the same, and the backends that need libfgpu say so when the Hub starts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def load_builder() -> ModuleType:
    """Return the program that builds; it needs the standard library only."""
    path = Path(__file__).parent / "scripts" / "build_isolation.py"
    spec = importlib.util.spec_from_file_location("build_isolation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class IsolationBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before the package is packed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build. A wheel with compiled parts is of one platform, and of any Python."""
        builder = load_builder()
        reason = builder.missing()
        if reason is not None:
            print(
                f"WARNING: fgpuspawner is installed WITHOUT libfgpu: {reason}; then install it again. Until then "
                "nothing holds sessions to their slices, and a Hub with real GPUs does not start.",
                file=sys.stderr,
                flush=True,
            )
            builder.put_commands()
            return
        builder.build()
        # Another machine's compiler (CC) makes another machine's wheel.
        machine = os.environ.get("FGPU_MACHINE")
        platform = f"linux-{machine}" if machine else sysconfig.get_platform()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
