"""What one session's spawn costs beside others' trouble, and how soon a share that becomes free is used again.

    .venv/bin/python bench/neighbours.py [--rounds 7] [--out bench/results/neighbours-DATE.json]

See bench/README.md for what the figures mean. Ends whatever it started, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import docker
from hubs import LIMIT_S, QUIET, ROOT, WITHOUT_SERVICE, Asking, BenchFailed, HubProcess, end
from machine import load, machine, quiet, source
from registry import Registry

from fgpuspawner.engines.docker.daemon import connect_here

ALONE, FROZEN, PULL = "alone", "another's container frozen and being stopped", "another's pull"
SLICE: dict[str, Any] = {"fgpu": "0.5", "cpu": "1", "memory_mib": 1024}
WHOLE: dict[str, Any] = {**SLICE, "fgpu": "2", "group": "one"}
PULL_MIB, PULL_MIB_PER_S = 200, 20.0
EXPECTED = {
    "frozen_ratio": 1.2,
    "pull_ratio": 1.2,
    "turnover_above_spawn_ms": 100.0,
    "death_frees_ms": 1000.0,
}
CATALOGUE = """
[[image]]
slug = "{slug}"
name = "{slug}"
framework = "python"
version = "3.11"
python = "3.11"
reference = "{reference}"
default = {default}
"""


class Deaths:
    """When containers ended, as the engine says."""

    def __init__(self, client: docker.APIClient, installation: str) -> None:
        self.at: dict[str, float] = {}
        filters = {"type": "container", "event": "die", "label": f"fgpu.installation={installation}"}
        self._stream = client.events(decode=True, filters=filters)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            for event in self._stream:
                self.at[event["Actor"]["Attributes"]["name"]] = event["timeNano"] / 1e9

    def close(self) -> None:
        """Stop listening."""
        self._stream.close()


def container_of(hub: HubProcess, user: str) -> str:
    """Return the name of the container of a user's session."""
    session = hub.sessions()[f"{user}/"]
    return f"fgpu-{hub.store.installation_id}-{session.id}-{session.attempt}"


async def is_or_is_not(hub: HubProcess, user: str, state: str, *, wanted: bool = True) -> None:
    """Wait until a user's session has, or no longer has, a state."""
    async with asyncio.timeout(LIMIT_S):
        while (hub.states().get(f"{user}/") == state) is not wanted:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


@asynccontextmanager
async def frozen(asking: Asking, client: docker.APIClient, user: str) -> AsyncIterator[None]:
    """Have a container that takes no signal, and that its user wants to end."""
    await asking.spawn(user, SLICE)
    client.kill(container_of(asking.hub, user), "SIGSTOP")
    stopping = asyncio.create_task(asking.stop(user))
    await asyncio.sleep(0.5)
    yield
    await stopping


@asynccontextmanager
async def pulling(asking: Asking, client: docker.APIClient, user: str, reference: str) -> AsyncIterator[None]:
    """Have an engine fetch an image for another user."""
    with contextlib.suppress(docker.errors.ImageNotFound):
        client.remove_image(reference, force=True)
    await asking.request_spawn(user, {**SLICE, "image": "large"})
    await is_or_is_not(asking.hub, user, "PULLING")
    await asyncio.sleep(1)
    yield
    if asking.hub.states().get(f"{user}/") != "PULLING":
        raise BenchFailed("the pull had ended before the spawn that it was to be beside; make it longer")
    await asking.stop(user)


async def one_round(asking: Asking, client: docker.APIClient, run: str, reference: str) -> dict[str, float]:
    """Return the seconds of one spawn beside each."""
    beside = {
        ALONE: contextlib.nullcontext(),
        FROZEN: frozen(asking, client, f"{run}-other"),
        PULL: pulling(asking, client, f"{run}-third", reference),
    }
    found: dict[str, float] = {}
    for name, trouble in beside.items():
        async with trouble:
            if name == ALONE:
                await quiet()
            found[name] = await asking.spawn(f"{run}-user", SLICE)
            await asyncio.sleep(0.3)
        await asking.stop(f"{run}-user")
    return found


