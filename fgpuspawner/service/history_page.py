"""The page of what has ended: receipts, their totals, what would have been enough, and the same as a file."""

from __future__ import annotations

from urllib.parse import urlencode

from fgpuspawner.service import view
from fgpuspawner.service.figures import moment
from fgpuspawner.service.history import LARGEST_FILE, advice_for
from fgpuspawner.service.history_view import line, totals
from fgpuspawner.service.pages import PageHandler
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.receipts import as_csv, receipt

SHOWN = 50
LOOKED_THROUGH = 1000
"""Of so many of the newest the totals are."""


class PastPage(PageHandler):
    """What the page and the file share: whose history it is."""

    @property
    def everybody(self) -> bool:
        """Whether everybody's history is shown."""
        return self.viewer.admin and self.get_query_argument("show", "all") != "mine"

    @property
    def of_user(self) -> str:
        """Whose history was asked for, of everybody's; empty for all."""
        return self.get_query_argument("user", "") if self.everybody else ""

    async def receipts(self, limit: int, before: int | None = None) -> tuple[list[view.Json], bool]:
        """Return the newest receipts below an id, and whether there are more."""
        user = (self.of_user or None) if self.everybody else self.viewer.user
        if user is None and not self.everybody:
            return [], False
        world = await self.service.reader.world()
        found = await self.service.reader.history(user=user, before_id=before, limit=limit + 1)
        made = [receipt(past, world, self.viewer, self.service.site) for past in found[:limit]]
        return made, len(found) > limit

    def query(self, **changes: str) -> str:
        """Return the address of this page with other choices."""
        kept = {name: v for name in ("show", "user") if (v := self.get_query_argument(name, ""))}
        found = urlencode({name: value for name, value in (kept | changes).items() if value})
        return f"?{found}" if found else ""

    def _before(self) -> int | None:
        given = self.get_query_argument("before", "")
        if not given:
            return None
        if not (given.isascii() and given.isdigit() and len(given) <= 15):
            raise Problem(400, "bad_argument", "before: must be the number of a session", field="before")
        return int(given)


class HistoryPage(PastPage):
    async def get(self) -> None:
        before = self._before()
        shown, more = await self.receipts(SHOWN, before)
        looked, beyond = (shown, more) if before else await self.receipts(LOOKED_THROUGH)
        self.render(
            "history.html",
            lines=[line(one) for one in shown],
            totals=totals(looked, more=beyond),
            advice=[] if before or self.of_user else await advice_for(self.service, self.viewer),
            following=shown[-1]["session_id"] if more else None,
            before=before,
            everybody=self.everybody,
            of_user=self.of_user,
            query=self.query,
            moment=moment,
            most_in_file=LARGEST_FILE,
            days=self.service.settings.history_days,
            simulated=any(one["simulated"] for one in shown),
            title="History",
        )


class HistoryTable(PastPage):
    """The newest sessions that have ended, as a CSV file."""

    async def get(self) -> None:
        found, more = await self.receipts(LARGEST_FILE, self._before())
        self.link_to_rest(found[-1]["session_id"] if more else None)
        self.set_header("Content-Type", "text/csv; charset=utf-8")
        self.set_header("Content-Disposition", 'attachment; filename="gpu-sessions.csv"')
        self.finish(as_csv(found))
