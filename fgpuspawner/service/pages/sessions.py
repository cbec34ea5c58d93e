"""The first page: sessions and resources; and the forms that end, keep, extend and resize a session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

from fgpu_scheduler import ENDED, MOST_MESSAGE_TEXT, Session, StoreUnavailable, SystemClock, memory_words
from fgpuspawner import scopes
from fgpuspawner.service import objects
from fgpuspawner.service.api.capacity import capacity_object
from fgpuspawner.service.api.session_objects import session_object, sessions_object
from fgpuspawner.service.model import World, live_sessions
from fgpuspawner.service.pages.base import FormPage, PageHandler
from fgpuspawner.service.pages.session_rows import SESSION_COLUMNS, SessionRow, session_cells
from fgpuspawner.service.pages.sessions_view import (
    STATES,
    SessionFilter,
    SessionsView,
    filtered,
    read_filter,
    sessions_view,
)
from fgpuspawner.service.problems import Problem, bad_argument
from fgpuspawner.service.session_actions import (
    FIELDS,
    end_session,
    grant_wish,
    rename_session,
    resize_session,
    session_log,
)
from fgpuspawner.text.fields import MOST_NAME
from fgpuspawner.text.logs import LINES_SHOWN
from fgpuspawner.text.sessions import end_words, session_name
from fgpuspawner.text.times import cell, duration

PAST_SHOWN = 5
FILTERS_FROM = 4
"""From this many sessions on the list has filters."""
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
    "cpu": "CPU",
    "memory": "Memory",
    "elapsed": "Elapsed",
    "left": "Time left",
    "started": "Started",
}
"""The table's columns: sort keys, with titles, which label the cells on a phone."""


class SessionsHandler(PageHandler):
    @property
    def everybody(self) -> bool:
        """Whether sessions of others are shown: all, or those of the groups that the viewer administers."""
        return self.viewer.sees_others and self.get_query_argument("show", "all") != "mine"

    def choice(self) -> SessionFilter:
        return read_filter(lambda name: self.get_query_argument(name, ""), admin=self.everybody)

    def objects(self, world: World) -> list[objects.Session]:
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
                past = await self.ended_sessions(PAST_SHOWN, everybody=self.everybody)
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
            "duration": duration,
            "few": world is not None and len(shown.rows) < FILTERS_FROM and not choice.narrows,
            "memory_words": memory_words,
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
                self.send_parts({"parts": parts, "rows": rows, "total": shown.total, "few": more["few"]})

    async def _stream(self, rows: Sequence[SessionRow], more: dict[str, Any]) -> None:
        """Send the page with its rows in portions: a browser shows them early, and other requests are answered in
        between.
        """
        before, after = self.render_string("index.html", rows_mark=MARK, **more).decode().split(MARK)
        make = self._line_maker(more)
        self.write(before)
        for first in range(0, len(rows), LINES_AT_ONCE):
            await self.flush()
            self.write(b"".join(make(row) for row in rows[first : first + LINES_AT_ONCE]))
        self.finish(after)

    def _lines(self, rows: Iterable[SessionRow], more: dict[str, Any]) -> dict[str, str]:
        asked = self.get_query_argument("ids", "").split(",")
        if len(asked) > MOST_AT_ONCE or not all(i.isascii() and i.isdigit() and len(i) < 19 for i in asked):
            raise bad_argument("ids", f"must be 1 to {MOST_AT_ONCE} numbers, as in ids=12,15")
        wanted = {int(i) for i in asked}
        make = self._line_maker(more)
        return {str(i): make(row).decode() for row in rows if (i := row.session.id) in wanted}

    def _line_maker(self, more: dict[str, Any]) -> Any:
        template = self.application.settings["lines"].load("row.html")
        names = self.get_template_namespace() | more
        return lambda row: template.generate(**(names | {"row": row}))

    def _page(self, world: World, past: tuple[Session, ...], choice: SessionFilter) -> SessionsView:
        site, viewer = self.service.site, self.viewer
        return sessions_view(
            sessions=self.objects(world),
            ended=sessions_object(past, world, viewer, site).sessions,
            capacity=capacity_object(world, viewer),
            group=self.get_query_argument("group", None),
            viewer=viewer,
            everybody=self.everybody,
            base_url=site.hub_base_url,
            hub_host=site.hub_host,
            read_at_s=world.snapshot.now_s,
            choice=choice,
        )

    def _query(self, filter_query: str | None = None, **changes: str) -> str:
        """Return the query of this page with other choices; ``filter_query`` is a `SessionFilter`'s own query."""
        kept = {name: v for name in ("group", "show") if (v := self.get_query_argument(name, None))}
        own = self.choice().query() if filter_query is None else filter_query
        return "?" + "&".join(part for part in (urlencode(kept | changes), own) if part)


