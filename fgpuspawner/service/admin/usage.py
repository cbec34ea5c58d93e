"""The usage report for administrators: GPU-hours and waits by day, user, group or image; as a page, JSON and CSV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date, timedelta

from fgpu_scheduler import QueueReader, SystemClock
from fgpuspawner.meter.usage_report import DAY_S, MOST_DAYS, By, UsageReport, day_of, report, starts_at_s
from fgpuspawner.service.admin.base import AdminApi, AdminPage
from fgpuspawner.service.admin.charts import Chart, Series
from fgpuspawner.service.admin.objects import Usage
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.problems import Problem, bad_argument
from fgpuspawner.service.reader import REPORT_WITHIN_S


def number(value: float) -> str:
    """Return a sum with all its digits, up to thousandths: never as 1e+06."""
    whole, _, rest = f"{value:,.3f}".partition(".")
    rest = rest.rstrip("0")
    return f"{whole}.{rest}" if rest else whole


USUAL_DAYS = 30
MOST_LINES = 500
"""Most lines of a page; the files have all."""
ARGUMENTS = ("from", "to", "by")
BY_WORDS = {
    By.DAY: "Day",
    By.USER: "User",
    By.HUB_GROUP: "Hub group",
    By.RESOURCE_GROUP: "Resource group",
    By.IMAGE: "Image",
}
COLUMNS = ("sessions", "starts", "gpu_hours", "fgpu_hours", "wait_mean_s", "wait_p95_s")


@dataclass(frozen=True, slots=True)
class Days:
    """The requested days, both included, and what the lines are by."""

    first: date
    last: date
    by: By


def read(handler: Handler) -> Days:
    """Return the requested report; by default the last thirty days by day."""
    today = day_of(SystemClock().now_s())
    by = handler.get_query_argument("by", "") or By.DAY.value
    if by not in set(By):
        raise bad_argument("by", f"use one of {', '.join(By)}")
    last = _day(handler, "to") or today
    first = _day(handler, "from") or last - timedelta(days=USUAL_DAYS - 1)
    if not first <= last <= first + timedelta(days=MOST_DAYS - 1):
        raise bad_argument("from", f"must be a day up to {MOST_DAYS - 1} days before {last.isoformat()}")
    return Days(first, last, By(by))


def _day(handler: Handler, name: str) -> date | None:
    text = handler.get_query_argument(name, "").strip()
    if not text:
        return None
    try:
        found = date.fromisoformat(text)
    except ValueError:
        raise bad_argument(name, "must be a day such as 2026-05-01") from None
    if not 1970 < found.year < 9000:
        raise bad_argument(name, "must be a day from 1971 on")
    return found


def complete_from(history_days: int, now_s: int) -> date | None:
    """Return the first day with complete records, or None if none are ever deleted."""
    return day_of(now_s - history_days * DAY_S) + timedelta(days=1) if history_days else None


async def report_for(handler: Handler, asked: Days) -> UsageReport:
    now_s = SystemClock().now_s()
    names = handler.service.site.image_names
    begin_s, end_s = starts_at_s(asked.first), starts_at_s(asked.last) + DAY_S

    def made(queue: QueueReader) -> UsageReport:
        spent = queue.spent(begin_s, end_s)
        return report(spent, asked.by, first=asked.first, last=asked.last, now_s=now_s)

    try:
        # In a thread: a year has many sessions.
        found = await handler.service.reader.report(made)
    except TimeoutError:
        message = f"from: this takes longer than {REPORT_WITHIN_S:.0f} seconds to add up; ask for fewer days"
        raise Problem(503, "too_many_sessions", message, field="from") from None
    if asked.by is not By.IMAGE:
        return found

    def words(slug: str) -> str:
        name = names.get(slug, slug)
        return slug if name == slug else f"{name} ({slug})"

    return UsageReport(tuple(replace(line, name=words(line.name)) for line in found.lines), found.total)


def _forgotten_before(handler: Handler, asked: Days) -> date | None:
    day = complete_from(handler.service.settings.history_days, SystemClock().now_s())
    return day if day is not None and asked.first < day else None


class UsagePage(AdminPage):
    async def get(self) -> None:
        try:
            asked, trouble = read(self), None
        except Problem as e:
            self.set_status(e.status)
            today = day_of(SystemClock().now_s())
            asked, trouble = Days(today - timedelta(days=USUAL_DAYS - 1), today, By.DAY), e
        found = await report_for(self, asked)
        lines = tuple(line for line in found.lines if line.sessions)
        chart: Chart | None = None
        if asked.by is By.DAY and found.total.sessions:
            days = [starts_at_s(date.fromisoformat(line.name)) for line in found.lines]
            hours = Series("GPU-hours", "accent", [line.gpu_hours for line in found.lines])
            chart = Chart("GPU-hours of each day (UTC)", "bars", "", days, DAY_S, [hours], utc=True)
        self.render(
            "admin_usage.html",
            asked=asked,
            found=found,
            lines=lines[:MOST_LINES],
            more=max(0, len(lines) - MOST_LINES),
            unused=len(found.lines) - len(lines),
            most=max((line.gpu_hours for line in found.lines), default=0.0),
            chart=chart,
            number=number,
            trouble=trouble,
            by_words=BY_WORDS,
            forgotten_before=_forgotten_before(self, asked),
            simulated=(await self.service.reader.world()).simulated(),
        )


class UsageApi(AdminApi):
    async def get(self) -> None:
        self.query(ARGUMENTS)
        asked = read(self)
        found = await report_for(self, asked)
        self.answer(
            Usage.of(
                found,
                from_=asked.first.isoformat(),
                to=asked.last.isoformat(),
                by=asked.by,
                complete_from=None if (day := _forgotten_before(self, asked)) is None else day.isoformat(),
                simulated=(await self.service.reader.world()).simulated(),
            )
        )


class UsageFile(AdminApi):
    async def get(self) -> None:
        self.query(ARGUMENTS)
        asked = read(self)
        found = await report_for(self, asked)
        name = f"fgpu-usage-by-{asked.by}-{asked.first}-{asked.last}.csv"
        rows = ((line.name, *(getattr(line, column) for column in COLUMNS)) for line in found.lines)
        self.send_csv(name, (asked.by.value, *COLUMNS), rows)
