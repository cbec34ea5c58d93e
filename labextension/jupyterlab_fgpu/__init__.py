"""JupyterLab extension `jupyterlab-fgpu`: the server's half and where the browser's half lies."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    return [{"src": "labextension", "dest": "jupyterlab-fgpu"}]


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "jupyterlab_fgpu"}]


def _load_jupyter_server_extension(server_app: Any) -> None:
    """Add the extension's handlers to a starting Jupyter server."""
    from .app import load  # noqa: PLC0415 - the front end's tools import this package without tornado

    load(server_app)
