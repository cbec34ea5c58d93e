"""What the settings of DockerSpawner, and ours over them, come to: a container's arguments, a daemon's client."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from standindaemon import StandIn
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from fgpu_scheduler import BadSettings, Placement, Request, Session, SessionState, Share
from fgpuspawner.engines.base import LaunchSpec
from fgpuspawner.engines.docker.create import Place, arguments
from fgpuspawner.engines.docker.daemon import connect_here
from fgpuspawner.engines.docker.engine import client_settings
from fgpuspawner.engines.docker.spawner import FGPUSpawner
from fgpuspawner.images.model import Image
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.settings import configured

TORCH = Image("torch", "Torch", "pytorch", "2", "3.11", "lab/torch:1")
ASKED = Request("alice", "", "torch", "default", 500, 2000, 1024)
SESSION = Session(
    7, ASKED, SessionState.PREPARING, 0, placement=Placement("lab", (Share("GPU-1f", 500, 2048, 25),))
)
PLACE = Place("fgpu-abc-7-1", {"fgpu.session": "7"}, "fgpu-abc-u-1", "1.41")


async def made(image: Image = TORCH, **settings: Any) -> dict[str, Any]:
    """Return docker-py's arguments for a session's container, with these settings of ``c.DockerSpawner``."""
    spawner = FGPUSpawner(config=Config({"DockerSpawner": settings}))
    spawner.user = SimpleNamespace(name="alice", url="/user/alice/", escaped_name="alice")
    spawner._session = SESSION
    options = await spawner.engine_options(image)
    spec = LaunchSpec(
        SESSION,
        image,
        command=(),
        arguments=(),
        environment={},
        told={},
        prepared=Prepared("none", Limits(7, "charge", ())),
        devices=(),
        folder=Path("/srv/limits/7"),
        port=8888,
        options=options,
    )
    kwargs, _ = arguments(spec, options, PLACE, {"Id": "sha256:1", "Config": {"Cmd": ["server"]}})
    return kwargs


@pytest.mark.parametrize(
    "settings",
    [{"remove": True}, {"remove_containers": True}, {"extra_host_config": {"auto_remove": True}}],
)
async def test_how_a_container_ended_is_seen_before_it_goes(settings: dict[str, Any]) -> None:
    host = (await made(**settings))["host_config"]
    assert not host.get("AutoRemove")


async def test_an_image_of_somebodys_is_started_by_what_it_is_and_not_by_its_name() -> None:
    assert (await made())["image"] == TORCH.reference
    assert (await made(replace(TORCH, owner="eve")))["image"] == "sha256:1"


async def test_what_an_administrator_sets_beside_is_kept() -> None:
    kwargs = await made(
        extra_host_config={"shm_size": "1g", "mem_limit": "1t", "cpu_quota": -1},
        extra_create_kwargs={"hostname": "lab-{username}"},
        volumes={"home-{username}": "/home/jovyan"},
        read_only_volumes={"/srv/data": "/data"},
    )
    host = kwargs["host_config"]
    assert (host["ShmSize"], host["Memory"], host["CpuQuota"]) == (1 << 30, 1 << 30, 200_000)
    assert kwargs["hostname"] == "lab-alice"
    assert set(host["Binds"]) == {"home-alice:/home/jovyan:rw", "/srv/data:/data:ro"}


# --- Its daemon's client ---


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate of 127.0.0.1's own, and its key."""
    found = tmp_path_factory.mktemp("tls")
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=daemon"
    words += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(words.split(), cwd=found, check=True, capture_output=True)
    return found


@pytest.fixture
def daemon() -> Iterator[StandIn]:
    found = StandIn()
    yield found
    found.close()


def version_of(c: Config) -> str:
    """Return what the daemon says that a Hub of this configuration asks."""
    with contextlib.closing(connect_here(client_settings(configured(FGPUSpawner, c)))) as client:
        return str(client.version()["ApiVersion"])


def test_a_daemon_is_asked_with_the_tls_configuration_that_is_set(daemon: StandIn, certificate: Path) -> None:
    daemon.use_tls(certificate / "cert.pem", certificate / "key.pem")
    c = Config()
    c.DockerSpawner.client_kwargs = {"base_url": daemon.url}
    with pytest.raises(BadSettings, match="does not answer"):
        version_of(c)
    c.DockerSpawner.tls_config = {"ca_cert": str(certificate / "cert.pem"), "verify": True}
    assert version_of(c) == "1.41"


def test_a_tls_configuration_that_cannot_be_used_is_refused_in_one_line(certificate: Path) -> None:
    c = Config()
    c.DockerSpawner.tls_config = {"ca_cert": str(certificate / "none.pem"), "verify": True}
    with pytest.raises(
        BadSettings, match=r"^c\.DockerSpawner\.tls_config is .*none\.pem.*Invalid CA certificate"
    ):
        version_of(c)


def test_how_a_daemon_is_asked_may_be_added_to_in_a_configuration_file(
    daemon: StandIn, tmp_path: Path
) -> None:
    file = tmp_path / "jupyterhub_config.py"
    file.write_text(
        f"c.DockerSpawner.client_kwargs.update({{'base_url': {daemon.url!r}, 'timeout': 1}})\n"
        "c.FGPUSpawner.client_kwargs.update({'timeout': 7})\n"
    )
    c = PyFileConfigLoader(str(file)).load_config()
    for _ in range(2):
        assert client_settings(configured(FGPUSpawner, c)) == {"base_url": daemon.url, "timeout": 7}
    assert version_of(c) == "1.41"
    assert FGPUSpawner(config=c).client_kwargs == {"base_url": daemon.url, "timeout": 7}
