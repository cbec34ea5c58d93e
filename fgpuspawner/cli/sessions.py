"""The commands ``fgpu run``, ``list``, ``show``, ``end`` and ``forecast``: one's own sessions, through the APIs.

They need no configuration and no database: an address and a token, on any machine.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from fgpu_scheduler import memory_words
from fgpuspawner.cli import completion
from fgpuspawner.cli.api import AWAY, NO_HUB, TOKEN, URL, Api, CallFailed
from fgpuspawner.cli.command import INTERRUPTED, JsonReport, Report, add_command
from fgpuspawner.cli.completion import offers
from fgpuspawner.text.tables import printable, table
from fgpuspawner.text.times import duration, instant

Json = dict[str, Any]

RUNNING, ENDING = "RUNNING", "TERMINATING"
ENDED = frozenset({"TERMINATED", "ERROR", "CANCELLED"})
LOOK_EVERY_S = 2.0
FOUND_WITHIN_S = 60.0
ACCEPTED = "accept_image"
AS_OPTION = {"count": "sessions"}
"""Fields that are called otherwise on the command line."""

OFFERED = {"image": completion.images, "group": completion.groups}
"""Fields whose values a shell completes."""

ASKED = {
    "image": ("IMAGE", "its slug, or OWNER/NAME:TAG of a private one"),
    "group": ("GROUP", "the resource group"),
    "fgpu": ("FGPU", "how much GPU, such as 0.5"),
    "gpu_memory_mib": ("MIB", "exact GPU memory, in place of --fgpu"),
    "compute_percent": ("PERCENT", "exact compute, beside --gpu-memory-mib"),
    "gpu_models": ("MODELS", "GPU models with commas between them, the most liked first"),
    "cpu": ("CORES", "CPU, such as 2"),
    "memory_mib": ("MIB", "memory; --memory-gib is the same in GiB"),
    "memory_gib": ("GIB", "memory, such as 4"),
    "count": ("NUMBER", "so many sessions at once"),
    "time_limit": ("H:MM", "how long it may run, such as 2:30"),
    "time_limit_s": ("SECONDS", "the same in seconds"),
    "priority": ("NUMBER", "higher ones go first"),
}
"""Fields that have an option, with what it takes: ``gpu_models`` says all that one model could."""


def add_to(commands: Any) -> None:
    where = f"{URL} is the Hub's address, {TOKEN} your token."
    starting = add_users_command(
        commands, run, "run", "start sessions, or queue them", f"Start sessions, or queue them. {where}"
    )
    _add_fields(starting)
    starting.add_argument(
        "--accept-image", metavar="DIGEST", help="accept somebody else's image, by its digest"
    )
    starting.add_argument("--name", default=None, help="the server's name; default: the first free one")
    starting.add_argument("--wait", action="store_true", help="wait until all run; 1 if one does not")
    listing = add_users_command(commands, list_, "list", "your sessions", f"List your live sessions. {where}")
    listing.add_argument(
        "--all", action="store_true", help="everybody's, for administrators; or their group's"
    )
    listing.add_argument("--ended", action="store_true", help="also the last that have ended")
    for name, does, what in (
        ("show", show, "all that is known of one session"),
        ("end", end, "end a session, or cancel its request"),
    ):
        parser = add_users_command(commands, does, name, what, f"{what[0].upper()}{what[1:]}. {where}")
        number = parser.add_argument("session", type=session_number, metavar="SESSION", help="its number")
        offers(number, completion.sessions)
    about = f"Say what would become of a request, without making it. {where}"
    _add_fields(add_users_command(commands, forecast, "forecast", "when a request would start", about))


def add_users_command(
    commands: Any, does: Callable[[argparse.Namespace, Api], list[str]], name: str, what: str, about: str
) -> argparse.ArgumentParser:
    """Add a command that asks the Hub and the service, and return its parser for more."""

    def called(given: argparse.Namespace) -> list[str]:
        api = Api.from_environment(given.token_file)
        try:
            return does(given, api)
        except (KeyError, TypeError, AttributeError):
            # JSON, but of something else, or of a version that has it otherwise.
            raise CallFailed(
                NO_HUB, f"what {URL} names does not answer as this version of fgpu expects"
            ) from None

    parser = add_command(commands, called, name, what, about)
    parser.add_argument("--token-file", metavar="FILE", help=f"a file with the token, instead of {TOKEN}")
    return parser


def _add_fields(parser: argparse.ArgumentParser) -> None:
    for name, (value, what) in ASKED.items():
        option = f"--{AS_OPTION.get(name, name).replace('_', '-')}"
        field = parser.add_argument(option, dest=name, metavar=value, help=what)
        if name in OFFERED:
            offers(field, OFFERED[name])


def session_number(text: str) -> int:
    """Return the number of a session, as an argument."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise argparse.ArgumentTypeError(
            f"{printable(text[:40])!r} is not the number of a session; fgpu list has them"
        )
    return int(text)


