"""The history in a real browser: receipts in pages, totals, advice, and the file."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest
from playwright.sync_api import Page, expect
from standing import PREFIX, Standing, asked, gpus, standing

from fgpu_scheduler import EndCause, Meters, SessionMeasurements, SessionState

pytestmark = pytest.mark.timeout(600)

S = SessionState
HOSTILE = "<script>alert('x')</script> \"quoted\" \u202etfel ot thgir " + "w" * 4000


def ran(service: Standing, user: str, server: str, *, ago_s: int, message: str | None = None) -> int:
    """One session of 1 fGPU that ran for an hour and used 300 MiB at most; return its id."""
    began_s = int(time.time()) - ago_s
    (session,) = service.run([asked(user, server, 1000)], started_at_s=began_s)
    assert session.placement is not None
    limit_mib = session.placement.shares[0].memory_mib
    measured = SessionMeasurements(
        session.id,
        began_s + 3600,
        500_000,
        limit_mib,
        samples=30,
        covered_s=3600,
        peak_mib=300,
        p95_mib=200,
        sm_p95_percent=3,
        energy_mj=36_000_000,
        counts='{"memory": {}, "sm": {}, "received": {"62": 30}, "borrowed": {"15": 30}, "lent": {"3": 30}}',
    )
    Meters(service.store).save([measured])
    service.move(session.id, S.TERMINATING, now_s=began_s + 3600, cause=EndCause.IDLE, message=message)
    service.move(session.id, S.TERMINATED, now_s=began_s + 3600)
    return session.id


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with standing(tmp_path_factory.mktemp("historypage")) as found:
        found.store.set_nodes([gpus(2)], now_s=int(time.time()))
        for n in range(60):
            ran(found, "ann", f"run-{n}", ago_s=500_000 - 4000 * n)
        ran(found, "ben", "secret-name", ago_s=9000, message=HOSTILE)
        yield found.start()


def test_history_has_pages_totals_and_advice(service: Standing, open_as: Callable[..., Page]) -> None:
    page = open_as(service, "ann", "history")
    expect(page.get_by_role("link", name="History")).to_have_attribute("aria-current", "page")
    expect(page.locator(".notice.info")).to_contain_text(
        "Python: your last five runs peaked at 300 MiB: 0.1 fGPU would have been enough."
    )
    expect(page.locator(".totals")).to_contain_text("60")
    # 60 sessions of half a GPU for an hour, at 10 Wh.
    expect(page.locator(".totals")).to_contain_text("30.00")
    expect(page.locator(".totals")).to_contain_text("600.0 Wh")
    rows = page.locator(".history tbody tr")
    expect(rows).to_have_count(50)
    expect(rows.first).to_contain_text("run-59")
    for words in (
        "0.3 of 4 GiB",
        "p95 200 MiB, 3 % of the GPU",
        "mean 62 %: 47 of 50 % share + 15 % borrowed; others used 3 % of it",
        "1 h",
        "0.50",
        "10.0 Wh",
        "idle",
    ):
        expect(rows.first).to_contain_text(words)
    page.get_by_role("link", name="Older").click()
    expect(rows).to_have_count(10)
    expect(rows.last).to_contain_text("run-0")
    expect(page.get_by_role("link", name="Older")).to_have_count(0)
    page.get_by_role("link", name="Newest").click()
    expect(rows).to_have_count(50)
    assert "secret-name" not in page.content()


def test_administrator_filters_by_user_and_downloads_the_file(
    service: Standing, open_as: Callable[..., Page]
) -> None:
    page = open_as(service, "root", "history")
    expect(page.locator(".history tbody tr").first).to_contain_text("ben")
    page.get_by_role("textbox", name="User").fill("ben")
    page.get_by_role("button", name="Show").click()
    rows = page.locator(".history tbody tr")
    expect(rows).to_have_count(1)
    # Hostile names are shown as text.
    expect(rows).to_contain_text("<script>alert('x')</script>")
    assert page.locator("main script").count() == 0
    file = page.get_by_role("link", name="CSV").get_attribute("href") or ""
    text = service.get(file.removeprefix(PREFIX), "root").text
    assert [line["server_name"] for line in csv.DictReader(io.StringIO(text))] == ["secret-name"]
    page.get_by_role("textbox", name="User").fill("nobody")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_text("No session of this user has ended.")).to_be_visible()


def test_times_of_another_year_show_the_year(service: Standing, open_as: Callable[..., Page]) -> None:
    long_ago = service.store.session(ran(service, "dora", "long-ago", ago_s=2 * 365 * 86400))
    ran(service, "dora", "lately", ago_s=800_000)
    assert long_ago is not None
    assert long_ago.ended_at_s is not None
    page = open_as(service, "dora", "history")
    new, old = page.locator(".history tbody tr time").all()
    # Made by the script: what the service sends has another form.
    expect(new).to_have_attribute("title", re.compile("."))
    expect(old).to_contain_text(str(datetime.fromtimestamp(long_ago.ended_at_s).year))
    expect(new).not_to_contain_text("UTC")
