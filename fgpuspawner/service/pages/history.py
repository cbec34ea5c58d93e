"""The page of what has ended: receipts, their totals, what would have been enough, and the same as a file."""

from __future__ import annotations

from urllib.parse import urlencode

from fgpuspawner.service.api.history import LARGEST_FILE, advice_for, receipts_of, send_receipts
from fgpuspawner.service.model import Json
from fgpuspawner.service.pages.base import PageHandler
from fgpuspawner.service.pages.history_view import line, totals
from fgpuspawner.service.problems import bad_argument

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

    async def receipts(self, limit: int, before: int | None = None) -> tuple[list[Json], int | None]:
        """Return the newest receipts below an id, and from where there are more; None where there are none."""
        user = (self.of_user or None) if self.everybody else self.viewer.user
        if user is None and not self.everybody:
            return [], None
        return await receipts_of(self, user, before=before, limit=limit)

    def query(self, **changes: str) -> str:
        """Return the address of this page with other choices."""
        kept = {name: v for name in ("show", "user") if (v := self.get_query_argument(name, ""))}
        found = urlencode({name: value for name, value in (kept | changes).items() if value})
        return f"?{found}" if found else ""

    def before(self) -> int | None:
        """Return the id below which the page begins."""
        given = self.get_query_argument("before", "")
        if not given:
            return None
        if not (given.isascii() and given.isdigit() and len(given) <= 15):
            raise bad_argument("before", "must be the number of a session")
        return int(given)


class HistoryPage(PastPage):
    async def get(self) -> None:
        before = self.before()
        shown, following = await self.receipts(SHOWN, before)
        looked, beyond = (shown, following) if before else await self.receipts(LOOKED_THROUGH)
        self.render(
            "history.html",
            lines=[line(one) for one in shown],
            totals=totals(looked, more=beyond is not None),
            advice=[] if before or self.of_user else await advice_for(self.service, self.viewer),
            following=following,
            before=before,
            everybody=self.everybody,
            of_user=self.of_user,
            query=self.query,
            most_in_file=LARGEST_FILE,
            days=self.service.settings.history_days,
            simulated=any(one["simulated"] for one in shown),
            title="History",
        )


class HistoryFile(PastPage):
    """The newest sessions that have ended, as a CSV file."""

    async def get(self) -> None:
        send_receipts(self, *await self.receipts(LARGEST_FILE, self.before()))
