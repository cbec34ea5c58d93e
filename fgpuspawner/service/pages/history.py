"""The page of ended sessions: receipts in words, totals, advice, and the same as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from urllib.parse import urlencode

from fgpu_scheduler import FAILURES, memory_words
from fgpuspawner.service.api.history import LARGEST_FILE, LARGEST_ID, advice_for, receipts_of, send_receipts
from fgpuspawner.service.handler import whole_number
from fgpuspawner.service.objects import Receipt
from fgpuspawner.service.pages.base import PageHandler
from fgpuspawner.service.pages.session_rows import Bar, memory_bar, rounded
from fgpuspawner.text.sessions import end_words
from fgpuspawner.text.times import duration


@dataclass(frozen=True, slots=True)
class HistoryLine:
    """One ended session. ``memory`` is None, and ``usual`` empty, if unmeasured."""

    receipt: Receipt
    name: str
    gpu_memory: str
    state: str
    why: str
    waited: str
    ran: str
    gpu_hours: str
    memory: Bar | None
    usual: str
    lent: str
    energy: str


@dataclass(frozen=True, slots=True)
class HistoryTotals:
    """Sums over the sessions that were read. ``more``: there are older ones."""

    sessions: int
    gpu_hours: str
    waited: str
    energy: str
    more: bool


def history_line(receipt: Receipt) -> HistoryLine:
    limit_mib = receipt.gpu_memory_mib
    return HistoryLine(
        receipt=receipt,
        name=receipt.display_name,
        gpu_memory="" if limit_mib is None else memory_words(limit_mib),
        state=_state(receipt),
        why=end_words(receipt.end_cause, receipt.message),
        waited=duration(receipt.wait_s),
        ran="never ran" if receipt.started_at_s is None else duration(receipt.run_s),
        gpu_hours=hours(receipt.gpu_hours),
        memory=memory_bar("Peak", receipt.memory_peak_mib, limit_mib),
        usual=_usual(receipt.memory_p95_mib, receipt.sm_p95_percent),
        lent=_lent(receipt),
        energy=_energy(receipt.energy_wh, estimated=receipt.energy_estimated),
    )


def _usual(memory_mib: int | None, compute_percent: float | None) -> str:
    told = "" if memory_mib is None else memory_words(memory_mib)
    if compute_percent is None:
        return f"p95 {told}" if told else ""
    computed = f"{compute_percent:.0f} % of the GPU"
    return f"p95 {told}, {computed}" if told else f"p95 {computed}"


def _lent(receipt: Receipt) -> str:
    borrowed, lent = receipt.compute_borrowed_percent, receipt.compute_lent_percent
    if borrowed is None or lent is None or not (rounded(borrowed) or rounded(lent)):
        return ""
    received, entitled = rounded(receipt.compute_received_percent or 0), receipt.compute_entitled_percent
    own = f"{received - rounded(borrowed)} of {entitled} % share"
    told = (
        f"mean {received} %: {own} + {rounded(borrowed)} % borrowed" if rounded(borrowed) else f"mean {own}"
    )
    return f"{told}; others used {rounded(lent)} % of it" if rounded(lent) else told


def totals(receipts: Sequence[Receipt], *, more: bool) -> HistoryTotals:
    waits = [r.wait_s for r in receipts if r.started_at_s is not None]
    energy = [r.energy_wh for r in receipts if r.energy_wh is not None]
    return HistoryTotals(
        sessions=len(receipts),
        gpu_hours=hours(sum(r.gpu_hours for r in receipts)),
        waited=duration(round(median(waits))) if waits else "",
        energy=_energy(sum(energy), estimated=any(r.energy_estimated for r in receipts)) if energy else "",
        more=more,
    )


def hours(amount: float) -> str:
    """Return GPU-hours, with enough digits that a used amount is not shown as 0."""
    return "below 0.01" if 0 < amount < 0.005 else f"{amount:.2f}"


def _state(receipt: Receipt) -> str:
    if receipt.started_at_s is None and receipt.end_cause in ("USER", "QUEUE_TIMEOUT", "HUB_STOPPED"):
        return "CANCELLED"
    return "ERROR" if receipt.end_cause in FAILURES else "TERMINATED"


def _energy(wh: float | None, *, estimated: bool) -> str:
    if wh is None:
        return ""
    told = f"{wh / 1000:.2f} kWh" if wh >= 1000 else f"{wh:.1f} Wh"
    return f"about {told}" if estimated else told


SHOWN = 50
LOOKED_THROUGH = 1000
"""Number of newest sessions in the totals."""


class PastPage(PageHandler):
    """Shared by the page and the file: the chosen history."""

    @property
    def everybody(self) -> bool:
        return self.viewer.admin and self.get_query_argument("show", "all") != "mine"

    @property
    def of_user(self) -> str:
        """The user that an administrator asked for; empty for all."""
        return self.get_query_argument("user", "") if self.everybody else ""

    async def receipts(self, limit: int, before: int | None = None) -> tuple[list[Receipt], int | None]:
        """Return the newest receipts below an id, and where older ones begin, or None."""
        user = (self.of_user or None) if self.everybody else self.viewer.user
        if user is None and not self.everybody:
            return [], None
        return await receipts_of(self, user, before=before, limit=limit)

    def query(self, **changes: str) -> str:
        kept = {name: v for name in ("show", "user") if (v := self.get_query_argument(name, ""))}
        found = urlencode({name: value for name, value in (kept | changes).items() if value})
        return f"?{found}" if found else ""

    def before(self) -> int | None:
        """Return the id below which the page begins."""
        given = self.get_query_argument("before", "")
        return whole_number("before", given, least=0, most=LARGEST_ID) if given else None


class HistoryPage(PastPage):
    async def get(self) -> None:
        before = self.before()
        shown, following = await self.receipts(SHOWN, before)
        looked, beyond = (shown, following) if before else await self.receipts(LOOKED_THROUGH)
        self.render(
            "history.html",
            lines=[history_line(one) for one in shown],
            totals=totals(looked, more=beyond is not None),
            advice=[] if before or self.of_user else await advice_for(self.service, self.viewer),
            following=following,
            before=before,
            everybody=self.everybody,
            of_user=self.of_user,
            query=self.query,
            most_in_file=LARGEST_FILE,
            days=self.service.settings.history_days,
            simulated=any(one.simulated for one in shown),
        )


class HistoryFile(PastPage):
    async def get(self) -> None:
        send_receipts(self, *await self.receipts(LARGEST_FILE, self.before()))
