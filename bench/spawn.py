"""FGPUSpawner against plain DockerSpawner on this machine: spawns, bursts, stops, and the Hub under a queue.

    .venv/bin/python bench/spawn.py [--rounds 9] [--burst 8] [--out bench/results/spawn-DATE.json]

See bench/README.md for what the figures mean. Ends whatever it started, also on Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import secrets
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import docker
from hubs import (
    ROOT,
    Asking,
    BenchFailed,
    HubProcess,
    docker_hub,
    end,
    ordinary,
    plain_hub,
    queue_hub,
    remove_containers,
    waiting,
)
from machine import load, machine, quiet, source

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.docker import networks as shared_network
from fgpuspawner.engines.docker.daemon import connect_here
from fgpuspawner.images.catalogue import load_catalogue
from fgpuspawner.settings import FGPU

OURS, POOL, PLAIN, SAME = "FGPUSpawner", "with a pool", "DockerSpawner", "on our image"
"""Ours without and with a filled pool; DockerSpawner with an ordinary server environment, and with our image."""
# As many cores as there are: DockerSpawner limits none, and a limit would be what is measured.
SLICE: dict[str, Any] = {"fgpu": "0.5", "cpu": "2", "memory_mib": 2048}
OPTIONS: dict[str, dict[str, Any]] = {OURS: SLICE, POOL: SLICE, PLAIN: {}, SAME: {}}
RATIOS = {
    "": (OURS, PLAIN),
    "pool_": (POOL, PLAIN),
    "same_image_": (OURS, SAME),
    "pool_same_image_": (POOL, SAME),
}
FILLED_WITHIN_S = 120
Before = Callable[[str], Awaitable[None]]
IDLE, QUEUED, WATCHED = "none queued", "queued", "queued, pages open, changing"
FAILURES = (
    BenchFailed,
    BadSettings,
    AssertionError,  # The Hubs' harness is the tests', and says so with this.
    TimeoutError,
    OSError,
    aiohttp.ClientError,
    docker.errors.DockerException,
)
PACE_S = 0.02
"""Between two timed requests, so that they also meet what the Hub does every few seconds."""


# --- Measuring ----------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def turns(sides: Sequence[str], count: int) -> list[list[str]]:
    """Return the order of a round: A, B, C, then B, C, A, ... so that none is always first, or always after another."""
    orders = []
    for n in range(count):
        turned = [*sides[n % len(sides) :], *sides[: n % len(sides)]]
        orders.append(turned if n // len(sides) % 2 == 0 else turned[::-1])
    return orders


async def measure_rounds(
    sides: dict[str, Asking], users: list[str], rounds: int, before: Before
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each spawn and stop. A round that fills the caches comes first and is dropped."""
    found: dict[str, dict[str, list[float]]] = {
        side: {"spawn_s": [], "spawn_cpu_s": [], "stop_s": [], "busy_before_percent": []} for side in sides
    }
    for number, order in enumerate(turns(list(sides), rounds + 1)):
        for side in order:
            user = users[number % len(users)]
            await before(side)
            busy_percent = await quiet()
            cpu_s = sides[side].cpu_s()
            spawn_s = await sides[side].spawn(user, OPTIONS[side])
            cpu_s = sides[side].cpu_s() - cpu_s
            await asyncio.sleep(0.5)
            stop_s = await sides[side].stop(user)
            say(f"round {number or 'warm-up'}: {side:<14} ready {spawn_s:.2f} s, stopped {stop_s:.2f} s")
            if number:
                found[side]["busy_before_percent"].append(busy_percent)
                found[side]["spawn_s"].append(spawn_s)
                found[side]["spawn_cpu_s"].append(cpu_s)
                found[side]["stop_s"].append(stop_s)
    return found


async def commands_of(
    sides: dict[str, Asking], client: docker.APIClient, run: str, user: str
) -> dict[str, list[str]]:
    """Return what each side's containers are made with, once each has started a server."""
    commands: dict[str, list[str]] = {}
    for side, asking in sides.items():
        await asking.spawn(user, OPTIONS[side])
        listed = await asyncio.to_thread(client.containers)
        own = [e["Id"] for e in listed if run in str(e["Names"]) + str(e["Labels"])]
        if side == POOL:
            installation = asking.hub.store.installation_id
            own = [
                e["Id"] for e in listed if installation in str(e["Names"]) and "-warm-" not in str(e["Names"])
            ]
        if len(own) != 1:
            raise BenchFailed(f"{len(own)} containers for one server of {side}")
        found = await asyncio.to_thread(client.inspect_container, own[0])
        commands[side] = [found["Path"], *found["Args"]]
        await asking.stop(user)
    return commands