def _asked(given: argparse.Namespace) -> Json:
    return {name: value for name in ASKED if (value := getattr(given, name)) is not None}


# -- reading ------------------------------------------------------------------------------------------


def list_(given: argparse.Namespace, api: Api) -> list[str]:
    """Return the caller's sessions."""
    more = {name: 1 for name in ("all", "ended") if getattr(given, name)}
    found = api.service_call("GET", "sessions", **more)
    return JsonReport(found) if given.json else _table(found["sessions"], users=given.all)


def show(given: argparse.Namespace, api: Api) -> list[str]:
    """Return all that is known of one session."""
    found = api.service_call("GET", f"sessions/{given.session}")
    if given.json:
        return JsonReport(found)
    return [
        f"{'' if n else _label(name):24}{printable(text)}"
        for name, value in found["session"].items()
        if value not in (None, [], "")
        for n, text in enumerate(_lines(name, value))
    ]


def forecast(given: argparse.Namespace, api: Api) -> list[str]:
    """Return what would become of a request."""
    found = _foreseen(_asked(given), api)
    if given.json:
        return JsonReport(found, status=1 if found["refusals"] else 0)
    _raise_refusals(found)
    lines = [printable(found["text"])]
    if found["largest_now"] and not found["starts_now"]:
        lines.append(f"{found['largest_now']} fGPU would start now")
    return lines


def _foreseen(asked: Json, api: Api) -> Json:
    return api.service_call("GET", "forecast", **asked)


def _raise_refusals(found: Json) -> None:
    refusals = found["refusals"]
    if refusals:
        words = "; ".join(r["message"] for r in refusals)
        raise CallFailed(refusals[0]["code"], words, refusals[0]["field"])


# -- starting and ending ------------------------------------------------------------------------------


def end(given: argparse.Namespace, api: Api) -> list[str]:
    """End a session, or cancel its request."""
    found = api.service_call("DELETE", f"sessions/{given.session}")
    session = found["session"]
    became = "has ended" if session["state"] in ENDED else "is being ended"
    return JsonReport(found) if given.json else [f"session {session['id']} {became}"]


def run(given: argparse.Namespace, api: Api) -> list[str]:
    """Start sessions, and return them as they then are; with ``--wait`` as they are when they run."""
    asked = _asked(given)
    # Never without an option: the Hub would take those of the last start.
    asked.setdefault("count", "1")
    user = api.service_call("GET", "me")["user"]
    if user is None:
        raise CallFailed("forbidden", "this token is no user's; make one on the Hub's page Tokens")
    _raise_refusals(_foreseen(asked, api))
    accepted = {ACCEPTED: given.accept_image} if given.accept_image else {}
    with _one_at_a_time():
        before = _mine(api)
        taken = {s["server_name"] for s in before.values() if s["state"] not in ENDED}
        name = _free_name(taken) if given.name is None else given.name
        if name in taken:
            message = f"server {printable(name)!r} has a session; choose another --name, or leave it out"
            raise CallFailed("session_exists", message)
        api.start_server(user, name, asked | accepted)
        found = _new(api, name, max(before, default=0), int(asked["count"]))
    status = _wait(found, api) if given.wait else 0
    sessions = list(found.values())
    if given.json:
        return JsonReport({"sessions": sessions}, status=status)
    return Report(_table(sessions), status=status)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep two of these commands of one user from choosing the same name: the Hub would take both for one start."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "fgpu-run.lock").open("a")
    except OSError:
        # Where this user can write nothing there is nothing to lock.
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _mine(api: Api) -> dict[int, Json]:
    """Return the caller's sessions by number: the live ones, and the last that have ended."""
    found = api.service_call("GET", "sessions", ended=1)["sessions"]
    return {s["id"]: s for s in found if s["mine"]}


def _free_name(taken: Collection[str]) -> str:
    return "" if "" not in taken else next(n for i in count(2) if (n := f"gpu-{i}") not in taken)


