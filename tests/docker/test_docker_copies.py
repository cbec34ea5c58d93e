"""An image that no registry has comes to one machine from another, through the Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import machines
import pytest
from dockerhub import BASE, MINI, ONE, DockerHub, Engine, entry
from machines import Machine

pytestmark = pytest.mark.slow

HERE = {"name": "here", "cpu": 16, "gpus": {"simulated": 1}}
WHOLE = {**ONE, "fgpu": "2"}
NOWHERE = "127.0.0.1:1/fgpu-test/only-here"
"""Nothing listens there, on any machine."""


@pytest.fixture(scope="module")
def there(engine: Engine, image: str) -> Iterator[Machine]:
    """Another machine, with the default image."""
    with machines.running(engine.client, tls=True) as machine:
        yield machine


@pytest.fixture
def only_here(engine: Engine, image: str) -> Iterator[str]:
    """An image that this machine's engine has, and nobody else."""
    made = engine.build("only-here", f"FROM {image}\nLABEL made.for=copies\n")
    engine.client.tag(made, NOWHERE, tag="1")
    yield f"{NOWHERE}:1"
    engine.client.remove_image(f"{NOWHERE}:1")


@pytest.fixture
def two(
    make_hub: Callable[..., DockerHub], there: Machine, only_here: str, tmp_path: Path
) -> Iterator[DockerHub]:
    """A Hub with a GPU here and a GPU there."""
    catalogue = tmp_path / "catalogue.toml"
    catalogue.write_text("\n".join([entry("python", BASE), entry("only", only_here)]))
    hub = make_hub(
        nodes=[HERE, there.node("there", group="far", gpus={"simulated": 1})],
        groups={"default": {}, "far": {}},
        fgpu_per_gpu=2,
        hub_address=there.hub_address,
        catalogue=str(catalogue),
        after=MINI,
    )
    yield hub.start()
    hub.end_all_but(set())
    hub.kill()


def test_an_image_that_only_another_engine_has_is_copied_from_there_and_started(
    two: DockerHub, engine: Engine, there: Machine, only_here: str
) -> None:
    two.add_user("alice")
    answer = two.spawn("alice", options={**WHOLE, "group": "far", "image": "only"})
    assert answer.status_code in (201, 202), answer.text
    two.wait_ready("alice", within_s=90)
    assert there.client.inspect_image(only_here)["Id"] == engine.client.inspect_image(only_here)["Id"]
    events = two.store.events(limit=1000)
    assert [e.to_state for e in events if e.to_state][-2:] == ["PULLING", "RUNNING"]
    there.client.remove_image(only_here, force=True)