async def turnover(asking: Asking, client: docker.APIClient, run: str) -> dict[str, float]:
    """Return what passes between the end of one session and the start of the next, which waits for its share."""
    hub = asking.hub
    deaths = Deaths(client, hub.store.installation_id)
    try:
        await asking.spawn(f"{run}-user", WHOLE)
        await asking.stop(f"{run}-user")
        await quiet()
        plain_s = await asking.spawn(f"{run}-user", WHOLE)
        waits = asyncio.create_task(asking.spawn(f"{run}-other", WHOLE))
        await is_or_is_not(hub, f"{run}-other", "PENDING")
        await quiet()
        first = container_of(hub, f"{run}-user")
        stopping = asyncio.create_task(asking.stop(f"{run}-user"))
        await waits
        ready_at = time.time()
        await stopping
        # Also by the unrequested death of a session.
        third = asyncio.create_task(asking.spawn(f"{run}-third", WHOLE))
        await is_or_is_not(hub, f"{run}-third", "PENDING")
        second = container_of(hub, f"{run}-other")
        client.kill(second, "SIGKILL")
        await is_or_is_not(hub, f"{run}-third", "PENDING", wanted=False)
        placed_at = time.time()
        await third
        await asking.stop(f"{run}-third")
        return {
            "plain_s": plain_s,
            "from_death_s": ready_at - deaths.at[first],
            "death_to_placed_s": placed_at - deaths.at[second],
        }
    finally:
        deaths.close()


async def measure(hub: HubProcess, client: docker.APIClient, rounds: int, reference: str) -> dict[str, Any]:
    """Return every single value."""
    run = f"b{secrets.token_hex(3)}"
    spawns: list[dict[str, float]] = []
    turns: list[dict[str, float]] = []
    async with Asking.of(hub) as asking:
        await asking.add_users([f"{run}-{name}" for name in ("user", "other", "third")])
        for number in range(rounds + 1):
            one, turn = await one_round(asking, client, run, reference), await turnover(asking, client, run)
            say(
                f"round {number or 'warm-up'}: "
                + ", ".join(f"{k} {v:.2f}" for k, v in {**one, **turn}.items())
            )
            if number:
                spawns.append(one)
                turns.append(turn)
    return {"spawns_s": spawns, "turnovers_s": turns}


def figures(raw: dict[str, Any]) -> dict[str, float]:
    """Return the medians and ratios of every single value."""
    middle = {name: median(one[name] for one in raw["spawns_s"]) for name in (ALONE, FROZEN, PULL)}
    turns = raw["turnovers_s"]
    above = median(turn["from_death_s"] - turn["plain_s"] for turn in turns)
    return {
        "alone_s": middle[ALONE],
        "frozen_ratio": middle[FROZEN] / middle[ALONE],
        "pull_ratio": middle[PULL] / middle[ALONE],
        "plain_s": median(turn["plain_s"] for turn in turns),
        "turnover_s": median(turn["from_death_s"] for turn in turns),
        "turnover_above_spawn_ms": 1000 * above,
        "death_frees_ms": 1000 * median(turn["death_to_placed_s"] for turn in turns),
    }


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run, print, write; 1 if something did not run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default 7)")
    default = ROOT / "bench" / "results" / time.strftime("neighbours-%Y-%m-%d.json")
    parser.add_argument("--keep", action="store_true", help="keep the Hub's log beside the results")
    parser.add_argument("--out", type=Path, default=default, help="results file")
    given = parser.parse_args()
    begun, before = time.strftime("%Y-%m-%dT%H:%M:%S%z"), load()
    folder = Path(tempfile.mkdtemp(prefix="fgpu-bench-"))
    client = connect_here({})
    registry = Registry(PULL_MIB, PULL_MIB_PER_S)
    catalogue = folder / "catalogue.toml"
    catalogue.write_text(
        CATALOGUE.format(slug="python", reference="fgpuspawner/base:0.1", default="true")
        + CATALOGUE.format(slug="large", reference=registry.reference, default="false")
    )
    nodes = [
        {"name": "local", "cpu": 64, "memory_mib": 65536, "gpus": {"simulated": 8}},
        {"name": "one", "group": "one", "cpu": 64, "memory_mib": 65536, "gpus": {"simulated": 1}},
    ]
    hub = HubProcess(
        folder / "hub",
        runtime="docker",
        after=QUIET + WITHOUT_SERVICE,
        nodes=nodes,
        groups={"default": {}, "one": {}},
        catalogue=str(catalogue),
    )
    try:
        hub.start()
        raw = asyncio.run(measure(hub, client, given.rounds, registry.reference))
    except (BenchFailed, AssertionError, TimeoutError, OSError, docker.errors.DockerException) as e:
        say(f"{hub.log_text()[-3000:]}\nFAILED: {type(e).__name__}: {e}")
        return 1
    finally:
        if given.keep:
            shutil.copy(hub.log, given.out.with_suffix(".log"))
        end(hub, client)
        registry.close()
        client.close()
        shutil.rmtree(folder, ignore_errors=True)
    found = figures(raw)
    for name, value in found.items():
        limit = EXPECTED.get(name)
        verdict = "" if limit is None else f"  at most {limit:g}: {'ok' if value <= limit else 'MISS'}"
        print(f"{name:<26} {value:8.3f}{verdict}")
    results = {
        "begun": begun,
        "source": source(),
        "machine": machine(),
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
