"""The command ``fgpu grow``: another amount of its GPU for a running session, through the API."""

from __future__ import annotations

import time

import click

from fgpuspawner.cli.api import Api, CallFailed
from fgpuspawner.cli.command import INTERRUPTED, Report, in_json
from fgpuspawner.cli.sessions import patiently, say, session_argument, users_command
from fgpuspawner.text.tables import printable

LOOK_EVERY_S = 0.5
ASKED, REFUSED = "ASKED", "REFUSED"


@users_command("grow")
@session_argument
@click.argument("fgpu", required=False)
@click.option(
    "--gpu-memory-mib", type=int, metavar="MIB", help="exact GPU memory, of a session that was asked for so"
)
@click.option("--compute-percent", type=int, metavar="PERCENT", help="exact compute, beside the memory")
@click.option("--wait", is_flag=True, help="wait until it has it; 1 if it does not get it")
def grow_command(api: Api, session: int, wait: bool, **amounts: str | int | None) -> list[str]:
    """Give a running session more of its GPU, or less: FGPU is the new amount, such as 1.0.

    Its programs run on; its CPU and memory stay. At most it can have what is free on its GPU now, and at least what its
    programs use.
    """
    wanted: dict[str, object] = {name: value for name, value in amounts.items() if value is not None}
    if not wanted:
        words = "name the new amount: fgpu grow SESSION 1.0, or --gpu-memory-mib"
        raise CallFailed("bad_argument", words, "fgpu")
    address = f"sessions/{session}"
    found = api.change("PATCH", address, wanted)
    try:
        while wait and (found["session"]["resize"] or {}).get("state") == ASKED:
            time.sleep(LOOK_EVERY_S)
            found = patiently(lambda: api.service_call("GET", address))
    except KeyboardInterrupt:
        say("no longer waiting; what was asked for stays")
        return Report(found=found, status=INTERRUPTED)
    has, told = f"session {session} has {found['session']['amount']}", found["session"]["resize"]
    if wait and (told is None or told["state"] == REFUSED):
        if in_json():
            return Report(found=found, status=1)
        raise CallFailed("not_resized", "the session has ended" if told is None else told["message"])
    waits = told is not None and told["state"] == ASKED
    return Report([printable(f"{has}; {told['asked']} is asked for" if waits else has)], found)
