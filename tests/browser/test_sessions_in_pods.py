"""Product B3 with pods of a real cluster, in a real browser: two run, the third follows; one proves its slice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hubs import Cluster, on
from playwright.sync_api import expect

from hubprocess import HubProcess
from steps import START_MS, Person, Sessions, expect_lab, forecast, more, run_in_notebook, start

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.kubernetes,
    pytest.mark.xdist_group("kubernetes"),
]

PROVE = """
import subprocess
said = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader"], capture_output=True, text=True)
proof = subprocess.run(["fgpu-verify"], capture_output=True)
print(said.stdout.strip().replace(" ", ""), "proved", proof.returncode)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    """A Hub on the cluster, with one simulated GPU of 2 fGPU."""
    if "FGPU_TEST_KUBECONFIG" not in os.environ:
        pytest.skip("no cluster (make test-kube)")
    with on(Cluster(), tmp_path, mini=False) as found:
        found.add_user("alice")
        yield found


def test_third_pod_starts_when_one_of_two_ends(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    page = log_in(hub.url, "alice", "test-password").page
    more(page)
    page.get_by_label("Sessions").first.fill("3")
    page.locator("#fgpu-fgpu").fill("1")
    page.locator("#fgpu-cpu").fill("0.6")
    page.locator("#fgpu-memory").fill("0.5")
    expect(forecast(page)).to_contain_text("2 start now, 1 waits")
    start(page)
    expect_lab(page, "alice")
    run_in_notebook(page, PROVE, "4096MiB proved 0")

    page.goto(f"{hub.url}/services/fgpu/")
    sessions = Sessions(page)
    for server in ("default session", "gpu-2"):
        expect(sessions.state(server)).to_have_text("RUNNING", timeout=START_MS)
    expect(sessions.state("gpu-3")).to_have_text("PENDING")
    expect(sessions.row("gpu-3")).to_contain_text("Next in the queue")
    with sessions.without_reload():
        sessions.end("gpu-2")
        expect(sessions.state("gpu-3")).to_have_text("RUNNING", timeout=START_MS)
