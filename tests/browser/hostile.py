"""People's own words at their worst, wherever a page shows some: written into a Hub's database beside real sessions."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Page
from sqlalchemy import create_engine, insert, select

from fgpu_scheduler import Quota, QuotaScope
from fgpu_scheduler.store import schema
from fgpu_scheduler.store.administration import EditKind, write_edits
from fgpu_scheduler.store.quotas import quota_values
from hubprocess import HubProcess, until

MARK = "data-planted"
"""An attribute that no page has, unless one of these texts has become a part of it."""

RIGHT_TO_LEFT = "\u202e\u05d0\u05d1\u05d2"
"""What is written from right to left, and turns all that follows it around where nothing keeps it to itself."""

NAME = f"<img {MARK} src=x onerror=alert(1)>\"' {RIGHT_TO_LEFT}"
TEXT = f"</script><script {MARK}>alert(1)</script><b {MARK}>\"'`{{{{ 7 * 7 }}}}</b> {RIGHT_TO_LEFT}"
LONG = TEXT + "w" * (4000 - len(TEXT))

IN_A_FILE = TEXT.replace("\u202e", "")
"""A catalogue refuses what turns text around."""

CATALOGUE = f"""
[[image]]
slug = "python"
name = {json.dumps(IN_A_FILE)}
framework = {json.dumps(NAME.replace(chr(0x202E), ""))}
version = "3.11"
python = "3"
environment = {json.dumps(sys.prefix)}
reference = "lab/python:1"
description = {json.dumps((IN_A_FILE + "w" * 1000)[:1000])}
deprecated = {json.dumps((IN_A_FILE + "w" * 1000)[:1000])}
default = true
"""
ONE = {"fgpu": "0.4", "cpu": "0.1", "memory_mib": 128}


_TURNING = """
(within) => {
  const kept = (element) => {
    const style = getComputedStyle(element);
    return /isolate|plaintext/.test(style.unicodeBidi) || !/^(inline|contents|ruby)$/.test(style.display);
  };
  const found = [];
  const walker = document.createTreeWalker(document.querySelector(within), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    let element = node.parentElement;
    if (!node.data.includes("\\u202e") || element.closest("script, style, template, option, textarea")) continue;
    if (element.closest("#login_widget, #thenavbar, .navbar, #react-admin-hook")) continue;  // The Hub's own.
    while (!kept(element)) element = element.parentElement;
    // A character can keep them apart too, where there are no elements.
    const text = element.textContent.replace(/\\u2068[^\\u2069]*\\u2069/g, "");
    const after = text.split(/\\u202e[\\u05d0-\\u05ea]+w*/).slice(1).pop()?.trim();
    if (after && !element.closest("pre, code")) found.push(element.outerHTML.slice(0, 300));
  }
  return found;
}
"""
"""Elements in which a text from right to left is followed by something else that it would turn around."""


@dataclass(frozen=True)
class Planted:
    """Ids of planted objects, for their addresses."""

    running: int
    waiting: int
    ended: int
    private_image: int


def plant(hub: HubProcess) -> Planted:
    """Start a session and a waiting one of `NAME`, and write hostile rows of every kind into the database."""
    hub.add_user(quote(NAME, safe=""))
    for server, fgpu in (("", "0.4"), ("second", "2")):
        if f"{NAME}/{server}" not in hub.states():
            asked = hub.spawn(quote(NAME, safe=""), server, options={**ONE, "fgpu": fgpu})
            assert asked.status_code in (201, 202), asked.text
    until(lambda: hub.states().get(f"{NAME}/") == "RUNNING", what="the session runs")
    until(lambda: hub.states().get(f"{NAME}/second") == "PENDING", what="the other one waits")
    live = hub.sessions()
    ended, image = _write(hub.data / "fgpu.sqlite")
    return Planted(live[f"{NAME}/"].id, live[f"{NAME}/second"].id, ended, image)


def _write(database: Path) -> tuple[int, int]:
    now_s = int(time.time())
    engine = create_engine(f"sqlite:///{database}", connect_args={"timeout": 30})
    with engine.begin() as connection:
        found = connection.execute(
            select(schema.sessions.c.id).where(schema.sessions.c.message == LONG)
        ).scalars()
        if ids := list(found):
            images = connection.execute(select(schema.private_images.c.id)).scalars()
            return ids[0], next(iter(images))

        def add(table: Any, **values: Any) -> int:
            (key, *_) = connection.execute(insert(table).values(**values)).inserted_primary_key or (0,)
            return int(key) if isinstance(key, int) else 0

        ended = add(
            schema.sessions,
            user_name=NAME,
            server_name=TEXT,
            image=TEXT,
            resource_group="default",
            account=TEXT,
            name=TEXT,
            setup=0,
            parked_mib=0,
            on_demand=False,
            fgpu_milli=400,
            cpu_milli=100,
            memory_mib=128,
            state="ERROR",
            submitted_at_s=now_s - 900,
            held=False,
            attempt=1,
            priority=0,
            groups="[]",
            extended_s=0,
            refused="[]",
            sizes="[]",
            node_id="local",
            scheduled_at_s=now_s - 890,
            started_at_s=now_s - 880,
            ended_at_s=now_s - 60,
            end_cause="LAUNCH_FAILED",
            message=LONG,
        )
        device = connection.execute(select(schema.devices.c.uuid)).scalars().first()
        shared = {"fgpu_milli": 400, "memory_mib": 1638, "compute_percent": 20, "mode": "memory+compute"}
        add(schema.shares, session_id=ended, position=0, device_uuid=device, **shared)
        banner = {"text": TEXT + "w" * (500 - len(TEXT)), "level": "warning", "until_at_s": None}
        write_edits(connection, EditKind.BANNER, {"banner": banner}, by=NAME, now_s=now_s)
        add(
            schema.audit,
            at_s=now_s,
            actor=NAME,
            action="quota.change",
            target=TEXT + "w" * 400,
            details=(LONG[:2000]),
        )
        for scope, name in (("user", NAME), ("group", TEXT + "w" * 150)):
            values = quota_values(Quota(QuotaScope(scope), name, "default", max_sessions=9))
            add(schema.quotas, **values)
            edit = {f"{scope} {name}": {**values, "removed": False}}
            write_edits(connection, EditKind.QUOTA, edit, by=NAME, now_s=now_s)
        image = add(
            schema.private_images,
            owner=NAME,
            name=TEXT[:200],
            reference="fgpu-private/hostile:1",
            state="FAILED",
            message=LONG,
            node_id="local",
            session_id=ended,
            made_from="python",
            base="lab/python:1",
            facts="{}",
            server_kept=True,
            owners_alone=True,
            shared_users=json.dumps(["alice", NAME]),
            shared_groups=json.dumps([TEXT]),
            asked_by=NAME,
            asked_at_s=now_s - 600,
        )
    engine.dispose()
    return ended, image


def turned(page: Page, within: str = "body") -> list[str]:
    """Return the elements below ``within`` with text that changes the direction of what follows."""
    return [str(element) for element in page.evaluate(_TURNING, within)]
