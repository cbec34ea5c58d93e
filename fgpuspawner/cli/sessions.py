"""The commands that use the APIs, such as ``fgpu run``, ``list``, ``grow`` and ``audit``.

They need no configuration and no database: an address and a token, on any machine.
"""

from __future__ import annotations

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

import click

from fgpu_scheduler import ENDED, UP, memory_words
from fgpuspawner.cli import completion
from fgpuspawner.cli.api import AWAY, NO_HUB, TOKEN, URL, ApiClient, CallFailed, token_option
from fgpuspawner.cli.command import INTERRUPTED, Command, Report, UsageError, command, in_json
from fgpuspawner.text.tables import printable, table
from fgpuspawner.text.times import duration, instant

Json = dict[str, Any]

LOOK_EVERY_S, RESIZE_EVERY_S = 2.0, 0.5
FOUND_WITHIN_S = 60.0
AS_OPTION = {"count": "sessions"}
"""Fields that have another name on the command line."""

COMPLETED = {"image": completion.images, "group": completion.groups}
"""The fields that a shell completes."""

FIELDS = {
    "image": ("IMAGE", "its slug, or OWNER/NAME:TAG of a private one"),
    "group": ("GROUP", "the resource group"),
    "account": ("ACCOUNT", "the account for which the use counts"),
    "fgpu": ("FGPU", "how much GPU, such as 0.5"),
    "gpu_memory_mib": ("MIB", "exact GPU memory, in place of --fgpu"),
    "compute_percent": ("PERCENT", "exact compute, beside --gpu-memory-mib"),
    "gpu": ("WHEN", "at-start (default), or on-demand: it opens at once, and cells wait for the GPU"),
    "gpu_models": ("MODELS", "GPU models with commas between them, the most liked first"),
    "cpu": ("CORES", "CPU, such as 2"),
    "memory_mib": ("MIB", "memory; --memory-gib is the same in GiB"),
    "memory_gib": ("GIB", "memory, such as 4"),
    "count": ("NUMBER", "how many sessions to start"),
    "time_limit": ("H:MM", "how long it may run, such as 2:30"),
    "time_limit_s": ("SECONDS", "the same in seconds"),
    "priority": ("NUMBER", "higher ones go first"),
    "folders": ("NAMES", "shared folders with commas between them"),
    "setup": ("NUMBER", "saved variables and script, by their number"),
    "variables": ("@FILE", "variables of kernels and terminals: a file of lines NAME=value, or a text"),
    "script": ("@FILE", "a file with a bash script that runs at the session's start, or a text"),
    "name": ("NAME", "the session's name; default: the image and a number"),
}
"""The fields of a request that have an option, with its value and its help."""
OWN = ("variables", "script")
"""Fields with a user's secrets: never in an address, which proxies log."""


def users_command(name: str) -> Callable[[Callable[..., list[str]]], Command]:
    """Make a command that asks the Hub and the service; its function gets their `ApiClient` first."""

    def made(does: Callable[..., list[str]]) -> Command:
        @functools.wraps(does)
        def called(token_file: str | None, **given: Any) -> list[str]:
            api = ApiClient.from_environment(token_file)
            try:
                return does(api, **given)
            except (KeyError, TypeError, AttributeError):
                # JSON of another program, or of a version with other names.
                words = f"what {URL} names does not answer as this version of fgpu expects"
                raise CallFailed(NO_HUB, words) from None

        found: Command = command(name, epilog=f"{URL} is the Hub's address, {TOKEN} your token.")(called)
        return token_option(found)

    return made


def fields(does: Any) -> Any:
    """Add an option for each field of a request."""
    for name, (value, what) in reversed(FIELDS.items()):
        option = f"--{AS_OPTION.get(name, name).replace('_', '-')}"
        completer = completion.offers(COMPLETED[name]) if name in COMPLETED else None
        reads = _own if name in OWN else None
        does = click.option(option, name, metavar=value, help=what, shell_complete=completer, callback=reads)(
            does
        )
    return does