def _new(api: Api, name: str, last: int, many: int) -> dict[int, Json]:
    """Return the sessions of the start that was just asked for, as soon as they are there."""
    until = time.monotonic() + FOUND_WITHIN_S
    while True:
        found = patiently(lambda: _mine(api))
        first = min((i for i, s in found.items() if i > last and s["server_name"] == name), default=None)
        if first is not None:
            # All of one start are queued in one step, with numbers one after the other.
            return {i: found[i] for i in sorted(i for i in found if i >= first)[:many]}
        if time.monotonic() > until:
            raise CallFailed("not_started", "the Hub has not started it; its log says why")
        time.sleep(LOOK_EVERY_S)


def _wait(sessions: dict[int, Json], api: Api) -> int:
    """Wait until all run, and say on the way what becomes of them; return the exit status.

    Interrupted, they keep their places: it is the same as closing the waiting page.
    """
    told: dict[int, str] = {}
    try:
        while True:
            for i, session in sessions.items():
                words = _words(session)
                if told.get(i) != words:
                    told[i] = words
                    say(f"session {i}: {words}")
            left = [i for i, s in sessions.items() if s["state"] != RUNNING and s["state"] not in ENDED]
            if not left:
                return int(any(s["state"] in ENDED for s in sessions.values()))
            time.sleep(LOOK_EVERY_S)
            for i in left:
                ask = functools.partial(api.service_call, "GET", f"sessions/{i}")
                sessions[i] = patiently(ask)["session"]
    except KeyboardInterrupt:
        numbers = [i for i, s in sessions.items() if s["state"] not in ENDED]
        say(
            f"no longer waiting; what was asked for stays: fgpu end {numbers[0]} ends it"
            if numbers
            else "interrupted"
        )
        return INTERRUPTED


def patiently(ask: Callable[[], Any]) -> Any:
    """Return the answer, and ask again while Hub or service are away: what was asked for stays."""
    told = ""
    while True:
        try:
            return ask()
        except CallFailed as e:
            if e.code not in AWAY:
                raise
            if told != str(e):
                told = str(e)
                say(f"{told}; asking again")
            time.sleep(LOOK_EVERY_S)


def say(line: str) -> None:
    """Print a line beside the answer."""
    print(f"fgpu: {printable(line)}", file=sys.stderr, flush=True)


# -- words --------------------------------------------------------------------------------------------


def _words(session: Json) -> str:
    """Return a session's state, and what there is to say of it."""
    more = (
        session["message"]
        or session["end_cause"]
        or session["wait_text"]
        or (session["pull"] or {}).get("text")
    )
    place = [f"position {session['position']}"] if session["position"] else []
    return ", ".join([session["state"], *place, *([more] if more else [])])


def _table(sessions: Sequence[Json], *, users: bool = False) -> list[str]:
    if not sessions:
        return ["no sessions"]
    rows = []
    for s in sessions:
        at_s = s["ended_at_s"] or s["started_at_s"] or s["submitted_at_s"]
        server = f"{s['user']}/{s['server_name']}" if users else s["display_name"]
        cells = (str(s["id"]), server, s["image"], s["amount"], instant(at_s), _words(s))
        rows.append([printable(cell) for cell in cells])
    return table(["session", "user/server" if users else "server", "image", "amount", "since", "state"], rows)


def _lines(name: str, value: object) -> list[str]:
    """Return a member of a session's JSON for reading: each thing of a list, such as a GPU, on a line of its own."""
    things = value if isinstance(value, list) and any(isinstance(one, dict) for one in value) else [value]
    return [_plain(name, one) for one in things]


def _label(name: str) -> str:
    """Return a member's name without its unit, which is at the value."""
    for unit in ("_mib", "_percent", "_s"):
        name = name.removesuffix(unit)
    return name


def _plain(name: str, value: object) -> str:
    """Return a value for reading, on one line and with its unit; what is not known of a thing is left out."""
    match value:
        case str():
            return value
        case dict():
            known = ((key, own) for key, own in value.items() if own not in (None, [], ""))
            return ", ".join(f"{_label(key)} {_plain(key, own)}" for key, own in known)
        case list():
            return ", ".join(_plain(name, one) for one in value)
        case int() if name.endswith(("at_s", "from_s")):
            return instant(value)
        case int() if name.endswith("_s"):
            return duration(value)
        case int() if name.endswith("_mib"):
            return memory_words(value)
        case int() | float() if name.endswith("_percent"):
            return f"{value} %"
        case _:
            return json.dumps(value)
