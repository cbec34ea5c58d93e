from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import machines
import pytest
from docker.errors import ImageNotFound
from dockerhub import BASE, MINI, DockerHub, Engine, build, write_catalogue
from imageregistry import ImageRegistry
from machines import Machine

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.docker.daemon import connect_here

ADMINISTRATORS = """
c.Spawner.poll_interval = 2
c.FGPUSpawner.extra_create_kwargs = {"labels": {"lab.course": "of {username}", "fgpu.user": "nobody"}}
c.FGPUSpawner.extra_host_config = {
    "shm_size": 128 * 2**20, "mem_limit": "9g", "memswap_limit": "9g", "cpu_quota": 900_000,
    "binds": ["/usr/share/dict:/srv/shared:ro"],
}
"""

PLAIN = "/usr/local/bin:/usr/bin:/bin"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of connections that are cut docker-py leaves the sockets to the collector: no test here is blamed for them."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Nor is a later test elsewhere."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker engine. Without one the tests are skipped; in CI that is a failure."""
    try:
        found = Engine(connect_here({"timeout": 60}))
    except BadSettings as e:
        pytest.skip(f"{e}; tests/services.sh can start one")
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The default image, built by the project's own command where it is missing."""
    try:
        engine.client.inspect_image(BASE)
    except ImageNotFound:
        base = os.environ.get("FGPU_IMAGE_BASE") or "host"
        built = build("base", "--base", base)
        assert built.returncode == 0, built.stderr[-2000:]
    return BASE


@pytest.fixture(scope="session")
def empty_registry() -> Iterator[ImageRegistry]:
    """A registry that answers, and has nothing."""
    found = ImageRegistry()
    yield found
    found.close()


@pytest.fixture(scope="session")
def catalogue(
    engine: Engine, image: str, empty_registry: ImageRegistry, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """The path of a catalogue of images that are right, and of some that are not."""
    forged = engine.mine(f"{engine.prefix}/forged:1")
    labels = {"installation": "other", "session": "999", "attempt": "7", "user": "mallory", "node": "moon"}
    flags = [word for key, value in labels.items() for word in ("--label", f"fgpu.{key}={value}")]
    made = build("variant", "--from", image, "--tag", forged, *flags)
    assert made.returncode == 0, made.stderr
    images = {
        "python": image,
        "root": engine.build("root", f"FROM {image}\nUSER root\n"),
        "zero": engine.build("zero", f"FROM {image}\nUSER 00:0\n"),
        "toor": engine.build(
            "toor", f"FROM {image}\nUSER root\nRUN echo toor:x:0:0::/root:/bin/sh >> /etc/passwd\nUSER toor\n"
        ),
        "forged": forged,
        "empty": engine.build("empty", f'FROM {image}\nENTRYPOINT ["/no/such/program"]\n'),
        # A system and nothing of ours on its path; and one that has tini.
        "plain": engine.build("plain", f'FROM {image}\nENV PATH={PLAIN}\nENTRYPOINT []\nCMD ["bash"]\n'),
        "plain-tini": engine.build("plain-tini", f"FROM {image}\nENV PATH={PLAIN}\n"),
        "volume": engine.build("volume", f"FROM {image}\nVOLUME /srv/scratch /home/jovyan\n"),
        "missing": f"{empty_registry.host}/fgpu-test/missing:1",
    }
    return write_catalogue(tmp_path_factory.mktemp("catalogue"), images)


@pytest.fixture(scope="session")
def shared_hub(
    engine: Engine, catalogue: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DockerHub]:
    """One Hub for every test that cleans up after itself, with settings that an administrator might make."""
    found = DockerHub(
        tmp_path_factory.mktemp("hub"), engine, after=MINI + ADMINISTRATORS, catalogue=catalogue
    )
    try:
        yield found.start()
    finally:
        found.close()


@pytest.fixture
def hub(shared_hub: DockerHub) -> Iterator[DockerHub]:
    """The shared Hub; sessions that a test leaves are ended after it."""
    before = set(shared_hub.states())
    yield shared_hub
    shared_hub.end_all_but(before)


@pytest.fixture(scope="module")
def make_hub(
    engine: Engine, catalogue: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., DockerHub]]:
    """A factory of Hubs that are ended with the module; ``images`` are references by slug, if not the usual ones."""
    hubs: list[DockerHub] = []

    def make(*, images: Mapping[str, str] | None = None, **kwargs: Any) -> DockerHub:
        folder = tmp_path_factory.mktemp("hub")
        own = write_catalogue(folder, images) if images else catalogue
        hubs.append(DockerHub(folder, engine, **{"catalogue": own, **kwargs}))
        return hubs[-1]

    yield make
    for made in hubs:
        made.close()


@pytest.fixture(scope="module")
def there(engine: Engine, image: str) -> Iterator[Machine]:
    """Another machine with the default image, whose engine asks for certificates."""
    with machines.running(engine.client, tls=True) as machine:
        yield machine
