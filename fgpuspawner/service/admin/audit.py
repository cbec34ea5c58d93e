"""The audit log for administrators, newest first. An administrator of a group reads that group's lines."""

from __future__ import annotations

from typing import Any

from fgpu_scheduler import Audit, AuditLine
from fgpuspawner.service.admin.base import AdminApi, AdminPage
from fgpuspawner.service.admin.objects import AuditLines
from fgpuspawner.service.handler import Handler, whole_number
from fgpuspawner.service.problems import Problem
from fgpuspawner.text.times import cell

FILTERS = ("actor", "action", "text", "group")
SHOWN = 50
MOST_SHOWN = 500
MOST_FILE = 10_000
"""Most lines of one file; ``before`` finds older ones."""
MOST_TEXT = 200
COLUMNS = ("id", "at", "actor", "action", "target", "details", "resource_group")


async def lines(
    handler: Handler, asked: dict[str, str], *, limit: int
) -> tuple[tuple[AuditLine, ...], int | None]:
    """Return the lines of one page that the caller may read, and the id before which the next page begins, if any."""
    before = asked.get("before")
    filters: dict[str, Any] = {name: asked.get(name, "").strip()[:MOST_TEXT] for name in FILTERS}
    group, own = filters.pop("group"), handler.viewer.administers
    if group and not handler.viewer.may_administer(group):
        message = f"group: there is no such group; choose one of {', '.join(own)}"
        raise Problem(404, "no_such_group", message, field="group")
    # Administrators of everything also see lines of no group, and of groups that are no longer configured.
    filters["groups"] = (group,) if group else None if handler.viewer.admin else own
    if before:
        filters["before_id"] = whole_number("before", before, least=1, most=10**15)
    found = await handler.service.reader.read_store(
        lambda store: Audit(store).lines(limit=limit + 1, **filters)
    )
    return found[:limit], found[limit - 1].id if len(found) > limit else None


class AuditPage(AdminPage):
    for_groups = True

    async def get(self) -> None:
        asked = {name: self.get_query_argument(name, "") for name in (*FILTERS, "before")}
        found, following = await lines(self, asked, limit=SHOWN)
        groups = dict.fromkeys((*self.viewer.administers, *filter(None, (asked["group"],))))
        self.render(
            "admin_audit.html",
            lines=found,
            following=following,
            asked=asked,
            groups=groups,
            most_in_file=MOST_FILE,
        )


class AuditApi(AdminApi):
    for_groups = True

    async def get(self) -> None:
        asked = self.query((*FILTERS, "before", "limit"))
        limit = whole_number("limit", asked["limit"] or str(SHOWN), least=1, most=MOST_SHOWN)
        found, following = await lines(self, asked, limit=limit)
        self.answer(AuditLines.of(lines=list(found), next=following))


class AuditFile(AdminApi):
    for_groups = True

    async def get(self) -> None:
        asked = self.query((*FILTERS, "before"))
        found, following = await lines(self, asked, limit=MOST_FILE)
        self.link_next_page(following)
        rows = (
            (one.id, cell(one.at_s), one.actor, one.action, one.target, one.details, one.resource_group)
            for one in found
        )
        self.send_csv("fgpu-audit.csv", COLUMNS, rows)
