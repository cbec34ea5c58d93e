"""The first page: sessions and resources, as a whole, in changed parts, and as a CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

from fgpu_scheduler import Session, StoreUnavailable, SystemClock
from fgpuspawner.service import objects
from fgpuspawner.service.api.capacity import capacity_object
from fgpuspawner.service.api.session_objects import sessions_object
from fgpuspawner.service.model import World, live_sessions
from fgpuspawner.service.pages.base import PageHandler
from fgpuspawner.service.pages.session_filter import STATES, Choice, chosen, read_choice
from fgpuspawner.service.pages.session_rows import SESSION_COLUMNS, Row, session_cells
from fgpuspawner.service.pages.sessions_view import Page, page
from fgpuspawner.service.problems import bad_argument
from fgpuspawner.text.times import cell

PAST_SHOWN = 5
MOST_AT_ONCE = 200
"""Rows that the page's script may ask for at once."""

LINES_AT_ONCE = 50
"""Rows that are made before they are sent."""

MARK = "<!-- rows -->"
"""Marks the place of the table's rows. User text cannot contain it, as it is escaped."""

PARTS = ("resources", "heading", "count", "columns", "foot")
"""What changes on the page besides the rows: each a template, shown in the element of this id."""


COLUMNS = {
    "user": "User",
    "image": "Image",
    "name": "Session",
    "status": "Status",
    "amount": "Amount",
    "use": "In use now",
    "started": "Started",
}
"""The table's columns: sort keys, with titles, which label the cells on a phone."""


class SessionsHandler(PageHandler):
    @property
    def everybody(self) -> bool:
        """Whether sessions of others are shown: all, or those of the groups that the viewer administers."""
        return self.viewer.sees_others and self.get_query_argument("show", "all") != "mine"

    def choice(self) -> Choice:
        return read_choice(lambda name: self.get_query_argument(name, ""), admin=self.everybody)

    def objects(self, world: World) -> list[objects.Session]:
        """Return the live sessions before the filters."""
        live = live_sessions(world, self.viewer, everybody=self.everybody)
        return sessions_object(live, world, self.viewer, self.service.site).sessions


class SessionsPage(SessionsHandler):
    """The sessions and the resources, from the last good reading, with its age, if none is possible now."""

    async def get(self) -> None:
        choice = self.choice()
        past: tuple[Session, ...] = ()
        trouble = None
        world: World | None
        reader = self.service.reader
        try:
            world = await (reader.world() if self.wants_part else reader.recent_world())
            if self.get_query_argument("part", "") != "rows":
                past = await self.ended(PAST_SHOWN, everybody=self.everybody)
        except StoreUnavailable as e:
            trouble, world = self.problem_of(503, e), reader.last_world
            self.set_status(503)
            if world is None:
                raise
        now_s = SystemClock().now_s()
        shown = self._page(world, past, choice)
        more = {
            "page": shown,
            "trouble": trouble,
            "age_s": now_s - world.snapshot.now_s,
            "query": self._query,
            "choice": choice,
            "states": tuple(STATES),
            "columns": {n: title for n, title in COLUMNS.items() if self.everybody or n != "user"},
            # Once for the page: the forms of all rows use it.
            "xsrf": self.xsrf,
        }
        match self.get_query_argument("part", ""):
            case "":
                await self._stream(shown.rows, more)
            case "rows":
                self.send_parts({"rows": self._lines(shown.rows, more)})
            case _:
                parts = {name: self.render_string(f"{name}.html", **more).decode() for name in PARTS}
                rows = [[row.session.id, row.digest] for row in shown.rows]
                self.send_parts(
                    {"parts": parts, "rows": rows, "total": shown.total, "narrows": choice.narrows}
                )

    async def _stream(self, rows: Sequence[Row], more: dict[str, Any]) -> None:
        """Send the page with its rows in portions: a browser shows them early, and other requests are answered in
        between.
        """
        before, after = self.render_string("index.html", here_are_rows=MARK, **more).decode().split(MARK)
        make = self._line_maker(more)
        self.write(before)
        for first in range(0, len(rows), LINES_AT_ONCE):
            await self.flush()
            self.write(b"".join(make(row) for row in rows[first : first + LINES_AT_ONCE]))
        self.finish(after)

    def _lines(self, rows: Iterable[Row], more: dict[str, Any]) -> dict[str, str]:
        asked = self.get_query_argument("ids", "").split(",")
        if len(asked) > MOST_AT_ONCE or not all(i.isascii() and i.isdigit() and len(i) < 19 for i in asked):
            raise bad_argument("ids", f"must be 1 to {MOST_AT_ONCE} numbers, as in ids=12,15")
        wanted = {int(i) for i in asked}
        make = self._line_maker(more)
        return {str(i): make(row).decode() for row in rows if (i := row.session.id) in wanted}

    def _line_maker(self, more: dict[str, Any]) -> Any:
        """Return a function that makes a row: its template and names are looked up once."""
        template = self.application.settings["lines"].load("row.html")
        names = self.get_template_namespace() | more
        return lambda row: template.generate(**(names | {"row": row}))

    def _page(self, world: World, past: tuple[Session, ...], choice: Choice) -> Page:
        site, viewer = self.service.site, self.viewer
        step = self.service.settings.caps().fgpu_step_milli
        return page(
            sessions=self.objects(world),
            ended=sessions_object(past, world, viewer, site).sessions,
            capacity=capacity_object(world, viewer, fgpu_step_milli=step),
            group=self.get_query_argument("group", None),
            viewer=viewer,
            everybody=self.everybody,
            base_url=site.hub_base_url,
            hub_host=site.hub_host,
            read_at_s=world.snapshot.now_s,
            choice=choice,
        )

    def _query(self, chosen: str | None = None, **changes: str) -> str:
        """Return the query of this page with other choices; ``chosen`` is a `Choice`'s own query."""
        kept = {name: v for name in ("group", "show") if (v := self.get_query_argument(name, None))}
        own = self.choice().query() if chosen is None else chosen
        return "?" + "&".join(part for part in (urlencode(kept | changes), own) if part)


class SessionsFile(SessionsHandler):
    """The page's sessions as a CSV file."""

    async def get(self) -> None:
        world = await self.service.reader.world()
        found = chosen(self.objects(world), self.choice())
        day = str(cell(world.snapshot.now_s))[:10]
        self.send_csv(f"sessions-{day}.csv", tuple(SESSION_COLUMNS), map(session_cells, found))
