"""Pictures of people's pages for the documentation, on an ordinary day; taken when FGPU_DOCS_SHOTS=1 asks for them."""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from axe import check_page
from pastruns import Run, write_runs
from playwright.sync_api import Browser, Page, expect

from hubprocess import ROOT, HubProcess, until
from labsteps import BUILD, TAKE, new_notebook, open_panel, run_last_cell, status_item
from steps import START_MS, Person, more

pytestmark = [
    pytest.mark.timeout(560),
    pytest.mark.skipif(not os.environ.get("FGPU_DOCS_SHOTS"), reason="FGPU_DOCS_SHOTS=1 asks for pictures"),
]

ADMIN = "test-admin-password-0123456789-abcdef"
FOLDER = ROOT / "docs" / "pictures"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}

CATALOGUE = "".join(
    f"""
[[image]]
slug = "{slug}"
name = "{name} {version}"
framework = "{framework}"
version = "{version}"
python = "{sys.version_info[0]}.{sys.version_info[1]}"
environment = "{sys.prefix}"
reference = "lab/{slug}:1"
description = "{description}"
{more}
"""
    for slug, name, framework, version, description, more in (
        ("python", "Python", "python", "3.11", "Plain Python with JupyterLab.", "default = true"),
        (
            "torch-26",
            "PyTorch",
            "pytorch",
            "2.6",
            "PyTorch with CUDA 12.",
            'minimum = { fgpu = "0.2" }\nrecommended = { fgpu = "0.6" }',
        ),
        (
            "torch-113",
            "PyTorch",
            "pytorch",
            "1.13",
            "For older projects.",
            'deprecated = "Removed in May; use PyTorch 2.6."',
        ),
        (
            "tensorflow",
            "TensorFlow",
            "tensorflow",
            "2.18",
            "TensorFlow and Keras.",
            'minimum = { fgpu = "0.3" }',
        ),
        (
            "rapids",
            "RAPIDS",
            "rapids",
            "25.02",
            "Data frames on the GPU.",
            'minimum = { fgpu = "0.5" }',
        ),
    )
)
LAB = (
    TAKE
    + """
import threading
def train(steps):
    def run():
        assert cuda.cuCtxSetCurrent(context) == 0
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        text = b".version 6.0\\n.target sm_50\\n.address_size 64\\n.visible .entry spin_5ms()\\n{\\nret;\\n}\\n"
        assert cuda.cuModuleLoadData(ctypes.byref(module), text) == 0
        assert cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_5ms") == 0
        for _ in range(steps):
            assert cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
            assert cuda.cuCtxSynchronize() == 0
    threading.Thread(target=run, daemon=True).start()
"""
)
LITTLE_SERVERS = f"""
def little(spawner):
    if spawner.user.name != "ana" or spawner.name:
        spawner.cmd = ["python", {str(ROOT / "tests" / "hub" / "miniserver.py")!r}]
c.Spawner.pre_spawn_hook = little
"""
PRESETS = [
    {"name": "Exercise", "image": "python", "fgpu": "0.2", "cpu": "0.1", "memory_mib": 1024},
    {
        "name": "Training",
        "image": "torch-26",
        "fgpu": "1",
        "cpu": "1",
        "memory_mib": 4096,
        "time_limit": "8:00",
    },
]
RUNNING = (
    ("ben", "", "1.2", "torch-26"),
    ("carla", "", "0.8", "tensorflow"),
    ("dev", "", "1.6", "torch-26"),
    ("eli", "thesis", "0.5", "rapids"),
    ("fay", "", "1.5", "torch-113"),
    ("ana", "", "0.6", "torch-26"),
)
WAITING = (("gus", "", "2", "torch-26"), ("ana", "training", "1.8", "torch-26"), ("hana", "", "2", "rapids"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "catalogue.toml").write_text(CATALOGUE)
    settings = {
        "catalogue": str(folder / "catalogue.toml"),
        "simulated_gpus": "4",
        "meter_every_s": 2,
        "presets": PRESETS,
        "quotas": [{"user": "*", "max_fgpu": 4}, {"user": "ben", "max_sessions": 2, "max_lifetime_s": 86400}],
    }
    found = HubProcess(folder / "hub", before=BUILD, after=LITTLE_SERVERS, **settings)
    try:
        found.start()
        for user, server, fgpu, image in (*RUNNING, *WAITING):
            found.add_user(user)
            options = {"fgpu": fgpu, "cpu": "0.1", "memory_mib": 512, "image": image}
            assert found.spawn(user, server, options=options).status_code in (201, 202)
            state = "PENDING" if (user, server, fgpu, image) in WAITING else "RUNNING"
            until(
                lambda: found.states().get(f"{user}/{server}") == state,  # noqa: B023
                within_s=START_MS / 1000,
                what=f"{user}/{server} is {state}",
            )
        write_runs(found.data / "fgpu.sqlite", past())
        yield found
    finally:
        found.close()


def past() -> Iterator[Run]:
    """Yield three weeks of ended sessions with measurements."""
    chance, now_s = random.Random(7), int(time.time())
    for n in range(90):
        user = chance.choice(["ana", "ana", "ben", "carla", "dev", "eli", "fay", "gus", "hana"])
        is_ana = user == "ana"
        run = Run(
            user,
            "torch-26" if is_ana else chance.choice(["torch-26", "tensorflow", "rapids", "python"]),
            600 if is_ana else chance.choice([300, 500, 800, 1200, 1600, 2000]),
            now_s - 3600 - (90 - n) * 19_000 - chance.randrange(9000),
            0,
            wait_s=chance.choice([3, 20, 240, 900]),
            run_s=chance.randrange(900, 16_000),
            cause=chance.choice(["USER", "USER", "USER", "IDLE"]),
            device=chance.randrange(4),
        )
        part = chance.randrange(20, 99)
        peak_mib = chance.randrange(900, 1332) if is_ana else run.memory_mib * part // 100
        used = chance.randrange(5, 15 if is_ana else run.milli // 20 + 1)
        yield replace(run, peak_mib=peak_mib, sm_p95_percent=used)


def take(page: Page, name: str, size: dict[str, int], scheme: str, *, whole: bool = False) -> None:
    """Take a picture once everything stands still; nothing that keeps people from using the page is on it."""
    page.set_viewport_size(size)  # type: ignore[arg-type]
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    check_page(page)
    page.screenshot(path=FOLDER / name, animations="disabled", full_page=whole)


def test_pictures_of_administrators_pages(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    admin = log_in(hub.url, "admin", ADMIN).page
    admin.goto(f"{hub.url}/services/fgpu/map")
    take(admin, "map.png", WIDE, "light")
    # An active tab keeps the session.
    admin.goto(f"{hub.url}/services/fgpu/admin/nodes")
    admin.get_by_label("Reason").last.fill("the fan is loud")
    admin.get_by_role("button", name="Cordon GPU 3 of local").click()
    expect(admin.locator(".devices")).to_contain_text("the fan is loud")
    take(admin, "admin-nodes.png", WIDE | {"height": 1000}, "light")
    for page in ("overview", "queue", "quotas"):
        admin.goto(f"{hub.url}/services/fgpu/admin/{page}")
        take(admin, f"admin-{page}.png", WIDE, "light")
    admin.goto(f"{hub.url}/services/fgpu/admin/overview")
    take(admin, "admin-overview-phone.png", PHONE, "dark", whole=True)
    admin.goto(f"{hub.url}/services/fgpu/admin/nodes")
    admin.get_by_role("button", name="Uncordon GPU 3 of local").click()
    expect(admin.locator(".devices")).not_to_contain_text("the fan is loud")
    admin.goto(f"{hub.url}/services/fgpu/admin/banner")
    admin.get_by_label("Text").fill("The machines restart on Friday at 18:00.")
    admin.get_by_role("button", name="Publish").click()
    expect(admin.get_by_text("Shown now:")).to_be_visible()
    take(admin, "admin-banner.png", PHONE, "light", whole=True)
    admin.get_by_role("button", name="Remove it").click()
    expect(admin.get_by_text("No banner is shown.")).to_be_visible()
    for page in ("usage", "audit"):
        admin.goto(f"{hub.url}/services/fgpu/admin/{page}")
        take(admin, f"admin-{page}.png", WIDE, "light")


def test_pictures_of_users_pages(hub: HubProcess, chromium: Browser) -> None:
    page = chromium.new_context(viewport=WIDE, locale="en-GB", timezone_id="Europe/Berlin").new_page()  # type: ignore[arg-type]
    page.goto(hub.url)
    page.fill("#username_input", "ana")
    page.fill("#password_input", "test-password")
    page.click("#login_submit")
    expect(page.locator(".jp-Launcher")).to_be_visible(timeout=START_MS)
    expect(status_item(page)).to_contain_text("fGPU", timeout=60_000)
    (hub.data / "home" / "ana" / "lab.py").write_text(LAB)
    new_notebook(page)
    run_last_cell(page, "from lab import take, train\n\nmodel = take(1300)")
    run_last_cell(page, "train(steps=100_000)")
    panel = open_panel(page)
    meter = panel.get_by_role("meter", name="GPU memory in use")
    expect(meter).to_have_attribute("aria-valuetext", "1300 / 2432 MiB", timeout=60_000)
    drawn = re.compile("GPU memory, last .*: at most 1300 of 2432 MiB")
    expect(panel.get_by_role("img", name=drawn)).to_be_visible(timeout=60_000)
    received = panel.get_by_role("meter", name="Compute in use")
    expect(received).to_have_attribute(
        "aria-valuetext", re.compile("30 % share . .* % borrowed"), timeout=120_000
    )
    page.set_viewport_size({"width": 1280, "height": 900})
    page.screenshot(path=FOLDER / "lab.png", animations="disabled")

    other = page.context.new_page()
    other.goto(f"{hub.url}/services/fgpu/")
    expect(other.locator("body")).to_contain_text("1.3 of 2.375 GiB", timeout=60_000)
    take(other, "sessions.png", WIDE, "light")
    take(other, "sessions-phone.png", PHONE, "dark")
    other.get_by_role("link", name="Resize PyTorch 1").click()
    expect(other.get_by_role("main")).to_contain_text("1.3 GiB in use")
    take(other, "resize.png", WIDE | {"height": 330}, "light")
    other.goto(f"{hub.url}/services/fgpu/map")
    take(other, "map-phone.png", PHONE, "dark")
    other.goto(f"{hub.url}/services/fgpu/history")
    take(other, "history.png", WIDE, "light")
    take(other, "history-phone.png", PHONE, "dark")
    other.goto(f"{hub.url}/hub/spawn-pending/ana/training")
    expect(other.get_by_role("button", name="Start with 1.4 fGPU now")).to_be_visible()
    take(other, "waiting.png", WIDE, "light", whole=True)
    take(other, "waiting-phone.png", PHONE, "dark", whole=True)
    other.goto(f"{hub.url}/hub/spawn/ana/gpu-2")
    other.get_by_role("radio", name="2.6").check()
    other.locator("#fgpu-fgpu").fill("1.6")
    more(other).locator("#fgpu-cpu").fill("0.1")
    expect(other.locator("#fgpu-forecast")).to_contain_text("in the queue")
    take(other, "form.png", WIDE, "light", whole=True)
    # As high as the form is: what stays in sight would stand in the middle of it.
    take(other, "form-phone.png", PHONE | {"height": 2200}, "dark")
    other.close()

    page.set_viewport_size({"width": 1280, "height": 860})
    widget = run_last_cell(page, "from jupyterlab_fgpu import GPUWidget\n\nGPUWidget()")
    expect(widget).to_contain_text("1300 / 2432 MiB")
    expect(widget.get_by_role("img").first).to_be_visible()
    page.screenshot(path=FOLDER / "lab-widget.png", animations="disabled")
    failing = run_last_cell(page, "batch = take(1300)")
    notice = failing.get_by_role("alert", name="The GPU memory of this session ran out")
    expect(notice.get_by_role("button", name="Grow to 0.7 fGPU now")).to_be_visible()
    notice.scroll_into_view_if_needed()
    page.screenshot(path=FOLDER / "lab-memory.png", animations="disabled")
    page.get_by_role("menuitem", name="Settings").click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Dark", exact=True).click()
    expect(page.locator("body")).to_have_attribute("data-jp-theme-light", "false")
    notice.scroll_into_view_if_needed()
    page.screenshot(path=FOLDER / "lab-dark.png", animations="disabled")
    page.context.close()
