"""`configure`, the shipped example and README's snippet: what they set, what they keep, what they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyterhub.app import JupyterHub
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader

import quickstart
from fgpu_scheduler import BadSettings
from fgpuspawner.config import configure
from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.hub.checks import check_hub
from fgpuspawner.settings import FGPU
from hubprocess import until

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "jupyterhub_config.py"
QUEUE_READ = "custom:fgpu:queue:read"
KEEP = "custom:fgpu:sessions:keep"
IMAGES = "custom:fgpu:images"
ACCESS = "access:services!service=fgpu"
OF_DEFAULT = "custom:fgpu:group:default:admin"


def snippet() -> str:
    """Return the configuration that README shows."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (found,) = [block for block in blocks if "configure(" in block]
    return str(found)


def load(path: Path) -> Config:
    return PyFileConfigLoader(path.name, path=str(path.parent)).load_config()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, and none of the variables that the example reads."""
    monkeypatch.chdir(tmp_path)
    for name in ("PORT", "RUNTIME", "SIMULATED_GPUS", "FGPU_PER_GPU", "FGPU_DATA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def configured(folder: Path, config: Config | None = None, **settings: Any) -> Config:
    config = Config() if config is None else config
    configure(config, data_dir=str(folder / "data"), **settings)
    return config


# --- The two that are shown ---


def test_the_shipped_example_loads_and_sets_up_the_hub(folder: Path) -> None:
    c = load(SHIPPED)
    assert c.JupyterHub.spawner_class is LocalFGPUSpawner
    assert c.JupyterHub.bind_url == "http://127.0.0.1:8000"
    assert c.JupyterHub.cleanup_servers is True
    assert c.JupyterHub.db_url == f"sqlite:///{folder}/data/jupyterhub.sqlite"
    assert c.JupyterHub.cookie_secret_file == f"{folder}/data/jupyterhub_cookie_secret"
    assert c.FGPU.service_port == 8003
    settings = FGPU.from_config(c).checked()
    assert [n.id for n in settings.discover_nodes()] == ["local"]
    admins = next(role for role in c.JupyterHub.load_roles if role["name"] == "fgpu-admin")
    assert admins["users"] == ["admin"]


def test_the_shipped_example_takes_its_settings_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORT", "9100")
    monkeypatch.setenv("FGPU_DATA", str(folder / "elsewhere"))
    monkeypatch.setenv("FGPU_PER_GPU", "5")
    monkeypatch.setenv("SIMULATED_GPUS", "3")
    c = load(SHIPPED)
    assert (c.JupyterHub.bind_url, c.JupyterHub.hub_port) == ("http://127.0.0.1:9100", 9101)
    assert (c.ConfigurableHTTPProxy.api_url, c.FGPU.service_port) == ("http://127.0.0.1:9102", 9103)
    (node,) = FGPU.from_config(c).checked().discover_nodes()
    assert [d.capacity_milli for d in node.devices] == [5000, 5000, 5000]
    assert (folder / "elsewhere" / "password").exists()


def test_the_shipped_examples_passwords_are_kept_and_only_the_owner_can_read_them(folder: Path) -> None:
    first, second = load(SHIPPED), load(SHIPPED)
    for c in (first, second):
        own = c.SharedPasswordAuthenticator
        assert (own.user_password, own.admin_password) == tuple(
            (folder / "data" / name).read_text() for name in ("password", "admin-password")
        )
        assert len(own.user_password) >= 16
        assert len(own.admin_password) >= 32
    for name in ("password", "admin-password"):
        assert (folder / "data" / name).stat().st_mode & 0o777 == 0o600


def test_the_snippet_in_the_readme_loads_and_passes_the_hubs_own_checks(folder: Path) -> None:
    assert len(snippet().strip().splitlines()) <= 20
    path = folder / "jupyterhub_config.py"
    path.write_text(snippet())
    c = load(path)
    assert c.JupyterHub.spawner_class is LocalFGPUSpawner
    settings = FGPU.from_config(c).checked()
    check_hub(app_of(c), settings)
    (node,) = settings.discover_nodes()
    assert node.devices


# --- What `configure` sets ---


def test_sessions_may_be_forbidden_to_end_others(folder: Path) -> None:
    c = configured(folder, sessions_may_end_sessions=False)
    assert "delete:servers!user" not in c.Spawner.server_token_scopes


def test_a_setting_may_be_given_as_an_argument_or_on_the_configuration(folder: Path) -> None:
    config = Config()
    config.FGPU.fgpu_step = "0.25"
    config.FGPU.max_sessions = 3
    found = configure(config, data_dir=str(folder / "data"), max_sessions=4)
    assert (found.fgpu_step, found.max_sessions) == ("0.25", 4)


# --- What it keeps ---


def before(c: Config) -> None:
    """Set what an administrator may have set already, as values."""
    c.JupyterHub.services = [{"name": "idle-culler", "command": ["true"]}]
    c.JupyterHub.load_roles = [{"name": "own", "scopes": ["self"]}]
    c.JupyterHub.extra_user_scopes = ["read:hub"]
    c.JupyterHub.custom_scopes = {"custom:own": {"description": "own"}}
    c.JupyterHub.template_paths = ["/srv/templates"]
    c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 9, "headers": {"X-Own": "1"}}
    c.Authenticator.admin_users = {"root"}


def before_by_additions(c: Config) -> None:
    """Set the same the other way: by adding to values that are not there yet."""
    c.JupyterHub.services.append({"name": "idle-culler", "command": ["true"]})
    c.JupyterHub.load_roles.append({"name": "own", "scopes": ["self"]})
    c.JupyterHub.extra_user_scopes.append("read:hub")
    c.JupyterHub.custom_scopes.update({"custom:own": {"description": "own"}})
    c.JupyterHub.template_paths.append("/srv/templates")
    c.JupyterHub.tornado_settings.update({"slow_spawn_timeout": 9, "headers": {"X-Own": "1"}})
    c.Authenticator.admin_users.add("root")


@pytest.mark.parametrize("given", [before, before_by_additions])
def test_earlier_lists_are_extended(given: Callable[[Config], None], folder: Path) -> None:
    c = Config()
    given(c)
    configured(folder, c)
    assert [s["name"] for s in c.JupyterHub.services] == ["idle-culler", "fgpu"]
    assert [r["name"] for r in c.JupyterHub.load_roles] == ["own", "fgpu-service", "fgpu-admin"]
    assert c.JupyterHub.load_roles[-1]["users"] == ["root"]
    assert c.JupyterHub.extra_user_scopes == ["read:hub", ACCESS, QUEUE_READ, KEEP, IMAGES]
    ours = {QUEUE_READ, KEEP, IMAGES, OF_DEFAULT, "custom:fgpu:admin"}
    assert set(c.JupyterHub.custom_scopes) == {"custom:own", *ours}
    assert c.JupyterHub.template_paths[0] == "/srv/templates"
    assert c.JupyterHub.tornado_settings == {"slow_spawn_timeout": 9, "headers": {"X-Own": "1"}}


def test_earlier_values_stay(folder: Path) -> None:
    c = Config()
    c.JupyterHub.db_url = "sqlite:////srv/hub.sqlite"
    c.JupyterHub.cookie_secret_file = "/srv/secret"
    c.JupyterHub.cleanup_servers = True
    c.JupyterHub.allow_named_servers = False
    c.JupyterHub.named_server_limit_per_user = 0
    c.Spawner.http_timeout = 5
    c.Spawner.poll_interval = 7
    c.Spawner.consecutive_failure_limit = 4
    c.Spawner.server_token_scopes = ["self"]
    configured(folder, c)
    assert (c.JupyterHub.db_url, c.JupyterHub.cookie_secret_file) == (
        "sqlite:////srv/hub.sqlite",
        "/srv/secret",
    )
    assert (c.JupyterHub.cleanup_servers, c.JupyterHub.allow_named_servers) == (True, False)
    assert c.JupyterHub.named_server_limit_per_user == 0
    assert (c.Spawner.http_timeout, c.Spawner.poll_interval) == (5, 7)
    assert (c.Spawner.consecutive_failure_limit, c.Spawner.server_token_scopes) == (4, ["self"])


def test_admin_users_get_the_role_fgpu_admin(folder: Path) -> None:
    c = Config()
    c.Authenticator.admin_users = {"root"}
    c.PAMAuthenticator.admin_users = {"zoe", "root"}
    configured(folder, c)
    assert c.JupyterHub.load_roles[-1]["users"] == ["root", "zoe"]


# --- What is refused ---


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"runtime": "podman"}, "fgpuspawner: runtime is 'podman'; use 'docker' or 'kubernetes' or 'local'"),
        (
            {"fgpu_per_gpu": 0},
            "fgpuspawner: c.FGPU.fgpu_per_gpu is 0; one GPU must be worth more than 0 fGPU, such as 2",
        ),
        (
            {"service_port": 70000},
            "fgpuspawner: c.FGPU.service_port is 70000; it must be between 1 and 65535",
        ),
        (
            {"fgpu_step": 5},
            "fgpuspawner: c.FGPU.fgpu_step is 5, above one whole GPU (c.FGPU.fgpu_per_gpu is 2); use a step of at most 2",
        ),
    ],
)
def test_a_wrong_setting_ends_the_process_with_its_line(
    wrong: dict[str, Any], line: str, folder: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        configured(folder, **wrong)
    assert caught.value.code == line
    assert not (folder / "data").exists()


DOCKER = """
import sys
from traitlets.config import Config
from fgpuspawner.config import configure

print("imported", flush=True)
configure(Config(), runtime="docker", data_dir=sys.argv[1])
"""


def test_an_engine_that_does_not_answer_is_refused_with_one_line(folder: Path) -> None:
    # In a process of its own: the engine's client leaves the socket open that it could not connect.
    with subprocess.Popen(
        [sys.executable, "-c", DOCKER, str(folder / "data")],
        env={**os.environ, "DOCKER_HOST": f"unix://{folder}/no.sock"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as ended:
        assert ended.stdout is not None
        # A busy machine may take long to import everything; the limit is for what comes after it.
        assert ended.stdout.readline() == "imported\n"
        try:
            _, said = ended.communicate(timeout=60)
        finally:
            ended.kill()
    (line,) = said.splitlines()
    assert line.startswith(
        "fgpuspawner: the Docker engine does not answer; is it running, and may the Hub use it? ("
    )
    assert ended.returncode == 1


def app_of(c: Config) -> JupyterHub:
    """Return a Hub with this configuration, not started."""
    c = c.copy()
    c.JupyterHub.log_level = "CRITICAL"
    app = JupyterHub(config=c)
    app.hub = None
    app.proxy = app.proxy_class(parent=app, app=app)
    return app


def hub_refusal(c: Config) -> str:
    with pytest.raises(BadSettings) as caught:
        check_hub(app_of(c), FGPU.from_config(c).checked())
    return str(caught.value)


def test_setting_after_configure_is_refused(folder: Path) -> None:
    c = configured(folder)
    c.JupyterHub.bind_url = "http://127.0.0.1:8000"
    c.FGPU.quotas = [{"user": "*", "max_fgpu": 1}]
    c.FGPU.max_priority = {"*": 2}
    assert hub_refusal(c) == (
        "c.FGPU.max_priority, c.FGPU.quotas: set after configure(c), so the service does not know it; set it before, or "
        "give it to configure"
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://:8000",
        "http://0.0.0.0:8000",
        "http://10.1.2.3:8000",
        "http://lab.example:8000",
        "http://[::]:8000",
    ],
)
def test_local_sessions_are_kept_to_this_machine(url: str, folder: Path) -> None:
    c = configured(folder)
    c.JupyterHub.bind_url = url
    shown = JupyterHub(config=Config({"JupyterHub": {"bind_url": url}})).bind_url
    assert hub_refusal(c) == (
        f"c.JupyterHub.bind_url is {shown}: sessions are local processes, all of one system user, so the Hub binds "
        "to 127.0.0.1 only; use runtime='docker', or set c.FGPU.local_sessions_beyond_loopback = True"
    )


def test_warm_pool_of_local_processes_is_refused(folder: Path) -> None:
    assert hub_refusal(configured(folder, warm_pool={"python": 1})) == (
        "c.FGPU.warm_pool: sessions are local processes, all of one system user, which cannot be kept ready; leave "
        "it empty, or use runtime='docker'"
    )


def test_local_sessions_may_be_reached_if_allowed(folder: Path) -> None:
    c = configured(folder, local_sessions_beyond_loopback=True)
    c.JupyterHub.bind_url = "http://0.0.0.0:8000"
    check_hub(app_of(c), FGPU.from_config(c).checked())


@pytest.mark.parametrize(
    ("port", "who"),
    [
        (8000, "c.JupyterHub.bind_url"),
        (8081, "c.JupyterHub.hub_port"),
        (8001, "the proxy's API"),
        (9999, "service 'other'"),
    ],
)
def test_used_port_of_the_service_is_refused(port: int, who: str, folder: Path) -> None:
    c = Config()
    c.JupyterHub.bind_url = "http://127.0.0.1:8000"
    c.JupyterHub.services = [{"name": "other", "url": "http://127.0.0.1:9999"}, {"name": "no-url"}]
    configured(folder, c, service_port=port)
    assert hub_refusal(c) == (
        f"c.FGPU.service_port is {port}, which {who} uses too; give one of them another port"
    )


# --- A real Hub that is to refuse ---

HUB = """
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {port} + 1
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{port}"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.log_level = "ERROR"
configure(c, data_dir={data!r}, simulated_gpus="1", **{settings!r})
{after}
"""


def leftovers(folder: Path) -> list[str]:
    """Return the programs that run in a folder, or were told of it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and (
                process.cwd().startswith(str(folder)) or str(folder) in " ".join(process.cmdline())
            ):
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.parametrize(
    ("settings", "after", "line"),
    [
        # Known only when all is set.
        (
            {},
            "c.FGPU.queue_timeout_s = 60",
            "c.FGPU.queue_timeout_s: set after configure(c), so the service does not know it; set it before, or give it "
            "to configure",
        ),
        (
            {"catalogue": "none.toml"},
            "",
            "none.toml: there is no such file; c.FGPU.catalogue names the catalogue",
        ),
    ],
)
def test_hub_with_a_wrong_configuration_ends_at_once(
    settings: dict[str, Any], after: str, line: str, folder: Path
) -> None:
    path = folder / "jupyterhub_config.py"
    # Nothing listens there: the Hub is to end before it would.
    path.write_text(HUB.format(port=47100, data=str(folder / "data"), settings=settings, after=after))
    log = folder / "log"
    hub = quickstart.starter().start(
        "jupyterhub", "-f", str(path), folder=folder, env=dict(os.environ), log=log
    )
    assert hub.wait(120) == 1
    assert log.read_text().splitlines() == [f"fgpuspawner: {line}"]
    until(lambda: leftovers(folder) == [], what="nothing runs")
    # The lock on the database makes its file; nothing is written to it.
    database = folder / "data" / "fgpu.sqlite"
    assert not database.exists() or database.stat().st_size == 0
