from __future__ import annotations

from fgpuspawner.engines.base import Capabilities
from fgpuspawner.service.navigation import NavigationEntry, current, entries, title

CONTAINERS = Capabilities("containers", own_root=True, saves_images=True)
PROCESSES = Capabilities("local processes")
SOME = (
    NavigationEntry("", "Sessions", also=("end",)),
    NavigationEntry("admin/queue", "Queue"),
    NavigationEntry("map", "Map"),
)


def test_administrators_pages_come_last_and_only_for_them() -> None:
    assert [e.title for e in entries(CONTAINERS, admin=False, pages=SOME)] == ["Sessions", "Map"]
    assert [e.title for e in entries(CONTAINERS, admin=True, pages=SOME)] == ["Sessions", "Map", "Queue"]


def test_saved_images_page_needs_an_engine_that_saves() -> None:
    addresses = {
        engine.kind: {e.address for e in entries(engine, admin=True)} for engine in (CONTAINERS, PROCESSES)
    }
    assert addresses["containers"] - addresses["local processes"] == {"private-images"}


def test_current_page_covers_the_addresses_below_it() -> None:
    found = {
        path: current(path, SOME) for path in ("", "end/12", "map", "map/0", "admin/queue/3", "mapping", "no")
    }
    titles = {path: entry and entry.title for path, entry in found.items()}
    assert titles == {
        "": "Sessions",
        "end/12": "Sessions",
        "map": "Map",
        "map/0": "Map",
        "admin/queue/3": "Queue",
        "mapping": None,
        "no": None,
    }


def test_each_page_has_a_title_of_its_own() -> None:
    assert [title(path) for path in ("", "history", "rename/7", "admin/images/python", "nothing")] == [
        "Sessions",
        "History",
        "Rename",
        "Images",
        "",
    ]
