"""Images that an engine fetches: once for all who wait, beforehand, stopped, tried again, and how far they are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any

import pytest
import requests
from docker.errors import ImageNotFound
from dockerhub import BASE, MINI, ONE, WHOLE_FIVE, DockerHub, Engine, until
from imageregistry import ImageRegistry, Made, made_of, random_layer

from fgpuspawner.images.pull_state import Phase, PullState, read_pulls, write_pulls

pytestmark = pytest.mark.xdist_group("pulls")

SMALL: dict[str, Any] = {**ONE, "fgpu": "0.1", "cpu": "0.1"}
MIB = 1 << 20
SLUGS = ("shared", "left", "shown", "again", "killed")


@pytest.fixture(scope="module")
def base(engine: Engine, image: str) -> Made:
    """The default image, as a registry has it. The engine knows its layers by what the registry calls them.

    So only what a test puts on top of it is fetched, and sessions can be started from that.
    """
    found = made_of(engine.client, image)
    registry = ImageRegistry()
    try:
        reference = registry.add("fgpu-test/base", found)
        engine.client.pull(reference.rpartition(":")[0], tag="1")
        engine.client.remove_image(reference)
    finally:
        registry.close()
    return found


@pytest.fixture(scope="module")
def images(base: Made) -> dict[str, Made]:
    """An image of a layer of its own for every test."""
    mib = {"shared": 40, "left": 40, "shown": 16, "again": 8, "killed": 40}
    return {slug: base.with_layers(random_layer(mib[slug])) for slug in SLUGS}


@pytest.fixture(scope="module")
def registry(images: dict[str, Made]) -> Iterator[ImageRegistry]:
    """A registry that does as it is told, with all of them."""
    found = ImageRegistry()
    for slug, made in images.items():
        found.add(f"fgpu-test/{slug}", made)
    yield found
    found.close()


@pytest.fixture(scope="module")
def pulling_hub(
    engine: Engine,
    images: dict[str, Made],
    registry: ImageRegistry,
    make_hub: Callable[..., DockerHub],
) -> Iterator[DockerHub]:
    """A Hub with images in registries."""
    references = {slug: f"{registry.host}/fgpu-test/{slug}:1" for slug in SLUGS}
    yield make_hub(after=MINI, images={"python": BASE, **references}, max_pending_per_user=100).start()
    for name in references.values():
        try:
            engine.client.remove_image(name, force=True)
        except ImageNotFound:
            continue


@pytest.fixture
def hub(pulling_hub: DockerHub, registry: ImageRegistry) -> Iterator[DockerHub]:
    """The Hub, without sessions, and its registry as it was."""
    yield pulling_hub
    registry.up_to = None
    registry.mib_per_s = 1000.0
    pulling_hub.end_all_but(set())


def told(hub: DockerHub, key: str) -> PullState | None:
    """Return what the Hub tells of the pull that a session waits for."""
    session = hub.sessions().get(key)
    return None if session is None else read_pulls(hub.data, now_s=time.time()).get(session.id)


def moves(hub: DockerHub, session_id: int) -> list[str]:
    """Return the states that a session has been in."""
    events = hub.store.events(limit=10000)
    return [str(e.to_state) for e in events if e.session_id == session_id and e.to_state]


def there(engine: Engine, reference: str) -> bool:
    try:
        engine.client.inspect_image(reference)
    except ImageNotFound:
        return False
    return True


def test_ten_sessions_that_wait_for_an_image_cause_one_pull_and_all_start(
    hub: DockerHub, images: dict[str, Made], registry: ImageRegistry
) -> None:
    # It takes longer than the ten need to ask.
    registry.mib_per_s = 8
    hub.add_user("alice")
    servers = [f"s{n}" for n in range(10)]
    with ThreadPoolExecutor(10) as threads:
        options = {**SMALL, "image": "shared", "memory_mib": 128}
        answers = list(threads.map(lambda server: hub.spawn("alice", server, options=options), servers))
    assert {a.status_code for a in answers} <= {201, 202}
    hub.reach({f"alice/{server}": "RUNNING" for server in servers}, within_s=120)
    assert registry.blobs_asked(images["shared"])[-1] == 1


def test_pull_goes_on_for_queued_sessions_and_stops_when_the_last_one_leaves(
    hub: DockerHub, engine: Engine, registry: ImageRegistry, images: dict[str, Made]
) -> None:
    registry.mib_per_s = 0.25
    hub.running("holder", **WHOLE_FIVE)
    for user, options in (("alice", SMALL), ("bob", WHOLE_FIVE)):
        hub.add_user(user)
        hub.spawn(user, options={**options, "image": "left"})
    hub.wait_state("alice", "", "PULLING")
    hub.wait_state("bob", "", "PENDING")
    until(lambda: told(hub, "bob/") is not None, what="bob's image is fetched beforehand")
    hub.end("alice")
    sent, broken = registry.sent, registry.broken
    until(lambda: registry.sent > sent + 2**18, what="the pull goes on")
    assert registry.broken == broken
    hub.end("bob")
    until(lambda: registry.broken == broken + 1, what="the engine hangs up on the registry")
    assert not there(engine, f"{registry.host}/fgpu-test/left:1")
    assert registry.blobs_asked(images["left"])[-1] == 1
    assert hub.states() == {"holder/": "RUNNING"}


def test_progress_of_a_pull_never_decreases(
    hub: DockerHub, registry: ImageRegistry, images: dict[str, Made]
) -> None:
    # Slower than the engine, which tells ten times a second at the most: it tells at least once of each stretch.
    registry.mib_per_s, registry.up_to = 10, 0
    hub.add_user("alice")
    assert hub.spawn("alice", options={**SMALL, "image": "shown"}).status_code == 202
    events: list[dict[str, Any]] = []

    def listen() -> None:
        url = f"{hub.url}/hub/api/users/alice/server/progress"
        headers = {"Authorization": f"token {hub.token}"}
        with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data:"):
                    events.append(json.loads(line[5:]))

    def pulls() -> list[dict[str, Any]]:
        return [e["fgpu"]["pull"] for e in list(events) if e.get("fgpu") and e["fgpu"]["pull"]]

    listener = Thread(target=listen)
    listener.start()
    most = 0

    def more(timed: bool) -> dict[str, Any] | None:
        found = (p for p in pulls() if p["bytes_done"] > most and (p["seconds_left"] or not timed))
        return next(found, None)

    for up_to in (4 * MIB, 8 * MIB, 12 * MIB):
        registry.up_to = up_to
        # How fast it goes is known from the second stretch on.
        timed = up_to > 4 * MIB
        seen = until(partial(more, timed), what=f"it is told how far it is on the way to {up_to} bytes")
        most = seen["bytes_done"]
        assert most <= up_to
    registry.up_to = None
    listener.join(120)
    assert events[-1].get("ready"), events[-1]
    for kind in ("layers_done", "bytes_done"):
        values = [pull[kind] for pull in pulls()]
        assert values == sorted(values)
    size = len(images["shown"].layers[-1].packed)
    # The layers beneath were there, so the engine reports no sizes for them.
    assert {pull["bytes_total"] for pull in pulls() if pull["bytes_total"]} == {size}
    bars = [e["progress"] for e in events]
    assert bars == sorted(bars)
    assert told(hub, "alice/") is None


def again(hub: DockerHub, key: str) -> PullState | None:
    """Return how far a pull is that is tried again; None where it is not, or not yet."""
    found = told(hub, key)
    return found if found is not None and found.phase is Phase.AGAIN else None


def test_pull_is_retried_after_the_registry_dies(hub: DockerHub, registry: ImageRegistry) -> None:
    registry.mib_per_s = 0.5
    hub.add_user("alice")
    assert hub.spawn("alice", options={**SMALL, "image": "again"}).status_code == 202
    sent = registry.sent
    until(lambda: registry.sent > sent + 2**20, what="the pull is on its way")
    registry.close()
    state = until(lambda: again(hub, "alice/"), what="it is told that it is tried again")
    assert state.trouble == "the registry broke off"
    registry.mib_per_s = 1000
    registry.start()
    hub.wait_ready("alice")
    assert moves(hub, hub.sessions()["alice/"].id)[-2:] == ["PULLING", "RUNNING"]


def test_a_pull_ends_with_its_hub_and_the_next_hub_begins_again(
    hub: DockerHub, registry: ImageRegistry, images: dict[str, Made]
) -> None:
    registry.mib_per_s = 0.25
    hub.add_user("carol")
    assert hub.spawn("carol", options={**SMALL, "image": "killed"}).status_code == 202
    of_the_dead = until(lambda: told(hub, "carol/"), what="it is told how far it is")
    assert of_the_dead is not None
    session = hub.sessions()["carol/"]
    broken = registry.broken
    hub.kill()
    until(lambda: registry.broken == broken + 1, what="the engine hangs up on the registry")
    nobody = session.id + 1000
    # Fresh also then.
    write_pulls(hub.data, {session.id: of_the_dead, nobody: of_the_dead}, now_s=time.time() + 8)
    hub.start()
    # It may have begun to fetch for who waits, but tells nothing of the last Hub's pulls.
    assert nobody not in read_pulls(hub.data, now_s=time.time())
    hub.spawn("carol", options={**SMALL, "image": "killed"})
    until(lambda: moves(hub, session.id).count("PULLING") == 2, what="it is pulled again")
    registry.mib_per_s = 1000
    hub.wait_ready("carol")
    assert hub.sessions()["carol/"].id == session.id
    assert registry.blobs_asked(images["killed"])[-1] == 2
