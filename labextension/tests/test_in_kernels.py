"""What kernels of Python 3.6 or later have of this package, with Python's own library alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standin import TOKEN, StandIn

import jupyterlab_fgpu
from jupyterlab_fgpu import GPUWidget, kernel_reading, smi, widget
from jupyterlab_fgpu.app import FGPUStatus
from jupyterlab_fgpu.kernel_reading import SOCKET_VARIABLE, Held, Reading

HERE = Path(__file__).resolve().parent
OLD_PYTHONS = sorted((Path.home() / ".pyenv/versions").glob("3.[67].*/bin/python"))
EVIL = "<script>alert(1)</script>\"'\x1b[2J\u202e"
IMPORTED = """
import sys
import jupyterlab_fgpu
jupyterlab_fgpu.GPUWidget()
heavy = {"ctypes", "tornado", "jupyter_server", "IPython", "anywidget", "urllib.request"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
class Shell:
    def register_magic_function(self, function, kind, name):
        assert (kind, name) == ("line", "fgpu")
        self.fgpu = function
shell = Shell()
jupyterlab_fgpu.load_ipython_extension(shell)
shell.fgpu("")
shell.fgpu("--help")
assert "<table>" in jupyterlab_fgpu.GPUWidget()._repr_mimebundle_()["text/html"]
"""


def reading(**changes: Any) -> Reading:
    """A quarter of a simulated GPU, a third of it in use."""
    return Reading(
        at_s=1790000000,
        session_id=12,
        amount="0.5 fGPU",
        simulated=True,
        limit_mib=2048,
        used_mib=700,
        entitled_percent=25,
        sm_percent=12.4,
        gpus=["Simulated 8 GiB, GPU-1"],
        processes=[Held(41, "python train.py", 700)],
        others=["gpu-2: 1 fGPU, PENDING, number 1 in the queue"],
        queue="1 request is waiting",
        trouble=None,
    )._replace(**changes)


@pytest.mark.parametrize("python", [Path(sys.executable), *OLD_PYTHONS], ids=str)
def test_the_package_the_magic_and_the_table_need_nothing_but_python(python: Path) -> None:
    done = subprocess.run(
        [python, "-c", IMPORTED],
        cwd=HERE.parent,
        env={"PATH": "/usr/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "this kernel is in no fGPU session" in done.stdout
    assert "%fgpu takes no arguments" in done.stdout


def test_it_is_said_in_lines_of_text() -> None:
    assert kernel_reading.as_text(reading()).splitlines() == [
        "Amount:          0.5 fGPU (simulated: there is no real GPU)",
        "GPU memory:      700 / 2048 MiB",
        "Compute:         12 % of the GPU in use, your share is 25 %",
        "GPU:             Simulated 8 GiB, GPU-1",
        "Processes:       700 MiB: 41 python train.py",
        "Other sessions:  gpu-2: 1 fGPU, PENDING, number 1 in the queue",
        "Queue:           1 request is waiting",
    ]


def test_what_is_not_known_is_said_and_is_never_zero() -> None:
    unknown = reading(used_mib=None, sm_percent=None, processes="the driver hangs", trouble="a; b")
    text = kernel_reading.as_text(unknown)
    assert "not known / 2048 MiB" in text
    assert "Compute:         your share is 25 %" in text
    assert "Processes:       the driver hangs" in text
    assert text.endswith("Trouble:         a; b")


def test_hostile_names_are_text_in_the_table_and_in_a_terminal() -> None:
    found = reading(processes=[Held(1, EVIL, None)], others=[EVIL], trouble=EVIL)
    table = kernel_reading.as_html(found)
    assert "<script" not in table
    assert "&lt;script&gt;" in table
    text = kernel_reading.as_text(found)
    assert "\x1b" not in text
    assert "\u202e" not in text


class ClosedNvml:
    """NVML with `close` only."""

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("total_mib", "share", "memory", "processes"),
    [
        (2048, (2048, 8192), "1100 / 2048 MiB", "1100 MiB: 41"),
        # The whole GPU is shown: what others hold is not this session's.
        (8192, (2048, 8192), "not known / 2048 MiB", "not known: the driver shows the whole GPU"),
        (8192, None, "not known / 2048 MiB", "not known: the driver shows the whole GPU"),
    ],
)
def test_what_others_hold_is_never_shown_as_this_sessions(
    monkeypatch: pytest.MonkeyPatch,
    total_mib: int,
    share: tuple[int, int] | None,
    memory: str,
    processes: str,
) -> None:
    for name, value in (("FGPU_SESSION_ID", "12"), ("FGPU_MEMORY_MIB", "2048")):
        monkeypatch.setenv(name, value)
    shown: dict[str, smi.Value] = dict.fromkeys(smi.READERS)
    shown |= {
        "index": 0,
        "name": "Tesla T4",
        "uuid": "GPU-1",
        "memory.total": total_mib,
        "memory.used": 1100,
    }
    own = None if share is None else smi.Share("GPU-1", *share, 25, "memory+compute", False)
    gpu = smi.Gpu(shown, [smi.Process(41, "C", "python train.py", 1100, None)], own)
    found = smi.Reading("550", "12.4", [gpu], 12, smi.problems_of(gpu))
    monkeypatch.setattr(smi, "Nvml", ClosedNvml)
    monkeypatch.setattr(smi, "read_all", lambda nvml, wanted: found)
    text = kernel_reading.as_text(kernel_reading.read())
    assert f"GPU memory:      {memory}" in text
    assert f"Processes:       {processes}" in text
    assert ("Trouble:" in text) == (share is not None and total_mib != share[0])


@pytest.mark.parametrize("python", [Path(sys.executable), *OLD_PYTHONS], ids=str)
async def test_sessions_and_queue_are_what_the_kernels_server_tells(
    extension: FGPUStatus, python: Path
) -> None:
    told = await asyncio.create_subprocess_exec(
        python,
        "-c",
        "import sys; sys.path.insert(0, '.')\n"
        "from jupyterlab_fgpu import kernel_reading as k; r = k.read(); print(k.as_text(r), r.sm_percent)",
        cwd=HERE.parent,
        env={"PATH": "/usr/bin", SOCKET_VARIABLE: os.environ[SOCKET_VARIABLE]},
        stdout=subprocess.PIPE,
    )
    text = (await told.communicate())[0].decode()
    assert "Other sessions:  gpu-2: 1 fGPU, PENDING, number 1 in the queue" in text
    assert "Queue:           3 requests are waiting" in text
    assert text.split()[-1] == "20.5"
    assert TOKEN not in text


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, "{}", ""),
        (200, "nonsense", ""),
        (302, "{}", ""),
        (403, "{}", " does not accept this server's token."),
    ],
)
async def test_a_service_that_gives_no_answer_is_said(
    extension: FGPUStatus, standin: StandIn, status: int, body: str, words: str
) -> None:
    standin.instead["*"] = (status, body)
    found = await asyncio.to_thread(kernel_reading.read)
    assert found.queue.startswith(f"not known: The fGPU service{words}")
    assert found.others == found.queue
    assert found.sm_percent is None


async def test_what_was_read_before_the_service_went_is_said_with_its_age(
    extension: FGPUStatus, standin: StandIn
) -> None:
    await extension.payload()
    extension.shared.forget()
    standin.instead["*"] = (500, "{}")
    found = await asyncio.to_thread(kernel_reading.read)
    assert isinstance(found.others, list)
    for line in (*found.others, found.queue):
        assert re.search(r" \(\d+ s ago: The fGPU service is failing \(status 500\)\.\)$", line)
    assert found.sm_percent is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_nobody_elses_process_is_told_or_believed(
    extension: FGPUStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_another_user(do: Callable[[Any], None]) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        os.seteuid(65534)
        try:
            do(connection)
        finally:
            os.seteuid(0)
        connection.settimeout(30)
        return connection

    name = os.environ[SOCKET_VARIABLE]
    with as_another_user(lambda c: c.connect("\0" + name)) as stranger:
        assert await asyncio.to_thread(stranger.recv, 1) == b""

    def listens(connection: socket.socket) -> None:
        connection.bind("\0fgpu-somebody-else")
        connection.listen()

    with as_another_user(listens):
        monkeypatch.setenv(SOCKET_VARIABLE, "fgpu-somebody-else")
        found = await asyncio.to_thread(kernel_reading.read)
    assert found.queue.endswith("Jupyter server did not tell (ConnectionRefusedError)")


async def test_a_kernel_that_outlives_its_server_says_so(extension: FGPUStatus) -> None:
    assert extension.kernel_socket is not None
    extension.kernel_socket.close()
    found = await asyncio.to_thread(kernel_reading.read)
    assert found.queue.endswith("Jupyter server did not tell (ConnectionRefusedError)")


def test_a_display_has_a_table_without_scripts_beside_what_is_live() -> None:
    days = [time.strftime("%Y-%m-%d", time.gmtime())]
    bundle = GPUWidget()._repr_mimebundle_()
    # Midnight may have passed since then.
    days.append(time.strftime("%Y-%m-%d", time.gmtime()))
    assert set(bundle) == {"text/plain", "text/html", "application/vnd.fgpu.share+json"}
    assert bundle["application/vnd.fgpu.share+json"]["text"] == bundle["text/plain"]
    json.dumps(bundle)
    assert any(f"GPU share at {day}" in bundle["text/html"] for day in days)


@pytest.mark.parametrize("backend", ["anywidget", "ipywidgets"])
def test_the_other_backends_have_the_table_too(backend: str) -> None:
    pytest.importorskip(backend)
    bundle = GPUWidget(backend=backend)._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert "<table>" in bundle["text/html"]
    assert "application/vnd.fgpu.share+json" not in bundle


def test_a_widget_of_an_older_ipywidgets_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        """A widget of ipywidgets 7, which has no `_repr_mimebundle_`."""

        model_id = "4f"

    monkeypatch.setattr(widget, "_make_ipywidgets", Older)
    bundle = GPUWidget(backend="ipywidgets")._repr_mimebundle_()
    assert "<table>" in bundle["text/html"]
    view = {"version_major": 2, "version_minor": 0, "model_id": "4f"}
    assert bundle["application/vnd.jupyter.widget-view+json"] == view


class Shell:
    """The part of IPython's shell that is used."""

    def __init__(self) -> None:
        self.events = self
        self.callbacks: dict[str, list[Any]] = {"post_run_cell": []}

    def register(self, event: str, callback: Any) -> None:
        self.callbacks[event].append(callback)


def test_however_many_there_are_a_cell_costs_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets")
    shell = Shell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr(widget, "_followers", type(widget._followers)(maxlen=4))
    made = [GPUWidget(backend="ipywidgets")._live_widget for _ in range(6)]
    [follow] = shell.callbacks["post_run_cell"]
    readings = []

    def read() -> Reading:
        readings.append(1)
        return reading(used_mib=1234)

    monkeypatch.setattr(kernel_reading, "read", read)
    follow("the result of a cell")
    assert len(readings) == 1
    assert ["1234 / 2048 MiB" in shown.value for shown in made] == [False] * 2 + [True] * 4


def test_without_anywidget_it_is_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets")
    monkeypatch.setitem(sys.modules, "anywidget", None)
    found = GPUWidget(backend="anywidget")
    assert found.backend == "ipywidgets"
    assert found._live_widget.value.startswith("<table>")
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match="run %pip install anywidget"):
        GPUWidget(backend="anywidget")


@pytest.mark.parametrize(("told", "session"), [("12", 12), ("", None), ("x", None)])
def test_it_says_whose_it_was(monkeypatch: pytest.MonkeyPatch, told: str, session: int | None) -> None:
    monkeypatch.setenv("FGPU_SESSION_ID", told)
    bundle = GPUWidget()._repr_mimebundle_()
    assert bundle["application/vnd.fgpu.share+json"]["session"] == session


def test_an_unknown_backend_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="'lab', 'anywidget', 'ipywidgets'"):
        GPUWidget(backend="qt")


def test_the_script_builds_text_and_never_markup() -> None:
    script = (Path(jupyterlab_fgpu.__file__).parent / "widget.js").read_text()
    for word in ("innerHTML", "insertAdjacentHTML", "eval(", "document.write"):
        assert word not in script


@pytest.mark.parametrize("backend", ["anywidget", "ipywidgets"])
def test_a_kernel_without_a_widget_library_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=f"run %pip install {backend}, or use"):
        GPUWidget(backend=backend)
