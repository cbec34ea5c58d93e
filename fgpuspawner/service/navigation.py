"""The service's pages in the order of the navigation, and which of them a viewer sees. Pure.

A page adds its line here and its address in `app.make_app`. Each page checks rights itself: hiding an entry here
protects nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fgpuspawner.engines.base import Capabilities


@dataclass(frozen=True, slots=True)
class NavigationEntry:
    """One page: its address below the service's prefix, and its title.

    ``also`` are first parts of other addresses that belong to it. ``admin`` is for administrators only; with
    ``of_group`` also for those of a resource group. ``of_saved``: only if the engine can save sessions as images.
    """

    address: str
    title: str
    admin: bool = False
    of_group: bool = False
    of_saved: bool = False
    also: tuple[str, ...] = ()


PAGES = (
    NavigationEntry(
        "",
        "Sessions",
        also=("end", "keep", "park", "wake", "extend", "resize", "rename", "log", "presets", "save"),
    ),
    NavigationEntry("map", "Cluster map"),
    NavigationEntry("history", "History"),
    NavigationEntry("private-images", "My images", of_saved=True),
    NavigationEntry("admin/overview", "Overview", admin=True),
    NavigationEntry("admin/queue", "Queue", admin=True, of_group=True),
    NavigationEntry("admin/nodes", "Machines", admin=True, of_group=True),
    NavigationEntry("admin/images", "Images", admin=True, also=("admin/new-image",)),
    NavigationEntry("admin/quotas", "Quotas", admin=True, of_group=True),
    NavigationEntry("admin/usage", "Usage", admin=True),
    NavigationEntry("admin/banner", "Banner", admin=True),
    NavigationEntry("admin/audit", "Audit log", admin=True, of_group=True),
)


def entries(
    engine: Capabilities, *, admin: bool, of_group: bool = False, pages: Iterable[NavigationEntry] = PAGES
) -> tuple[NavigationEntry, ...]:
    """Return the navigation's entries, users' pages first. ``of_group``: for an administrator of a resource group."""
    shown = [
        entry
        for entry in pages
        if (admin or not entry.admin or (of_group and entry.of_group))
        and (engine.saves_images or not entry.of_saved)
    ]
    return tuple(sorted(shown, key=lambda entry: entry.admin))


def current(path: str, pages: Iterable[NavigationEntry] = PAGES) -> NavigationEntry | None:
    """Return the page that an address below the prefix belongs to; None where there is none."""
    for entry in pages:
        below = tuple(f"{first}/" for first in (entry.address, *entry.also) if first)
        if path in (entry.address, *entry.also) or path.startswith(below):
            return entry
    return None