class SessionsFile(SessionsHandler):
    async def get(self) -> None:
        world = await self.service.reader.world()
        found = filtered(self.objects(world), self.choice())
        day = str(cell(world.snapshot.now_s))[:10]
        self.send_csv(f"sessions-{day}.csv", tuple(SESSION_COLUMNS), map(session_cells, found))


class EndPage(PageHandler):
    async def get(self, session_id: str) -> None:
        session = await self.visible_session(session_id)
        world = await self.service.reader.world()
        shown = session_object(session, world, self.viewer, self.service.site)
        self.render("end.html", session=shown, xsrf=self.xsrf, longest=MOST_MESSAGE_TEXT)

    async def post(self, session_id: str) -> None:
        await end_session(self, session_id, message=self.field("message"))
        self.redirect(self.service.prefix, status=303)


class ResizePage(FormPage):
    needs_scope = scopes.KEEP

    async def show(self, trouble: Problem | None = None) -> None:
        session = await self.visible_session(self.path_args[0])
        world = await self.service.reader.world()
        shown = session_object(session, world, self.viewer, self.service.site)
        resize, memory_mib = shown.resize, shown.gpu_memory_mib
        used_mib = None if shown.meter is None else shown.meter.memory_used_mib
        self.render(
            "resize.html",
            session=shown,
            gpu_memory="" if memory_mib is None else memory_words(memory_mib),
            used="" if used_mib is None else memory_words(used_mib),
            exact=session.request.gpu_memory_mib is not None,
            percent=session.request.compute_percent,
            why_not="Only a running session can be resized." if resize is None else resize.why_not,
            given={name: self.field(name) for name in FIELDS},
            refused="" if trouble is None else trouble.message.removeprefix(f"{trouble.field}: "),
            xsrf=self.xsrf,
        )

    async def submit(self) -> None:
        given: dict[str, object] = {n: self.field(n) for n in FIELDS if n in self.request.body_arguments}
        await resize_session(self, self.path_args[0], given)
        self.redirect(self.service.prefix, status=303)


class RenameSessionPage(FormPage):
    needs_scope = scopes.KEEP

    async def show(self, trouble: Problem | None = None) -> None:
        session = await self.visible_session(self.path_args[0])
        self.render(
            "rename.html",
            session=session,
            name=self.field("name") if trouble else session_name(session.request),
            refused="" if trouble is None else trouble.message.removeprefix(f"{trouble.field}: "),
            longest=MOST_NAME,
            xsrf=self.xsrf,
        )

    async def submit(self) -> None:
        await rename_session(self, self.path_args[0], self.field("name"))
        self.redirect(self.service.prefix, status=303)


class LogPage(PageHandler):
    async def get(self, session_id: str) -> None:
        session = await self.visible_session(session_id)
        lines = await session_log(self, session_id, lines=LINES_SHOWN)
        self.render(
            "log.html",
            session=session,
            name=session_name(session.request),
            lines=lines,
            why=end_words(session.end_cause, session.message) if session.state in ENDED else "",
        )


class WishPage(PageHandler):
    """The word before the session's id in the address is one of `WISHES`."""

    needs_scope = scopes.KEEP

    async def post(self, session_id: str) -> None:
        await grant_wish(self, session_id, self.request.path.split("/")[-2])
        self.redirect(self.service.prefix, status=303)
