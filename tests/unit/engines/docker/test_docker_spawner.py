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
from docker.types import DeviceRequest
from standindaemon import StandIn
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

from fgpu_scheduler import BadSettings, Placement, Request, Session, SessionState, Share
from fgpuspawner.engines.base import LaunchSpec
from fgpuspawner.engines.docker.create import CreateContext, arguments
from fgpuspawner.engines.docker.daemon import connect_here
from fgpuspawner.engines.docker.engine import client_settings
from fgpuspawner.engines.docker.spawner import FGPUSpawner
from fgpuspawner.images.model import Image
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.settings import configured
from fgpuspawner.settings.folders import SharedFolder

TORCH = Image("torch", "Torch", "pytorch", "2", "3.11", "lab/torch:1")
ASKED = Request("alice", "", "torch", "default", 500, 2000, 1024)
SESSION = Session(
    7, ASKED, SessionState.PREPARING, 0, placement=Placement("lab", (Share("GPU-1f", 500, 2048, 25),))
)
PLACE = CreateContext("fgpu-abc-7-1", {"fgpu.session": "7"}, "fgpu-abc-u-1", "1.41")


def spawner_of(**settings: Any) -> FGPUSpawner:
    spawner = FGPUSpawner(config=Config({"DockerSpawner": settings}))
    spawner.user = SimpleNamespace(name="alice", url="/user/alice/", escaped_name="alice")
    return spawner


async def made(
    image: Image = TORCH,
    shared: tuple[SharedFolder, ...] = (),
    context: CreateContext = PLACE,
    **settings: Any,
) -> dict[str, Any]:
    """Return docker-py's arguments for a session's container, with these settings of ``c.DockerSpawner``."""
    spawner = spawner_of(**settings)
    spawner._session = SESSION
    options = await spawner.engine_options(image)
    spec = LaunchSpec(
        SESSION,
        image,
        command=(),
        arguments=(),
        environment=spawner.environment,
        slice_environment={},
        prepared=Prepared("none", Limits(7, "charge", ())),
        devices=(),
        folder=Path("/srv/limits/7"),
        port=8888,
        shared=shared,
        shared_memory_mib=512,
        options=options,
    )
    kwargs, _ = arguments(spec, options, context, {"Id": "sha256:1", "Config": {"Cmd": ["server"]}})
    return kwargs


async def test_private_image_is_started_by_its_id() -> None:
    assert (await made())["image"] == TORCH.reference
    assert (await made(replace(TORCH, owner="eve")))["image"] == "sha256:1"


@pytest.mark.parametrize(
    ("version", "below"), [("1.41", {"NonRecursive": True}), ("1.44", {"ReadOnlyForceRecursive": True})]
)
async def test_read_only_folder_lets_nothing_below_it_be_written_on_any_engine(
    version: str, below: dict[str, bool]
) -> None:
    shared = (
        SharedFolder("sets", "data/sets", "/srv/sets"),
        SharedFolder("vision", "vision", "/srv/vision", read_only=False),
    )
    found = await made(shared=shared, context=replace(PLACE, api_version=version))
    assert found["host_config"]["Mounts"] == [
        {
            "Type": "bind",
            "Source": "/srv/sets",
            "Target": "/run/fgpu/folders/sets",
            "ReadOnly": True,
            "BindOptions": {"Propagation": "rprivate", **below},
        },
        {
            "Type": "bind",
            "Source": "/srv/vision",
            "Target": "/run/fgpu/folders/vision",
            "ReadOnly": False,
            "BindOptions": {"Propagation": "rprivate"},
        },
    ]


async def test_shared_memory_is_the_sessions_unless_an_administrator_sets_another() -> None:
    assert (await made())["host_config"]["ShmSize"] == 512 * 2**20
    other = await made(extra_host_config={"shm_size": "1g"})
    assert other["host_config"]["ShmSize"] == 1 << 30


async def test_numbers_and_paths_in_an_environment_are_text() -> None:
    values = {"NB_UID": 1000, "HALF": 0.5, "ON": True, "HOME": Path("/home/ann"), "GONE": None}
    more = {"environment": {"PORT": 8080}}
    environment = (await made(environment=values, extra_create_kwargs=more))["environment"]
    assert environment == {
        "NB_UID": "1000",
        "HALF": "0.5",
        "ON": "True",
        "HOME": "/home/ann",
        "GONE": None,
        "PORT": "8080",
    }


@pytest.mark.parametrize("value", [["a"], {"a": 1}, object()], ids=["list", "dict", "object"])
async def test_variable_of_another_kind_is_refused_by_its_name_alone(value: object) -> None:
    with pytest.raises(BadSettings, match=r"^SECRET is a \w+; a variable is text"):
        await made(environment={"SECRET": value})


@pytest.mark.parametrize(
    "settings",
    [
        {"extra_host_config": {"device_requests": [DeviceRequest(count=-1, capabilities=[["gpu"]])]}},
        {"extra_host_config": lambda spawner: {"devices": ["/dev/nvidia0:/dev/nvidia0"]}},
        {"extra_create_kwargs": {"host_config": {"DeviceRequests": [{"Count": -1}]}}},
    ],
    ids=["device request", "device", "as the engine has it"],
)
async def test_session_without_gpus_gets_none_from_any_setting(settings: dict[str, Any]) -> None:
    host = (await made(**settings))["host_config"]
    assert (host["DeviceRequests"], host["Devices"]) == ([], [])


async def test_other_devices_of_an_administrator_are_kept() -> None:
    host = (await made(extra_host_config={"devices": ["/dev/fuse"]}))["host_config"]
    assert [device["PathOnHost"] for device in host["Devices"]] == ["/dev/fuse"]


async def test_function_cannot_change_network_name_or_image() -> None:
    kwargs = await made(
        extra_host_config=lambda spawner: {"network_mode": "host"},
        extra_create_kwargs=lambda spawner: {"name": "lab", "image": "lab/other"},
    )
    assert kwargs["host_config"]["NetworkMode"] == PLACE.network
    assert (kwargs["name"], kwargs["image"]) == (PLACE.name, TORCH.reference)


def test_unplaced_session_has_dockerspawners_container_name() -> None:
    assert spawner_of(name_template="lab-{username}").object_name == "lab-alice"


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


def test_daemon_is_asked_with_the_configured_tls(daemon: StandIn, certificate: Path) -> None:
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


def test_client_kwargs_can_be_updated_in_a_configuration_file(daemon: StandIn, tmp_path: Path) -> None:
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
