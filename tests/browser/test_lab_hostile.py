"""Our panel in JupyterLab, where image, banner and message hold hostile texts: it shows them as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from axe import check_page
from hostile import CATALOGUE, IN_A_FILE, MARK, TEXT, plant, turned
from playwright.sync_api import expect
from sqlalchemy import create_engine, update

from fgpu_scheduler.store import schema
from hubprocess import HubProcess
from labsteps import BUILD, open_lab, open_panel, spawn
from steps import START_MS, Person

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("labhostile")
    (folder / "catalogue.toml").write_text(CATALOGUE)
    found = HubProcess(folder / "hub", before=BUILD, catalogue=str(folder / "catalogue.toml"))
    try:
        yield found.start()
    finally:
        found.close()


def test_panel_escapes_user_text(hub: HubProcess, log_in: Callable[..., Person]) -> None:
    hal = log_in(hub.url, "hal", "test-password")
    spawn(hub, "hal")
    hub.reach({"hal/": "RUNNING"}, within_s=START_MS / 1000)
    spawn(hub, "hal", "second", fgpu="2")
    plant(hub)
    engine = create_engine(f"sqlite:///{hub.data / 'fgpu.sqlite'}", connect_args={"timeout": 30})
    with engine.begin() as connection:
        own = schema.sessions.c.user_name == "hal"
        connection.execute(update(schema.sessions).where(own).values(message=TEXT + "w" * 900))
    engine.dispose()
    dialogs: list[str] = []
    hal.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    panel = open_panel(open_lab(hub, hal))
    expect(panel).to_contain_text(IN_A_FILE)
    expect(panel.locator(".jp-fgpu-Banner")).to_contain_text(TEXT)
    assert hal.page.locator(f"[{MARK}]").count() == 0
    assert turned(hal.page, ".jp-fgpu-Panel") == []
    assert not panel.evaluate("panel => panel.scrollWidth > panel.clientWidth")
    check_page(hal.page, within=".jp-fgpu-Panel")
    assert dialogs == []
