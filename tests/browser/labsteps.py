"""Steps in JupyterLab: notebooks, and our panel and status item."""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

from hubprocess import HubProcess
from steps import START_MS, Person

BUILD = (
    "c.Spawner.environment = {n: os.environ[n] for n in ('JUPYTER_PATH', 'PYTHONPATH') if n in os.environ}\n"
    "c.LocalFGPUSpawner.args = ['--FGPUStatus.timeout_s=30']"
)
"""Return settings of a Hub with long timeouts in Lab, and perhaps with an uninstalled build of the extension."""

TAKE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
class OutOfMemoryError(RuntimeError): pass
def take(mib):
    memory = ctypes.c_uint64()
    code = cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(mib << 20))
    if code == 2:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate %.2f MiB." % mib)
    assert code == 0, code
    print("took", mib)
    return memory
def give(memory):
    assert cuda.cuMemFree_v2(memory) == 0
"""
"""Code for a kernel: `take` allocates GPU memory, and says in PyTorch's words what the driver has said."""


def spawn(hub: HubProcess, user: str, server: str = "", fgpu: str = "0.5") -> None:
    """Ask for a session through the Hub's API."""
    hub.add_user(user)
    answer = hub.spawn(user, server, options={"fgpu": fgpu, "cpu": "0.2", "memory_mib": 512})
    assert answer.status_code in (201, 202), answer.text


def open_lab(hub: HubProcess, person: Person, server: str = "") -> Page:
    """Open a running session's JupyterLab, and wait for its launcher and our item in the status bar."""
    page = person.page
    page.goto(f"{hub.url}/user/{person.name}/{server + '/' if server else ''}lab")
    expect(page.locator(".jp-Launcher")).to_be_visible(timeout=START_MS)
    expect(status_item(page)).to_contain_text("fGPU", timeout=60_000)
    return page


def status_item(page: Page) -> Locator:
    """Return our item in the status bar."""
    return page.locator(".jp-fgpu-StatusItem button")


def open_panel(page: Page) -> Locator:
    """Open our side panel by the item in the status bar."""
    status_item(page).click()
    panel = page.get_by_role("region", name="GPU share")
    expect(panel).to_be_visible()
    return panel


def new_notebook(page: Page) -> None:
    """Open a notebook from the launcher and wait for its kernel."""
    page.locator(".jp-LauncherCard[data-category=Notebook]").first.click()
    expect(page.locator("#jp-bottom-panel")).to_contain_text("| Idle", timeout=START_MS)


def run_last_cell(page: Page, code: str) -> Locator:
    """Type code into the last cell, run it, and return the cell once it has run."""
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    cell = cells.nth(cells.count() - 1)
    cell.locator(".cm-content").click()
    page.keyboard.insert_text(code)
    page.keyboard.press("Shift+Enter")
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]"), timeout=START_MS)
    return cell


def save(page: Page) -> None:
    """Save the notebook and wait until it is saved."""
    page.locator(".jp-Notebook .jp-CodeCell .cm-content").last.click()
    page.keyboard.press("Control+s")
    clean = page.locator("#jp-main-dock-panel .lm-TabBar-tab:not(.jp-mod-dirty)", has_text=".ipynb")
    rename = page.get_by_role("dialog").get_by_role("button", name="Rename and Save")
    expect(clean.or_(rename).first).to_be_visible()
    if rename.is_visible():
        rename.click()
    expect(clean).to_be_visible()
