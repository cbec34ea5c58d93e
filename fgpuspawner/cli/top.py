"""The command ``fgpu top``: GPUs, sessions and the queue, live, of all that a token may see.

It asks every few seconds, in a thread of its own, so that keys are answered while a Hub is slow; and more rarely while
the Hub does not answer, with what was last heard still there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fgpuspawner.cli.api import AWAY, TOKEN, URL, Api, CallFailed
from fgpuspawner.cli.command import JsonReport, add_command
from fgpuspawner.cli.top_frame import Json, View, frame, sorts

EVERY_S = 5
RAREST_S = 60
WIDTH = 160
"""Of a frame for a file."""
KEYS_WITHIN_MS = 200
STEP = 10


def add_to(commands: Any) -> None:
    """Add the command to the parser of ``fgpu``."""
    about = (
        "Show GPUs, your sessions and the queue, live; everybody's for administrators. Keys: q ends it, s sorts, "
        "/ filters, arrows scroll. Where the output is no terminal, it is one frame. "
        f"{URL} is the Hub's address, {TOKEN} your token."
    )
    parser = add_command(commands, run, "top", "GPUs, sessions and queue, live", about)
    parser.add_argument("--once", action="store_true", help="one frame, and end")
    what = f"seconds between two looks, 2 to {RAREST_S}; default: {EVERY_S}"
    parser.add_argument("--every", type=_seconds, metavar="SECONDS", default=EVERY_S, help=what)
    parser.add_argument("--token-file", metavar="FILE", help=f"a file with the token, instead of {TOKEN}")


def _seconds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 2 <= int(text[:9]) <= RAREST_S):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 2 to {RAREST_S}")
    return int(text)


def run(given: argparse.Namespace) -> list[str]:
    """Return one frame, or show them until somebody ends it.

    Raises:
        CallFailed: the Hub refused, or did not answer the first time.
    """
    look = looker(Api.from_environment(given.token_file))
    found = look()
    if given.json:
        return JsonReport(found) if given.once else _stream(look, found, given.every)
    if (
        given.once
        or not (sys.stdout.isatty() and sys.stdin.isatty())
        or os.environ.get("TERM", "dumb") == "dumb"
    ):
        width = shutil.get_terminal_size((WIDTH, 0)).columns
        return [line.text for line in frame(found, View(), width=width, height=None)]
    # Not every system's Python has it.
    import curses

    # Where somebody has exported the size of before it would be kept to, also when the terminal gets another.
    for name in ("LINES", "COLUMNS"):
        os.environ.pop(name, None)
    with contextlib.suppress(KeyboardInterrupt):
        curses.wrapper(lambda screen: _live(screen, look, found, given.every))
    raise SystemExit(0)


def looker(api: Api) -> Callable[[], Json]:
    """Return what asks for all that is shown."""
    me = api.service_call("GET", "me")
    everybodys = {"all": 1} if me["admin"] or me["administers"] else {}

    def look() -> Json:
        capacity = api.service_call("GET", "capacity")
        return {
            "version": 1,
            "at_s": int(time.time()),
            "all": bool(everybodys),
            "me": api.service_call("GET", "me"),
            "capacity": capacity,
            "sessions": api.service_call("GET", "sessions", **everybodys)["sessions"],
            "meters": api.service_call("GET", "meters", **(everybodys if me["admin"] else {}))["meters"],
            "queues": [
                {"group": g["name"], "entries": api.service_call("GET", "queue", group=g["name"])["entries"]}
                for g in capacity["groups"]
            ],
        }

    return look


def _stream(look: Callable[[], Json], found: Json, every_s: int) -> list[str]:
    """Print an object a look, each a line, until somebody ends it or reads no more."""
    try:
        while True:
            print(json.dumps(found), flush=True)
            time.sleep(every_s)
            found = _again(look, found)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Python would complain once more while it ends.
        sys.stdout = None
    raise SystemExit(0)


def _again(look: Callable[[], Json], before: Json) -> Json:
    """Return what is now; while Hub or service are away what was before, with the words of it as ``trouble``."""
    try:
        return look()
    except CallFailed as e:
        if e.code not in AWAY:
            raise
        return {**before, "trouble": str(e)}


class _Watch(threading.Thread):
    """Looks again and again, and keeps the newest."""

    def __init__(self, look: Callable[[], Json], found: Json, every_s: int) -> None:
        super().__init__(daemon=True)
        self.found = found
        self.failed: BaseException | None = None
        self._look, self._every_s = look, every_s

    def run(self) -> None:
        wait_s = self._every_s
        try:
            while True:
                time.sleep(wait_s)
                self.found = _again(self._look, self.found)
                away = "trouble" in self.found
                wait_s = min(2 * wait_s, RAREST_S) if away else self._every_s
        except Exception as e:
            self.failed = e


def _live(screen: Any, look: Callable[[], Json], found: Json, every_s: int) -> None:
    import curses

    kinds = {
        "title": curses.A_REVERSE,
        "heading": curses.A_BOLD,
        "warning": curses.A_BOLD,
        "": curses.A_NORMAL,
    }
    if curses.has_colors():
        curses.use_default_colors()
        curses.init_pair(1, curses.COLOR_YELLOW, -1)
        kinds["warning"] = curses.color_pair(1)
    with contextlib.suppress(curses.error):
        # Not every terminal can hide it.
        curses.curs_set(0)
    screen.timeout(KEYS_WITHIN_MS)
    watch = _Watch(look, found, every_s)
    watch.start()
    view, shown = View(), None
    while watch.failed is None:
        size = screen.getmaxyx()
        if shown != (watch.found, view, size):
            shown = (watch.found, view, size)
            screen.erase()
            for n, line in enumerate(frame(watch.found, view, width=size[1] - 1, height=size[0])[: size[0]]):
                screen.addstr(n, 0, line.text, kinds[line.kind])
            screen.refresh()
        try:
            key = screen.get_wch()
        except curses.error:
            continue
        if key == "q" and not view.typing:
            return
        view = pressed(view, key, tuple(sorts(watch.found)))
    raise watch.failed


def pressed(view: View, key: str | int, orders: tuple[str, ...]) -> View:
    """Return how it is shown after a key."""
    import curses

    if view.typing:
        if key in ("\n", "\r", curses.KEY_ENTER):
            return replace(view, typing=False)
        if key == "\x1b":
            return replace(view, typing=False, words="")
        if key in ("\b", "\x7f", curses.KEY_BACKSPACE):
            return replace(view, words=view.words[:-1])
        return (
            replace(view, words=view.words + key, first=0)
            if isinstance(key, str) and key.isprintable()
            else view
        )
    if key == "s":
        return replace(view, sort=orders[(orders.index(view.sort) + 1) % len(orders)])
    if key == "/":
        return replace(view, typing=True, words="")
    steps = {curses.KEY_DOWN: 1, curses.KEY_UP: -1, curses.KEY_NPAGE: STEP, curses.KEY_PPAGE: -STEP}
    if key in steps:
        return replace(view, first=max(view.first + steps[key], 0))
    return view