async def measure_bursts(
    sides: dict[str, Asking], users: list[str], bursts: int, before: Before
) -> dict[str, dict[str, list[Any]]]:
    """Return for each burst the seconds until each of its servers was ready, all of them asked for at once."""
    found: dict[str, dict[str, list[Any]]] = {
        side: {"ready_s": [], "cpu_s": [], "busy_before_percent": []} for side in sides
    }
    for number, order in enumerate(turns(list(sides), bursts), 1):
        for side in order:
            asking = sides[side]
            await before(side)
            found[side]["busy_before_percent"].append(await quiet())
            cpu_s = asking.cpu_s()
            ready_s = await asyncio.gather(*(asking.spawn(user, OPTIONS[side]) for user in users))
            found[side]["cpu_s"].append(asking.cpu_s() - cpu_s)
            found[side]["ready_s"].append(sorted(ready_s))
            say(f"burst {number}: {side:<14} half ready {median(ready_s):.2f} s, all {max(ready_s):.2f} s")
            await asyncio.gather(*(asking.stop(user) for user in users))
    return found


async def measure_requests(asking: Asking, user: str, samples: int) -> dict[str, list[float]]:
    """Return the milliseconds of each of the Hub's other requests: one client, one after the other."""
    paths = {"GET users/NAME": f"users/{user}", "GET /": ""}
    found: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(samples):
        for name, path in paths.items():
            found[name].append(await asking.timed(path))
            await asyncio.sleep(PACE_S)
    return found


async def measure_queue(
    hub: HubProcess, run: str, count: int, samples: int
) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of requests without a queue, with one, and with one that is looked at."""
    users = [f"{run}q{n}" for n in range(count + 1)]
    owner, waiting = users[0], users[1:]
    half: dict[str, Any] = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}
    found: dict[str, dict[str, list[float]]] = {}
    async with Asking.of(hub) as asking:
        await asking.add_users(users)
        # Sessions that must have ended before an expected start is shown; showing it costs the most.
        for _ in range(6):
            await asking.spawn(owner, half)
            await asking.stop(owner)
        await asking.spawn(owner, {**half, "fgpu": "2"})
        say(f"{samples} samples each of the Hub's other requests, {IDLE}")
        found[IDLE] = await measure_requests(asking, waiting[0], samples)
        await asyncio.gather(*(asking.request_spawn(user, half) for user in waiting))
        await queued(hub, count)
        say(f"the same with {count} sessions {QUEUED}")
        found[QUEUED] = await measure_requests(asking, waiting[0], samples)
        say(f"the same with {count} sessions {WATCHED}")
        async with (
            background([look(asking, user) for user in waiting[:-1]]),
            background([change(asking, waiting[-1], half)]),
        ):
            await asyncio.sleep(3)
            found[WATCHED] = await measure_requests(asking, waiting[0], samples)
    return found


async def queued(hub: HubProcess, count: int) -> None:
    """Make sure that this number of requests waits in the scheduler's own database."""
    for _ in range(100):
        states = list((await asyncio.to_thread(hub.states)).values())
        if states.count("PENDING") == count:
            return
        await asyncio.sleep(0.1)
    raise BenchFailed(f"{states.count('PENDING')} requests wait, not {count}")


async def look(asking: Asking, user: str) -> None:
    """Have the user's waiting page open."""
    async for _ in asking.events(user):
        pass
    raise BenchFailed(f"{user} does not wait any more")


async def change(asking: Asking, user: str, options: dict[str, Any]) -> None:
    """Cancel and repeat the last request of the queue, one change a second."""
    while True:
        await asking.stop(user)
        await asyncio.sleep(1)
        await asking.request_spawn(user, options)
        await asyncio.sleep(1)


@contextlib.asynccontextmanager
async def background(running: Sequence[Any]) -> AsyncIterator[None]:
    """Run these during the block; fail if one of them has failed."""
    tasks = [asyncio.ensure_future(each) for each in running]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- The figures --------------------------------------------------------------------------------------


