from __future__ import annotations

from fgpuspawner.engines.base import Capabilities
from fgpuspawner.service.navigation import PAGES, Entry, current, entries

CONTAINERS = Capabilities("containers", own_root=True, saves_images=True)
PROCESSES = Capabilities("local processes")
SOME = (Entry("", "Sessions", also=("end",)), Entry("admin/queue", "Queue", admin=True), Entry("map", "Map"))


def test_pages_for_administrators_are_shown_to_them_only_and_after_the_others() -> None:
    assert [e.title for e in entries(CONTAINERS, admin=False, pages=SOME)] == ["Sessions", "Map"]
    assert [e.title for e in entries(CONTAINERS, admin=True, pages=SOME)] == ["Sessions", "Map", "Queue"]


def test_where_no_session_can_be_saved_no_page_of_saved_images_is_offered() -> None:
    addresses = {
        engine.kind: {e.address for e in entries(engine, admin=True)} for engine in (CONTAINERS, PROCESSES)
    }
    assert addresses["containers"] - addresses["local processes"] == {"private-images"}


def test_the_current_page_is_found_by_its_own_address_and_by_those_that_belong_to_it() -> None:
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


def test_every_page_has_an_address_of_its_own() -> None:
    addresses = [entry.address for entry in PAGES]
    assert len(set(addresses)) == len(addresses)
