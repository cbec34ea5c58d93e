"""The first page: sessions and resources, as a whole, in the parts that have changed, and as a CSV file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from fgpu_scheduler import Session, StoreUnavailable, SystemClock
from fgpuspawner.service import view
from fgpuspawner.service.choosing import STATES, Choice, chosen, read_choice
from fgpuspawner.service.figures import instant, moment
from fgpuspawner.service.page import Page, page
from fgpuspawner.service.pages import PageHandler, xsrf_text
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.rows import Row
from fgpuspawner.service.table_file import SESSION_COLUMNS, csv_text, session_cells

PAST_SHOWN = 5
MOST_AT_ONCE = 200
"""Lines that the page's script may ask for at once."""

LINES_AT_ONCE = 50
"""Lines that are made before they are sent."""

MARK = "<!-- rows -->"
"""Where the lines of the table come. No text of anybody can hold it: what is shown is escaped."""

PARTS = ("resources", "heading", "count", "columns", "foot")
"""What changes on the page besides the lines: each a template, shown in the element of this id."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: what it is sorted by, and what its cells are called on a phone."""

    name: str
    title: str


COLUMNS = (
    Column("name", "Session"),
    Column("user", "User"),
    Column("status", "Status"),
    Column("image", "Image"),
    Column("amount", "Amount"),
    Column("use", "In use now"),
    Column("started", "Started"),
)


class SessionsPage(PageHandler):
    """What the page and its file share."""

    @property
    def everybody(self) -> bool:
        """Whether everybody's sessions are shown."""
        return self.viewer.admin and self.get_query_argument("show", "all") != "mine"

    def choice(self) -> Choice:
        """Return what the address chooses."""
        return read_choice(lambda name: self.get_query_argument(name, ""), admin=self.everybody)

    def objects(self, world: view.World) -> list[view.Json]:
        """Return the live sessions that are shown before anything is chosen."""
        live = view.live_sessions(world, self.viewer, everybody=self.everybody)
        found: list[view.Json] = view.sessions_object(live, world, self.viewer, self.service.site)["sessions"]
        return found


class Front(SessionsPage):
    """The sessions and the resources. It shows the last good reading, with its age, if there is none now."""

    async def get(self) -> None:
        choice = self.choice()
        past: tuple[Session, ...] = ()
        trouble = None
        world: view.World | None
        try:
            reader = self.service.reader
            world = await (reader.world() if self.wants_part else reader.recent_world())
            if self.get_query_argument("part", "") != "rows" and (
                self.everybody or self.viewer.user is not None
            ):
                user = None if self.everybody else self.viewer.user
                past = await self.service.reader.ended(user, PAST_SHOWN)
        except StoreUnavailable as e:
            trouble, world = self.problem_of(503, e), self.service.reader.last_world
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
            "columns": [c for c in COLUMNS if self.everybody or c.name != "user"],
            "moment": moment,
            # Once for the page: every line has forms that send it.
            "xsrf": xsrf_text(self.xsrf_token),
        }
        match self.get_query_argument("part", ""):
            case "":
                await self._stream(shown.rows, more)
            case "rows":
                self._answer({"rows": self._lines(shown.rows, more)})
            case _:
                parts = {name: self.render_string(f"{name}.html", **more).decode() for name in PARTS}
                rows = [[row.id, row.digest] for row in shown.rows]
                self._answer({"parts": parts, "rows": rows, "total": shown.total, "narrows": choice.narrows})

    async def _stream(self, rows: Sequence[Row], more: dict[str, Any]) -> None:
        """Send the page with its lines, some at a time: a browser shows what it has, and others are answered between."""
        before, after = self.render_string("index.html", here_are_rows=MARK, **more).decode().split(MARK)
        make = self._line_maker(more)
        self.write(before)
        for first in range(0, len(rows), LINES_AT_ONCE):
            await self.flush()
            self.write(b"".join(make(row) for row in rows[first : first + LINES_AT_ONCE]))
        self.finish(after)

    def _answer(self, found: view.Json) -> None:
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(json.dumps(found))

    def _lines(self, rows: Iterable[Row], more: dict[str, Any]) -> dict[str, str]:
        asked = self.get_query_argument("ids", "").split(",")
        if len(asked) > MOST_AT_ONCE or not all(i.isascii() and i.isdigit() and len(i) < 19 for i in asked):
            raise Problem(
                400, "bad_argument", f"ids: must be 1 to {MOST_AT_ONCE} numbers, as in ids=12,15", field="ids"
            )
        wanted = {int(i) for i in asked}
        make = self._line_maker(more)
        return {str(row.id): make(row).decode() for row in rows if row.id in wanted}

    def _line_maker(self, more: dict[str, Any]) -> Any:
        """Return what makes a line: the template with its names, looked up once and not for every line."""
        template = self.application.settings["lines"].load("row.html")
        names = self.get_template_namespace() | more
        return lambda row: template.generate(**(names | {"row": row}))

    def _page(self, world: view.World, past: tuple[Session, ...], choice: Choice) -> Page:
        site, viewer = self.service.site, self.viewer
        step = self.service.settings.caps().fgpu_step_milli
        return page(
            sessions=self.objects(world),
            ended=view.sessions_object(past, world, viewer, site)["sessions"],
            capacity=view.capacity_object(world, viewer, fgpu_step_milli=step),
            group=self.get_query_argument("group", None),
            viewer=viewer,
            everybody=self.everybody,
            base_url=site.hub_base_url,
            hub_host=site.hub_host,
            read_at_s=world.snapshot.now_s,
            choice=choice,
        )

    def _query(self, chosen: str | None = None, **changes: str) -> str:
        """Return the address of this page with other choices; ``chosen`` is a `Choice`'s own query."""
        kept = {name: v for name in ("group", "show") if (v := self.get_query_argument(name, None))}
        own = self.choice().query() if chosen is None else chosen
        return "?" + "&".join(part for part in (urlencode(kept | changes), own) if part)


class SessionsFile(SessionsPage):
    """What the page shows, as a CSV file."""

    async def get(self) -> None:
        world = await self.service.reader.world()
        found = chosen(self.objects(world), self.choice())
        self.set_header("Content-Type", "text/csv; charset=utf-8")
        day = instant(world.snapshot.now_s).machine[:10]
        self.set_header("Content-Disposition", f'attachment; filename="sessions-{day}.csv"')
        self.finish(csv_text(SESSION_COLUMNS, (session_cells(s) for s in found)))
