"""`GPUWidget`: this session's slice of a GPU in a notebook: live, and a table where it cannot be.

For Python 3.6 and later, without other packages. The browser fetches what it shows, so the kernel
stays idle.
"""

import collections
from typing import Any, Dict, Tuple

BACKENDS = ("lab", "anywidget", "ipywidgets")
MIME = "application/vnd.fgpu.share+json"
SCRIPT = "widget.js"


class GPUWidget(object):
    """Shows the slice, its memory and compute, who holds its memory, and the queue.

    Each `backend` leaves a table of the moment in the notebook, which an exported one shows:

    - "lab" (the default): the extension of this JupyterLab draws it. The kernel needs nothing.
    - "anywidget": for front ends with anywidget, of the same 0.x version as the kernel's. Where the
      kernel has none, it is "ipywidgets" instead; `backend` says which it is.
    - "ipywidgets": for front ends with ipywidgets alone; brought up to date after each cell.

    Raises ValueError for another backend, and ImportError where the kernel lacks its packages.
    """

    def __init__(self, backend: str = "lab") -> None:
        if backend not in BACKENDS:
            names = ", ".join(repr(name) for name in BACKENDS)
            raise ValueError("backend is {!r}; use one of {}".format(backend, names))
        self.backend = backend
        self._live_widget = None  # type: Any
        if backend != "lab":
            try:
                self.backend, self._live_widget = _make(backend)
            except ImportError as error:
                words = "GPUWidget(backend={0!r}) lacks a package: run %pip install {0}, or use GPUWidget()"
                raise ImportError(words.format(backend)) from error

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Dict[str, Any]:
        """Return all forms in which a front end can show it; IPython calls it."""
        from . import kernel_reading  # noqa: PLC0415 - only who shows one waits for it

        reading = kernel_reading.read()
        text = kernel_reading.as_text(reading)
        bundle = {
            "text/plain": text,
            "text/html": kernel_reading.as_html(reading),
        }  # type: Dict[str, Any]
        if self._live_widget is None:
            bundle[MIME] = {"at_s": reading.at_s, "session": reading.session_id, "text": text}
        else:
            bundle.update(_live_forms(self._live_widget))
        return bundle

    def __repr__(self) -> str:
        return "GPUWidget(backend={!r})".format(self.backend)


def _make(backend: str) -> Tuple[str, Any]:
    if backend == "anywidget":
        try:
            return backend, _make_anywidget()
        except ImportError:
            pass
    return "ipywidgets", _make_ipywidgets()


def _live_forms(widget: Any) -> Dict[str, Any]:
    """Return the forms in which a front end can show another library's widget as it changes."""
    if getattr(widget, "_repr_mimebundle_", None) is None:
        # ipywidgets 7, the last one for Python 3.6, shows itself and does not say how.
        view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
        return {"application/vnd.jupyter.widget-view+json": view}
    shown = widget._repr_mimebundle_()
    # Both libraries give the forms alone, or with metadata.
    forms = shown[0] if isinstance(shown, tuple) else shown
    return {k: v for k, v in forms.items() if k.startswith("application/")}


def _make_anywidget() -> Any:
    import os  # noqa: PLC0415

    import anywidget  # noqa: PLC0415 - not of every kernel

    with open(os.path.join(os.path.dirname(__file__), SCRIPT), encoding="utf-8") as file:
        script = file.read()
    kind = type("GPUAnyWidget", (anywidget.AnyWidget,), {"_esm": script})
    return kind()


def _make_ipywidgets() -> Any:
    import ipywidgets  # noqa: PLC0415 - not of every kernel
    from IPython import get_ipython  # noqa: PLC0415

    from . import kernel_reading  # noqa: PLC0415

    shown = ipywidgets.HTML(kernel_reading.as_html(kernel_reading.read()))
    _followers.append(shown)
    shell = get_ipython()
    if shell is not None and _follow not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _follow)
    return shown


_followers = collections.deque(maxlen=4)  # type: collections.deque[Any]
"""The newest widgets, which are updated after each cell; a cell that runs again makes one more."""


def _follow(*_: Any) -> None:
    """Update the widgets, with one reading for all."""
    from . import kernel_reading  # noqa: PLC0415

    # The kernel is busy at that moment anyway; a separate thread would keep it from being idle.
    if _followers:
        text = kernel_reading.as_html(kernel_reading.read())
        for shown in _followers:
            shown.value = text
