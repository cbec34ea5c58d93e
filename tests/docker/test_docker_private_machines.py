"""A private image is made on the machine of its session, and is there on another when a session needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import machines
import pytest
from dockerhub import MINI, ONE, PYTHON, DockerHub, Engine, until
from machines import Machine

from fgpu_scheduler import ImageQuota, ImageState, PrivateImages, Store
from fgpuspawner.engines.docker import client as execs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def there(engine: Engine, image: str) -> Iterator[Machine]:
    with machines.running(engine.client, tls=True) as machine:
        yield machine


@pytest.fixture(scope="module")
def hub(make_hub: Callable[..., DockerHub], engine: Engine, there: Machine) -> Iterator[DockerHub]:
    """A Hub with a GPU here and, in the group ``far``, one there; with homes."""
    found = make_hub(
        nodes=[
            {"name": "here", "cpu": 16, "gpus": {"simulated": 1}},
            there.node("there", group="far", gpus={"simulated": 1}),
        ],
        groups={"default": {}, "far": {}},
        fgpu_per_gpu=2,
        hub_address=there.hub_address,
        after=f"{MINI}c.FGPUSpawner.volumes = {{'{engine.prefix}-{{username}}': '/home/jovyan'}}\n",
    ).start()
    yield found
    found.end_all_but(set())
    for name in names_on(engine.client, found):
        engine.client.remove_image(name, force=True)
    found.kill()
    engine.remove_volume(f"{engine.prefix}-alice")


def names_on(client: object, hub: DockerHub) -> list[str]:
    listed = client.images()  # type: ignore[attr-defined]
    names = [name for image in listed for name in image.get("RepoTags") or ()]
    return [name for name in names if name.startswith(f"fgpu-{hub.installation}")]


def test_an_image_of_a_session_there_starts_here_and_is_removed_from_both(
    hub: DockerHub, engine: Engine, there: Machine
) -> None:
    hub.add_user("alice")
    assert hub.spawn("alice", options={**ONE, "group": "far"}).status_code in (201, 202)
    hub.wait_ready("alice")
    session = hub.sessions()["alice/"]
    store = Store(f"sqlite:///{hub.data / 'fgpu.sqlite'}")
    store.connect()
    images = PrivateImages(store)
    client = there.client
    code = "open('/opt/env/kept', 'w').write('kept')"
    execs.run_in(client, hub.container_name(session), [PYTHON, "-c", code], most_bytes=1000)
    wished = images.request(session.id, name="far", asked_by="test", quota=ImageQuota(), now_s=1)
    until(lambda: images.get(wished.id).state is ImageState.READY, within_s=120, what="it is made")
    until(lambda: " is saved as " in hub.log_text(), what="it is offered")
    found = images.get(wished.id)
    assert found.node_id == "there"
    assert names_on(client, hub) == [found.reference]
    assert names_on(engine.client, hub) == []
    again = hub.running("alice", "again", image=found.name)
    assert engine.python_in(again.id, "print(open('/opt/env/kept').read())") == "kept"
    assert again.container["Image"] == found.image_id
    for server in ("", "again"):
        hub.end("alice", server)
    images.delete(found.id, now_s=2)
    until(lambda: images.all() == (), what="it is removed")
    until(lambda: names_on(client, hub) + names_on(engine.client, hub) == [], what="it is gone from both")
    client.remove_volume(f"{engine.prefix}-alice", force=True)
    store.close()
