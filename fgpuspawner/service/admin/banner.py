"""The banner for administrators: the announcement of all pages, its level and its end."""

from __future__ import annotations

from datetime import UTC, datetime

from fgpu_scheduler import MOST_BANNER_TEXT, BadSettings, Banner, BannerLevel, Notice, SystemClock
from fgpuspawner.service.admin.base import AdminApi, AdminFormPage
from fgpuspawner.service.admin.objects import OneBanner, SetBanner
from fgpuspawner.service.handler import Handler, whole_number
from fgpuspawner.service.problems import Problem, bad_argument

FIELDS = ("text", "level", "until")
LEVELS = {BannerLevel.INFO: "For information", BannerLevel.WARNING: "Warning"}
LATEST_S = 253_402_300_799
"""The end of the year 9999: the last instant that Python's calendar can show."""


async def current_banner(handler: Handler) -> Notice | None:
    now_s = SystemClock().now_s()
    return await handler.service.reader.read_store(lambda store: Banner(store).at(now_s))


async def put(handler: Handler, text: str, level: str, until_at_s: int | None) -> None:
    """Show this on every page."""
    if level not in set(BannerLevel):
        raise bad_argument("level", f"use one of {', '.join(BannerLevel)}")
    notice = Notice(text, BannerLevel(level), until_at_s)
    try:
        await handler.change(lambda store, by, now_s: Banner(store).put(notice, by=by, now_s=now_s))
    except BadSettings as e:
        name = str(e).partition(":")[0]
        raise Problem(400, "bad_argument", str(e), field=name if name in FIELDS else None) from None


async def take_down(handler: Handler) -> None:
    await handler.change(lambda store, by, now_s: Banner(store).take_down(by=by, now_s=now_s))


def read_until(text: str) -> int | None:
    """Return the instant of a form's field, in UTC if it names no other zone."""
    if not text.strip():
        return None
    try:
        at = datetime.fromisoformat(text.strip())
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        message = "must be a day and a time in UTC such as 2026-05-01T18:00, or empty"
        raise bad_argument("until", message) from None


class BannerPage(AdminFormPage):
    async def show(self, trouble: Problem | None = None) -> None:
        self.render(
            "admin_banner.html",
            notice=await current_banner(self),
            trouble=trouble,
            values={name: self.field(name) for name in FIELDS} if trouble else {},
            levels=LEVELS,
            longest=MOST_BANNER_TEXT,
        )

    async def submit(self) -> None:
        if self.field("action") == "clear":
            await take_down(self)
        else:
            await put(self, self.field("text"), self.field("level"), read_until(self.field("until")))
        self.back()


class BannerApi(AdminApi):
    async def get(self) -> None:
        await self._answer()

    async def put(self) -> None:
        given = self.body(("text", "level", "until_at_s"))
        text, until_at_s = given.get("text"), given.get("until_at_s")
        level = given.get("level", BannerLevel.INFO)
        if not isinstance(text, str):
            raise bad_argument("text", "must be a text")
        if until_at_s is not None:
            until_at_s = whole_number("until_at_s", until_at_s, least=0, most=LATEST_S)
        await put(self, text, level if isinstance(level, str) else "", until_at_s)
        await self._answer()

    async def delete(self) -> None:
        await take_down(self)
        await self._answer()

    async def _answer(self) -> None:
        notice = await current_banner(self)
        self.answer(OneBanner.of(banner=None if notice is None else SetBanner.of(notice)))
