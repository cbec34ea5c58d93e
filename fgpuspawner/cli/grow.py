"""The command ``fgpu grow``: another amount of its GPU for a session that runs, through the API."""

from __future__ import annotations

import argparse
import time
from typing import Any

from fgpuspawner.cli import completion
from fgpuspawner.cli.api import TOKEN, URL, Api, CallFailed
from fgpuspawner.cli.command import INTERRUPTED, JsonReport, Report
from fgpuspawner.cli.completion import offers
from fgpuspawner.cli.sessions import Json, add_users_command, patiently, say, session_number
from fgpuspawner.text.tables import printable

LOOK_EVERY_S = 0.5
ASKED, REFUSED = "ASKED", "REFUSED"


def add_to(commands: Any) -> None:
    about = (
        "Give a running session more of its GPU, or less: the new amount, in fGPU. Its programs run on; its CPU and "
        "memory stay. At most it can have what is free on its GPU now, and at least what its programs use. "
        f"{URL} is the Hub's address, {TOKEN} your token."
    )
    parser = add_users_command(
        commands, grow, "grow", "give a running session more of its GPU, or less", about
    )
    number = parser.add_argument("session", type=session_number, metavar="SESSION", help="its number")
    offers(number, completion.sessions)
    parser.add_argument("fgpu", nargs="?", metavar="FGPU", help="the new amount, such as 1.0")
    parser.add_argument(
        "--gpu-memory-mib",
        type=int,
        metavar="MIB",
        help="exact GPU memory, of a session that was asked for so",
    )
    parser.add_argument(
        "--compute-percent", type=int, metavar="PERCENT", help="exact compute, beside the memory"
    )
    parser.add_argument("--wait", action="store_true", help="wait until it has it; 1 if it does not get it")


def grow(given: argparse.Namespace, api: Api) -> list[str]:
    """Ask for another amount, and return the session as it then is."""
    wanted: Json = {
        name: value
        for name in ("fgpu", "gpu_memory_mib", "compute_percent")
        if (value := getattr(given, name)) is not None
    }
    if not wanted:
        raise CallFailed(
            "bad_argument", "name the new amount: fgpu grow SESSION 1.0, or --gpu-memory-mib", "fgpu"
        )
    address = f"sessions/{given.session}"
    found = api.change("PATCH", address, wanted)
    try:
        while given.wait and (found["session"]["resize"] or {}).get("state") == ASKED:
            time.sleep(LOOK_EVERY_S)
            found = patiently(lambda: api.service_call("GET", address))
    except KeyboardInterrupt:
        say("no longer waiting; what was asked for stays")
        return Report([], status=INTERRUPTED)
    session, told = found["session"], found["session"]["resize"]
    if given.wait and (told is None or told["state"] == REFUSED):
        message = "the session has ended" if told is None else told["message"]
        if not given.json:
            raise CallFailed("not_resized", message)
        return JsonReport(found, status=1)
    if given.json:
        return JsonReport(found)
    has = f"session {session['id']} has {session['amount']}"
    waits = told is not None and told["state"] == ASKED
    return [printable(f"{has}; {told['asked']} is asked for" if waits else has)]
