"""The service's pages in the order of the navigation, and which of them a viewer sees. Pure.

A page adds its line here: `app.PAGES` has its address from it. Each page checks rights itself: hiding an entry here
protects nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fgpuspawner.engines.base import Capabilities


@dataclass(frozen=True, slots=True)
class NavigationEntry:
    """One page: its address below the service's prefix, its title, and its handler as ``module:name``.

    The Hub shows the entries too, and does not import the handlers. ``also`` are first parts of other addresses that
    belong to it. ``of_group``: also for administrators of a resource group. ``of_saved``: only if the engine can save
    sessions as images.
    """

    address: str
    title: str
    handler: str = ""
    of_group: bool = False
    of_saved: bool = False
    also: tuple[str, ...] = ()

    @property
    def admin(self) -> bool:
        """Return whether it is for administrators only."""
        return self.address.startswith("admin/")


WISHES = ("keep", "extend", "park", "wake", "never-park", "may-park")
"""What an owner or administrator can ask for a running session: the words in addresses."""
OF_SESSIONS = (*WISHES, "end", "resize", "rename", "log", "presets", "save")
PAGES = (
    NavigationEntry("", "Sessions", "pages.sessions:SessionsPage", also=OF_SESSIONS),
    NavigationEntry("map", "Cluster map", "pages.cluster_map:MapPage"),
    NavigationEntry("history", "History", "pages.history:HistoryPage"),
    NavigationEntry("private-images", "My images", "pages.private_images:PrivateImagesPage", of_saved=True),
    NavigationEntry("admin/overview", "Overview", "admin.overview:OverviewPage"),
    NavigationEntry("admin/queue", "Queue", "admin.queue:QueuePage", of_group=True),
    NavigationEntry("admin/nodes", "Machines", "admin.nodes:NodesPage", of_group=True),
    NavigationEntry("admin/images", "Images", "admin.images:ImagesPage", also=("admin/new-image",)),
    NavigationEntry("admin/quotas", "Quotas", "admin.quotas:QuotasPage", of_group=True),
    NavigationEntry("admin/usage", "Usage", "admin.usage:UsagePage"),
    NavigationEntry("admin/banner", "Banner", "admin.banner:BannerPage"),
    NavigationEntry("admin/audit", "Audit log", "admin.audit:AuditPage", of_group=True),
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


def title(path: str) -> str:
    """Return the title of the page at an address below the prefix, such as "History" or "Rename"; empty for no page."""
    found = current(path)
    if found is None:
        return ""
    first = path.partition("/")[0]
    return first.capitalize() if not found.admin and first in found.also else found.title
