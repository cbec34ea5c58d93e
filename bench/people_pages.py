"""How quick the sessions page and the cluster map are with a full cluster: the real service, in Chromium.

.venv/bin/python bench/people_pages.py [--rounds 9] [--out bench/results/people-pages-DATE.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from machine import ROOT, load, machine, quiet, source

sys.path[:0] = [str(ROOT / "tests" / "hub")]

from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402
from standing import Standing, asked, gpus, standing  # noqa: E402

GPUS = 50
RUNNING = 200
ROWS = 500
"""Of the sessions page; the others wait."""
WAITING = 500
"""While the cluster map is measured."""
USERS = 60
EXPECTED = {
    "sessions_first_paint_ms": 1000.0,
    "sessions_all_rows_ms": 2000.0,
    "sessions_update_ms": 1500.0,
    "map_first_paint_ms": 1000.0,
}
ARGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]

PAINTED = """
() => new Promise((done) => {
  const first = () => performance.getEntriesByName("first-contentful-paint")[0];
  const told = () => {
    const [page] = performance.getEntriesByType("navigation");
    done({
      first_paint_ms: first().startTime,
      first_byte_ms: page.responseStart,
      all_rows_ms: page.domContentLoadedEventEnd,
      bytes: page.decodedBodySize,
    });
  };
  if (first()) told(); else new PerformanceObserver(told).observe({type: "paint", buffered: true});
})
"""

MARK = "() => { for (const line of document.querySelectorAll('#rows tr')) line.marked = true; }"
FRESH = "() => Array.from(document.querySelectorAll('#rows tr')).filter((line) => !line.marked).length"
SHOWN_AT = """
(words) => new Promise((done) => {
  const look = () => {
    const found = document.getElementById("rows").textContent.includes(words);
    if (found) done(Date.now()); else requestAnimationFrame(look);
  };
  look();
})
"""


def fill(world: Standing, waiting: int) -> None:
    """Have 200 sessions run on 50 GPUs, and this number wait."""
    dice = random.Random(7)
    began_s = int(time.time()) - 3600
    world.store.set_nodes([gpus(GPUS)], now_s=began_s)
    full = GPUS * 2000 // RUNNING
    running = [asked(f"user{n % USERS}", f"job-{n}", full, time_limit_s=36_000) for n in range(RUNNING)]
    found = world.run(running, started_at_s=began_s)
    if any(session.placement is None for session in found):
        raise SystemExit("not all of the sessions that were to run have a place")
    amounts = (300, 500, 1000, 2000)
    world.run(
        [
            asked(f"user{n % USERS}", f"wait-{n}", dice.choice(amounts), time_limit_s=3600)
            for n in range(waiting)
        ]
    )
    world.measure({session.id: dice.randrange(2048) for session in found})


def opened(browser: Browser, world: Standing, path: str) -> Page:
    """Return a page as an administrator opens it, in a profile without a cache."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, extra_http_headers={"Authorization": "token token-root"}
    )
    page = context.new_page()
    page.goto(world.url + path, wait_until="load")
    return page


def sessions_round(browser: Browser, world: Standing, number: int) -> dict[str, float]:
    """Open the page, then change one session and see when that is shown, and how many lines were made for it."""
    page = opened(browser, world, "")
    try:
        found: dict[str, float] = page.evaluate(PAINTED)
        rows = page.locator("#rows tr").count()
        if rows != ROWS:
            raise SystemExit(f"{rows} lines are shown, not {ROWS}")
        # Its own first look must be over.
        page.wait_for_timeout(2000)
        page.evaluate(MARK)
        session = next(s for s in world.store.snapshot(int(time.time())).sessions if s.placement is not None)
        words = f"bench round {number}"
        began = time.time()
        world.store.warn(session.id, words, now_s=int(began))
        shown_at = page.evaluate(SHOWN_AT, words) / 1000
        return found | {"update_ms": 1000 * (shown_at - began), "fresh_lines": page.evaluate(FRESH)}
    finally:
        page.context.close()


def map_round(browser: Browser, world: Standing) -> dict[str, float]:
    """Open the map."""
    page = opened(browser, world, "map")
    try:
        found: dict[str, float] = page.evaluate(PAINTED)
        if page.locator(".gpu").count() != GPUS:
            raise SystemExit("not all GPUs are on the map")
        return found
    finally:
        page.context.close()


def measured(browser: Browser, folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return what was measured in each round but the first, which fills caches."""
    found: dict[str, list[dict[str, float]]] = {}
    with standing(folder / "sessions") as world:
        fill(world, ROWS - RUNNING)
        world.start()
        found["sessions"] = [sessions_round(browser, world, quietly(n)) for n in range(rounds + 1)][1:]
    with standing(folder / "map") as world:
        fill(world, WAITING)
        world.start()
        found["map"] = [map_round(browser, world) for _ in map(quietly, range(rounds + 1))][1:]
    return found


def quietly(number: int) -> int:
    """Wait a while for the machine to be less busy."""
    # Playwright has a loop of its own in this thread.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, quiet()).result()
    return number


def figures(raw: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return the medians, by page and measure."""
    return {
        f"{page}_{name}": round(statistics.median(one[name] for one in rounds), 1)
        for page, rounds in raw.items()
        for name in rounds[0]
    }


def main(words: Sequence[str] | None = None) -> int:
    default = ROOT / "bench" / "results" / f"people-pages-{time.strftime('%Y-%m-%d')}.json"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count; one comes before them")
    parser.add_argument("--out", type=Path, default=default, help="results file")
    given = parser.parse_args(words)
    begun, before = time.strftime("%Y-%m-%dT%H:%M:%S%z"), load()
    folder = Path(tempfile.mkdtemp(prefix="fgpu-bench-"))
    path = os.environ.get("FGPU_TEST_CHROMIUM") or shutil.which("chromium")
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=ARGS)
            version = browser.version
            raw = measured(browser, folder, given.rounds)
            browser.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = figures(raw)
    for name, value in found.items():
        limit = EXPECTED.get(name)
        verdict = "" if limit is None else f"  at most {limit:g}: {'ok' if value <= limit else 'MISS'}"
        print(f"{name:<26} {value:10.1f}{verdict}")
    results: dict[str, Any] = {
        "begun": begun,
        "source": source(),
        "machine": machine() | {"chromium": version},
        "load_before": before,
        "load_after": load(),
        "rounds": given.rounds,
        "figures": found,
        "values": raw,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