def figures(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the few numbers that a run comes down to, by name. Times in seconds but for ``_ms``."""
    found: dict[str, Any] = {}
    compared: dict[str, dict[str, list[float]]] = {}
    if "rounds" in raw:
        for what in ("spawn", "spawn_cpu", "stop"):
            compared[what] = {side: values[f"{what}_s"] for side, values in raw["rounds"].items()}
    if "bursts" in raw:
        bursts = raw["bursts"]
        compared["burst"] = {side: [max(b) for b in values["ready_s"]] for side, values in bursts.items()}
        compared["burst_half"] = {
            side: [median(b) for b in values["ready_s"]] for side, values in bursts.items()
        }
        compared["burst_cpu"] = {side: values["cpu_s"] for side, values in bursts.items()}
    for what, sides in compared.items():
        found[f"{what}_s"] = {side: spread(values) for side, values in sides.items()}
        for prefix, (ours, plain) in RATIOS.items():
            found[f"{prefix}{what}_ratio"] = round(median(sides[ours]) / median(sides[plain]), 3)
    if "requests_ms" in raw:
        found["requests_ms"] = {
            condition: {
                path: {f"p{p}": round(percentile(values, p), 1) for p in (50, 95, 99)}
                | {"max": round(max(values), 1), "samples": len(values)}
                for path, values in paths.items()
            }
            for condition, paths in raw["requests_ms"].items()
        }
        for name, condition in (("idle", IDLE), ("queued", QUEUED), ("watched", WATCHED)):
            worst = max(path["p95"] for path in found["requests_ms"][condition].values())
            found[f"{name}_p95_ms"] = worst
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most."""
    named = {"median": median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in named.items()}


def judged(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each expectation of expected.toml with what was found: PASS, MISS, or not measured."""
    expected = tomllib.loads((ROOT / "bench" / "expected.toml").read_text())["expected"]
    verdicts = []
    for each in expected:
        value = found.get(each["figure"])
        verdict = "not measured" if value is None else "PASS" if value <= each["at_most"] else "MISS"
        verdicts.append({**each, "found": value, "verdict": verdict})
    return verdicts


def table(found: dict[str, Any], verdicts: list[dict[str, Any]]) -> str:
    """Return the figures for people."""
    lines = [f"\n{'':<22}" + "".join(f"{side:>20}" for side in OPTIONS) + f"{'ratios':>24}"]
    names = {
        "spawn": "spawn until ready, s",
        "spawn_cpu": " CPU of the Hub, s",
        "burst": "burst, all ready, s",
        "burst_half": "burst, half ready, s",
        "burst_cpu": " CPU of the Hub, s",
        "stop": "stop until gone, s",
    }
    for what, name in names.items():
        if f"{what}_s" in found:
            cells = [
                f"{s['median']:.2f} ({s['min']:.2f}-{s['max']:.2f})"
                for s in (found[f"{what}_s"][side] for side in OPTIONS)
            ]
            ratios = [found[f"{prefix}{what}_ratio"] for prefix in RATIOS]
            lines.append(
                f"{name:<22}" + "".join(f"{c:>20}" for c in cells) + "".join(f"{r:>6.2f}" for r in ratios)
            )
    for condition, paths in found.get("requests_ms", {}).items():
        for path, p in paths.items():
            values = f"p50 {p['p50']:.1f}  p95 {p['p95']:.1f}  p99 {p['p99']:.1f}  max {p['max']:.1f} ms"
            lines.append(f"{path:<16} {condition:<30} {values}")
    lines.append("")
    for v in verdicts:
        lines.append(f"{v['verdict']:<13} {v['found']} (expected at most {v['at_most']}): {v['what']}")
    return "\n".join(lines)


# --- The run ------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=9, help="spawns per side (default 9)")
    add("--burst", type=int, default=8, help="users of a burst (default 8)")
    add("--bursts", type=int, default=3, help="bursts per side (default 3)")
    add("--queued", type=int, default=100, help="sessions in the queue (default 100)")
    add("--samples", type=int, default=300, help="timed requests per path and condition (default 300)")
    add("--only", choices=("docker", "queue"), help="one half of the measurement")
    add("--with-service", action="store_true", help="leave the managed service fgpu in our Hubs")
    add("--keep", action="store_true", help="keep the Hubs' logs and databases")
    default = ROOT / "bench" / "results" / time.strftime("spawn-%Y-%m-%d.json")
    add("--out", type=Path, default=default, help=f"results file (default {default.relative_to(ROOT)})")
    given = parser.parse_args()
    for name, most in (("rounds", 100), ("burst", 16), ("bursts", 20), ("queued", 1000), ("samples", 10_000)):
        if not 1 <= getattr(given, name) <= most:
            parser.error(f"--{name} must be between 1 and {most}")
    return given


def run_all(given: argparse.Namespace, stack: contextlib.ExitStack, hubs: list[HubProcess]) -> dict[str, Any]:
    """Run what was asked for and return every single value."""
    folder = Path(tempfile.mkdtemp(prefix="fgpu-bench-"))
    run = f"fgpubench{secrets.token_hex(3)}"
    raw: dict[str, Any] = {}
    if given.keep:
        say(f"logs and databases: {folder}")
    else:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)

    def started(hub: HubProcess) -> HubProcess:
        hubs.append(hub)
        stack.callback(hub.close)
        return hub.start()

    if given.only != "queue":
        raw |= run_docker(given, run, folder, stack, started)
    if given.only != "docker":
        hub = started(queue_hub(folder / "queue", with_service=given.with_service))
        raw["requests_ms"] = asyncio.run(measure_queue(hub, run, given.queued, given.samples))
    return raw


def run_docker(
    given: argparse.Namespace,
    run: str,
    folder: Path,
    stack: contextlib.ExitStack,
    started: Callable[[HubProcess], HubProcess],
) -> dict[str, Any]:
    """Measure spawns, stops and bursts on both sides."""
    catalogue = load_catalogue(FGPU().catalogue_path())
    image = next(i.reference for i in catalogue.images if i.default)
    client = connect_here({})
    stack.callback(client.close)
    try:
        client.inspect_image(image)
    except docker.errors.ImageNotFound:
        raise BenchFailed(f"there is no image {image} on the engine; build it with `make image`") from None
    gateway = shared_network.ensure_network(client)
    stack.callback(remove_containers, client, run)
    slow = ordinary(client, image, f"{run}/ordinary:1")
    stack.callback(client.remove_image, slow, force=True)
    on = {"network": shared_network.NETWORK, "gateway": gateway}
    hubs = {
        OURS: docker_hub(folder / "ours", with_service=given.with_service),
        POOL: docker_hub(folder / "pool", with_service=given.with_service, warm=given.burst),
        PLAIN: plain_hub(folder / "plain", image=slow, **on),
        SAME: plain_hub(folder / "same", image=image, **on),
    }
    for side, hub in hubs.items():
        started(hub)
        if side in (OURS, POOL):
            stack.callback(end, hub, client)
    users = [f"{run}u{n}" for n in range(given.burst)]

    async def before(side: str) -> None:
        """With a pool, wait until it is filled: what is measured is a filled one."""
        if side == POOL:
            installation = hubs[POOL].store.installation_id
            deadline = time.monotonic() + FILLED_WITHIN_S
            while await asyncio.to_thread(waiting, client, installation) < given.burst:
                if time.monotonic() > deadline:
                    raise BenchFailed(f"the pool is not full within {FILLED_WITHIN_S} s")
                await asyncio.sleep(0.2)

    async def measure() -> dict[str, Any]:
        async with contextlib.AsyncExitStack() as clients:
            sides = {side: await clients.enter_async_context(Asking.of(hub)) for side, hub in hubs.items()}
            for asking in sides.values():
                await asking.add_users(users)
            return {
                "image": image,
                "commands": await commands_of(sides, client, run, users[0]),
                "rounds": await measure_rounds(sides, users, given.rounds, before),
                "bursts": await measure_bursts(sides, users, given.bursts, before),
            }

    found = asyncio.run(measure())
    for side, hub in hubs.items():
        end(hub, client) if side in (OURS, POOL) else hub.close()
    return found


def main() -> int:
    """Run, print, write; 1 if something did not run."""
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    begun, before = time.strftime("%Y-%m-%dT%H:%M:%S%z"), load()
    say(f"load average {before['average']}, {before['busy_percent']} % of the CPUs busy before the start")
    hubs: list[HubProcess] = []
    try:
        with contextlib.ExitStack() as stack:
            try:
                raw = run_all(given, stack, hubs)
            except FAILURES:
                for hub in hubs:
                    say(f"--- {hub.log}\n{hub.log_text()[-2000:]}")
                raise
            finally:
                # What is ended below is ended whole: a second Ctrl-C would leave containers behind.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        say("interrupted; everything that was started is ended")
        return 130
    except FAILURES as e:
        say(f"FAILED: {type(e).__name__}: {e}")
        return 1
    found = figures(raw)
    verdicts = judged(found)
    print(table(found, verdicts))
    results = {
        "begun": begun,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "source": source(),
        "machine": machine(),
        "load_before": before,
        "load_after": load(),
        "arguments": {k: v.name if isinstance(v, Path) else v for k, v in vars(given).items()},
        "figures": found,
        "verdicts": verdicts,
        "values": raw,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
