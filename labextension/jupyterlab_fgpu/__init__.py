"""Your fraction of a GPU, in JupyterLab and in notebooks.

The Jupyter server, kernels and commands import this, so it needs only Python itself, 3.6 or
later. The server's part needs more, and is loaded where it is used.
"""

from typing import Any, Dict, List

from .widget import GPUWidget

__version__ = "0.1.0"
__all__ = ["GPUWidget"]


def _jupyter_labextension_paths() -> List[Dict[str, str]]:
    return [{"src": "labextension", "dest": "jupyterlab-fgpu"}]


def _jupyter_server_extension_points() -> List[Dict[str, str]]:
    return [{"module": "jupyterlab_fgpu"}]


def _link_jupyter_server_extension(server_app: Any) -> None:
    """Set what must be set before any extension is loaded."""
    from .app import keep_home_out  # noqa: PLC0415 - see below

    keep_home_out(server_app)


def _load_jupyter_server_extension(server_app: Any) -> None:
    """Add the extension's handlers to a starting Jupyter server."""
    from .app import load  # noqa: PLC0415 - kernels and commands import this package without tornado

    load(server_app)


def load_ipython_extension(shell: Any) -> None:
    """Add the magic `%fgpu` to IPython (`%load_ext jupyterlab_fgpu`)."""
    shell.register_magic_function(fgpu, "line", "fgpu")


def fgpu(line: str) -> None:
    """Print this session's slice of a GPU, the processes that hold its memory, and the queue."""
    from . import kernel_reading  # noqa: PLC0415 - every kernel loads the magic, few use it

    if line.strip():
        print("%fgpu takes no arguments")
        return
    print(kernel_reading.as_text(kernel_reading.read()))