def _own(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Return a text, or that of the file after an ``@``: other users of a machine see arguments."""
    if not value or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise click.BadParameter(
            f"{value[1:]!r} cannot be read: {getattr(e, 'strerror', None) or e}"
        ) from None


def _number(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise click.BadParameter(f"{value[:40]!r} is not the number of a session; fgpu list has them")
    return int(value)


session_argument = click.argument(
    "session", callback=_number, shell_complete=completion.offers(completion.sessions)
)


def _given(options: Json) -> Json:
    return {name: value for name, value in options.items() if value is not None}


# -- reading ------------------------------------------------------------------------------------------


@users_command("list")
@click.option("--all", "everybody", is_flag=True, help="everybody's, for administrators; or their group's")
@click.option("--ended", is_flag=True, help="also the last that have ended")
def list_command(api: ApiClient, everybody: bool, ended: bool) -> list[str]:
    """List your live sessions."""
    more = {name: 1 for name, given in (("all", everybody), ("ended", ended)) if given}
    found = api.service_call("GET", "sessions", **more)
    return Report(_table(found["sessions"], users=everybody), found)


@users_command("show")
@session_argument
def show_command(api: ApiClient, session: int) -> list[str]:
    """Print everything about one session."""
    found = api.service_call("GET", f"sessions/{session}")
    lines = [
        f"{'' if n else _label(name):24}{printable(text)}"
        for name, value in found["session"].items()
        if value not in (None, [], "")
        for n, text in enumerate(_texts(name, value))
    ]
    return Report(lines, found)


@users_command("logs")
@session_argument
@click.option(
    "--lines", type=click.IntRange(1, 1000), metavar="NUMBER", help="how many of the last lines; default: 200"
)
def logs_command(api: ApiClient, session: int, lines: int | None) -> list[str]:
    """Print what a session's server and start script have printed, also of one that failed."""
    more = {} if lines is None else {"lines": lines}
    found = api.service_call("GET", f"sessions/{session}/log", **more)
    return Report([printable(line) for line in found["lines"]], found)


@users_command("forecast")
@fields
def forecast_command(api: ApiClient, **fields: str | None) -> list[str]:
    """Say when a request would start, without making it."""
    found = _forecast(api, _given(fields))
    if found["refusals"] and in_json():
        return Report(found=found, status=1)
    _raise_refusals(found)
    lines = [printable(found["text"])]
    if not found["starts_now"]:
        at_s, basis = found["expected_start_at_s"], found["basis"]
        when = basis if at_s is None else f"expected start {instant(at_s)}, from {basis}"
        lines.append(printable(f"position {found['position']}, {when}"))
    if found["largest_now"] and not found["starts_now"]:
        lines.append(f"{found['largest_now']} fGPU would start now")
    return Report(lines, found)


def _forecast(api: ApiClient, asked: Json) -> Json:
    own = {name: value for name, value in asked.items() if name not in OWN}
    return api.service_call("GET", "forecast", **own)


def _raise_refusals(found: Json) -> None:
    refusals = found["refusals"]
    if refusals:
        words = "; ".join(r["message"] for r in refusals)
        raise CallFailed(refusals[0]["code"], words, refusals[0]["field"])


@users_command("park")
@session_argument
@click.option("--never", "wish", flag_value="never-park", help="have it never parked, where this is allowed")
@click.option("--allow", "wish", flag_value="may-park", help="let it be parked again")
def park_command(api: ApiClient, session: int, wish: str | None) -> list[str]:
    """Give a session's GPU to others; its kernels and variables stay."""
    found = api.service_call("POST", f"sessions/{session}/{wish or 'park'}")
    words = PARKING_WORDS[wish]
    if wish == "never-park" and found["session"]["parked"] is not None:
        words = f"is parked; when it has its GPU again, it {words}"
    return Report([f"session {session} {words}"], found)


PARKING_WORDS = {
    None: "is being parked; a cell that needs the GPU gets it back",
    "never-park": "is never parked, unless you park it",
    "may-park": "may be parked while its GPU is idle",
}


@users_command("wake")
@session_argument
def wake_command(api: ApiClient, session: int) -> list[str]:
    """Ask for the GPU of a parked session."""
    found = api.service_call("POST", f"sessions/{session}/wake")
    return Report([f"session {session} gets its GPU back as soon as it is free"], found)


@users_command("rename")
@session_argument
@click.argument("name")
def rename_command(api: ApiClient, session: int, name: str) -> list[str]:
    """Give a session another name."""
    found = api.change("PATCH", f"sessions/{session}", {"name": name})
    return Report([printable(f"session {session} is now {found['session']['display_name']}")], found)


# -- starting and ending ------------------------------------------------------------------------------


@users_command("end")
@session_argument
def end_command(api: ApiClient, session: int) -> list[str]:
    """End a session, or cancel its request."""
    found = api.service_call("DELETE", f"sessions/{session}")
    became = "has ended" if found["session"]["state"] in ENDED else "is being ended"
    return Report([f"session {found['session']['id']} {became}"], found)


@users_command("run")
@fields
@click.option("--accept-image", metavar="DIGEST", help="accept somebody else's image, by its digest")
@click.option(
    "--server", metavar="SERVER", help="the server's name, in its address; default: the first free one"
)
@click.option("--wait", is_flag=True, help="wait until all run; 1 if one does not")
def run_command(
    api: ApiClient, accept_image: str | None, server: str | None, wait: bool, **fields: str | None
) -> list[str]:
    """Start sessions, or queue them."""
    # Without any option the Hub would take those of the last start.
    asked: Json = {"count": "1"} | _given(fields)
    user = api.service_call("GET", "me")["user"]
    if user is None:
        raise CallFailed("forbidden", "this token is no user's; make one on the Hub's page Tokens")
    _raise_refusals(_forecast(api, asked))
    accepted = {"accept_image": accept_image} if accept_image else {}
    with _one_at_a_time():
        before = _mine(api)
        taken = {s["server_name"] for s in before.values() if s["state"] not in ENDED}
        server = _free_name(taken) if server is None else server
        if server in taken:
            message = f"server {printable(server)!r} has a session; choose another --server, or leave it out"
            raise CallFailed("session_exists", message)
        api.start_server(user, server, asked | accepted)
        found = _new(api, server, max(before, default=0), int(asked["count"]))
    status = _wait(found, api) if wait else 0
    sessions = list(found.values())
    return Report(_table(sessions), {"sessions": sessions}, status=status)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one of a user's ``fgpu run`` choose a name at a time: the Hub would take two of one name for one start."""
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


def _mine(api: ApiClient) -> dict[int, Json]:
    found = api.service_call("GET", "sessions", ended=1)["sessions"]
    return {s["id"]: s for s in found if s["mine"]}


def _free_name(taken: Collection[str]) -> str:
    return "" if "" not in taken else next(n for i in count(2) if (n := f"gpu-{i}") not in taken)


def _new(api: ApiClient, name: str, last: int, many: int) -> dict[int, Json]:
    until = time.monotonic() + FOUND_WITHIN_S
    while True:
        found = _retried(lambda: _mine(api))
        first = min((i for i, s in found.items() if i > last and s["server_name"] == name), default=None)
        if first is not None:
            # All of one start are queued in one step, with numbers one after the other.
            return {i: found[i] for i in sorted(i for i in found if i >= first)[:many]}
        if time.monotonic() > until:
            raise CallFailed("not_started", "the Hub has not started it; its log says why")
        time.sleep(LOOK_EVERY_S)


def _wait(sessions: dict[int, Json], api: ApiClient) -> int:
    """Wait until all sessions run, print each change of state, and return the exit status."""
    said: dict[int, str] = {}
    try:
        while True:
            for i, session in sessions.items():
                words = _words(session)
                if said.get(i) != words:
                    said[i] = words
                    say(f"session {i}: {words}")
            left = [i for i, s in sessions.items() if s["state"] not in UP and s["state"] not in ENDED]
            if not left:
                return int(any(s["state"] in ENDED for s in sessions.values()))
            time.sleep(LOOK_EVERY_S)
            for i in left:
                ask = functools.partial(api.service_call, "GET", f"sessions/{i}")
                sessions[i] = _retried(ask)["session"]
    except KeyboardInterrupt:
        numbers = [i for i, s in sessions.items() if s["state"] not in ENDED]
        say(
            f"no longer waiting; the request stays: fgpu end {numbers[0]} ends it"
            if numbers
            else "interrupted"
        )
        return INTERRUPTED


def _retried(ask: Callable[[], Any]) -> Any:
    """Return the answer, and ask again while Hub or service are away: the request stays."""
    said = ""
    while True:
        try:
            return ask()
        except CallFailed as e:
            if e.code not in AWAY:
                raise
            if said != str(e):
                said = str(e)
                say(f"{said}; asking again")
            time.sleep(LOOK_EVERY_S)


def say(line: str) -> None:
    """Print a line on standard error."""
    print(f"fgpu: {printable(line)}", file=sys.stderr, flush=True)


# -- resizing, and the audit log ----------------------------------------------------------------------


@users_command("grow")
@session_argument
@click.argument("fgpu", required=False)
@click.option(
    "--gpu-memory-mib", type=int, metavar="MIB", help="exact GPU memory, of a session that was asked for so"
)
@click.option("--compute-percent", type=int, metavar="PERCENT", help="exact compute, beside the memory")
@click.option("--wait", is_flag=True, help="wait until it has it; 1 if it does not get it")
def grow_command(api: ApiClient, session: int, wait: bool, **amounts: str | int | None) -> list[str]:
    """Give a running session more of its GPU, or less: FGPU is the new amount, such as 1.0.

    Its programs run on; its CPU and memory stay. At most it can have what is free on its GPU now, and at least what its
    programs use.
    """
    wanted = _given(amounts)
    if not wanted:
        words = "name the new amount: fgpu grow SESSION 1.0, or --gpu-memory-mib"
        raise UsageError(words)
    address = f"sessions/{session}"
    found = api.change("PATCH", address, wanted)
    try:
        while wait and (found["session"]["resize"] or {}).get("state") == "ASKED":
            time.sleep(RESIZE_EVERY_S)
            found = _retried(lambda: api.service_call("GET", address))
    except KeyboardInterrupt:
        say("no longer waiting; the request stays")
        return Report(found=found, status=INTERRUPTED)
    has, resize = f"session {session} has {found['session']['amount']}", found["session"]["resize"]
    if wait and (resize is None or resize["state"] == "REFUSED"):
        if in_json():
            return Report(found=found, status=1)
        raise CallFailed("not_resized", "the session has ended" if resize is None else resize["message"])
    waits = resize is not None and resize["state"] == "ASKED"
    return Report([printable(f"{has}; {resize['asked']} is asked for" if waits else has)], found)


@users_command("audit")
@click.option(
    "--group",
    metavar="GROUP",
    shell_complete=completion.offers(completion.administered),
    help="lines of this resource group",
)
@click.option("--actor", metavar="NAME", help="lines of who did it")
@click.option("--action", metavar="ACTION", help="lines of what was done; node finds all of machines")
@click.option("--text", metavar="WORDS", help="lines with this in the target or the details")
@click.option("--before", metavar="NUMBER", help="lines older than the line of this number")
@click.option("--limit", metavar="NUMBER", help="how many at most, 500 or less; default: 50")
def audit_command(api: ApiClient, **filters: str | None) -> list[str]:
    """Show the audit log, newest first.

    Administrators of a resource group see that group's lines.
    """
    found = api.service_call("GET", "admin/audit", **_given(filters))
    names = ("actor", "action", "resource_group", "target", "details")
    rows = [
        (str(line["id"]), instant(line["at_s"]), *(printable(line[name] or "-") for name in names))
        for line in found["lines"]
    ]
    lines = table(("NUMBER", "WHEN", "WHO", "ACTION", "GROUP", "TARGET", "DETAILS"), rows)
    if found["next"] is not None:
        lines.append(f"older: --before {found['next']}")
    return Report(lines, found)


# -- words --------------------------------------------------------------------------------------------


def _words(session: Json) -> str:
    pull = (session["pull"] or {}).get("text")
    more = session["message"] or session["end_cause"] or session["wait_text"] or pull
    place = [f"position {session['position']}"] if session["position"] else []
    return ", ".join([session["state"], *place, *([more] if more else [])])


def _table(sessions: Sequence[Json], *, users: bool = False) -> list[str]:
    if not sessions:
        return ["no sessions"]
    rows = []
    for s in sessions:
        at_s = s["ended_at_s"] or s["started_at_s"] or s["submitted_at_s"]
        name = f"{s['user']}: {s['display_name']}" if users else s["display_name"]
        cells = (str(s["id"]), name, s["image"], s["amount"], instant(at_s), _words(s))
        rows.append([printable(cell) for cell in cells])
    return table(["session", "user: name" if users else "name", "image", "amount", "since", "state"], rows)


def _texts(name: str, value: object) -> list[str]:
    objects = value if isinstance(value, list) and any(isinstance(one, dict) for one in value) else [value]
    return [_plain(name, one) for one in objects]


def _label(name: str) -> str:
    for unit in ("_mib", "_percent", "_s"):
        name = name.removesuffix(unit)
    return name


def _plain(name: str, value: object) -> str:
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
