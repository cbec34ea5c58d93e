"""How much longer JupyterLab takes to start with our extension: two servers side by side, opened in turn.

    .venv/bin/python bench/labstart.py [--rounds 15] [--out bench/results/labstart-DATE.json]

Needs Chromium (FGPU_TEST_CHROMIUM, or on the PATH). Exits with 0 whatever the figures say.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jupyter_core.paths import jupyter_path
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "hub")]

from machine import load, machine, source  # noqa: E402

from hubprocess import free_ports, until  # noqa: E402

ARGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
MOST_MS = 50
OURS = "jupyterlab-fgpu"
READY = (
    "document.querySelector('.jp-Launcher') !== null && document.querySelector('#jupyterlab-splash') === null"
)
IMPORT = """
import time
import jupyter_server.serverapp, tornado.web
begun = time.perf_counter()
import jupyterlab_fgpu.app
print((time.perf_counter() - begun) * 1000)
"""


@contextmanager
def server(folder: Path, *, on: bool) -> Iterator[str]:
    """A JupyterLab with our extension on or off, in the server and in the browser; yields its address."""
    port = free_ports(1)
    (folder / "config").mkdir(parents=True)
    (folder / "home").mkdir()
    extensions = folder / "labextensions"
    extensions.mkdir()
    for path in (path for place in jupyter_path("labextensions") for path in Path(place).glob("*")):
        # Switched off, its files would be loaded all the same.
        if (on or path.name != OURS) and not (extensions / path.name).exists():
            (extensions / path.name).symlink_to(path)
    settings = {"ServerApp": {"jpserver_extensions": {"jupyterlab_fgpu": on, "jupyterlab": True}}}
    (folder / "config" / "jupyter_server_config.json").write_text(json.dumps(settings))
    env = os.environ | {"JUPYTER_CONFIG_DIR": str(folder / "config"), "HOME": str(folder / "home")}
    words = ["-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1"]
    words += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder / 'home'}"]
    words += [f"--LabApp.labextensions_path={extensions}"]
    words += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words], env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}/"
        until(lambda: _answers(url), within_s=60, what=f"JupyterLab, see {folder / 'log'}")
        yield f"{url}lab?reset"
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}api", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def start_ms(browser: Browser, url: str) -> tuple[float, float, bool]:
    """Return how long Lab takes in a tab of its own until its launcher is there, and whether we are in it.

    The second figure is the processor's time of the page's thread, which other work on the machine changes little.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    try:
        page = context.new_page()
        protocol = context.new_cdp_session(page)
        protocol.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.goto(url, wait_until="commit")
        # Every frame, so that looking costs little.
        page.wait_for_function(READY, polling="raf", timeout=120_000)
        taken = page.evaluate("performance.now()")
        ours = page.evaluate(
            "performance.getEntriesByType('resource').some((r) => r.name.includes('jupyterlab-fgpu'))"
        )
        metrics = {m["name"]: m["value"] for m in protocol.send("Performance.getMetrics")["metrics"]}
        return float(taken), 1000 * float(metrics["TaskDuration"]), bool(ours)
    finally:
        context.close()


def import_ms() -> float:
    """Return how long the server takes to import our half of it."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[bool, list[float]] = {True: [], False: []}
    worked: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        chromium = os.environ.get("FGPU_TEST_CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGS)
        with (
            server(Path(folder) / "on", on=True) as with_us,
            server(Path(folder) / "off", on=False) as without,
        ):
            for number in range(options.rounds + 1):
                for on in (True, False) if number % 2 else (False, True):
                    taken, cpu, ours = start_ms(browser, with_us if on else without)
                    assert ours is on, f"our extension should be {'on' if on else 'off'}, and is not"
                    # The first round fills caches.
                    if number:
                        found[on].append(taken)
                        worked[on].append(cpu)
        browser.close()
    differences = [a - b for a, b in zip(found[True], found[False], strict=True)]
    cpu_differences = [a - b for a, b in zip(worked[True], worked[False], strict=True)]
    figures = {
        "with_ms": round(statistics.median(found[True])),
        "without_ms": round(statistics.median(found[False])),
        "median_difference_ms": round(statistics.median(differences), 1),
        "least_difference_ms": round(min(found[True]) - min(found[False]), 1),
        "cpu_with_ms": round(statistics.median(worked[True])),
        "cpu_without_ms": round(statistics.median(worked[False])),
        "median_cpu_difference_ms": round(statistics.median(cpu_differences), 1),
        "server_import_ms": round(statistics.median(import_ms() for _ in range(5)), 1),
    }
    for name, value in figures.items():
        print(f"{name:24} {value}")
    for name in ("median_difference_ms", "median_cpu_difference_ms"):
        print(f"{name}: {'ok' if figures[name] <= MOST_MS else f'MISS: more than {MOST_MS} ms'}")
    if options.out:
        record = {
            "figures": figures,
            "values_ms": {"with": found[True], "without": found[False]},
            "cpu_ms": {"with": worked[True], "without": worked[False]},
        }
        record |= {"rounds": options.rounds, "at": time.strftime("%Y-%m-%d %H:%M")}
        record |= {"machine": machine(), "load": load(), "source": source()}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
