"""What other set-ups of a Hub set against sessions that wait is refused, with the line to write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.app import JupyterHub
from traitlets.config import Config

from fgpu_scheduler import BadSettings
from fgpuspawner.config import configure
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.hub.checks import check_hub, use_start_timeout
from fgpuspawner.settings import FGPU, configured

CULLER = ["python3", "-m", "jupyterhub_idle_culler", "--url=http://localhost:8081/hub/api", "--timeout=3600"]


def checked(folder: Path, c: Config, *, runtime: str = "kubernetes", **settings: Any) -> Config:
    """Set up a Hub on what ``c`` sets before, and make the checks that it makes when it starts."""
    configure(c, runtime=runtime, data_dir=str(folder / "data"), **settings)
    c.JupyterHub.log_level = "CRITICAL"
    app = JupyterHub(config=c)
    app.hub = None
    app.proxy = app.proxy_class(parent=app, app=app)
    check_hub(app, FGPU.from_config(c).checked())
    return c


def refusal(folder: Path, c: Config, **settings: Any) -> str:
    with pytest.raises(BadSettings) as caught:
        checked(folder, c, **settings)
    return str(caught.value)


def test_disabled_named_servers_are_refused_with_several_sessions(tmp_path: Path) -> None:
    c = Config()
    c.JupyterHub.allow_named_servers = False
    assert refusal(tmp_path, c) == (
        "c.JupyterHub.allow_named_servers is False, and c.FGPU.max_sessions is 8: others than the first are named "
        "servers; set c.JupyterHub.allow_named_servers = True, or c.FGPU.max_sessions = 1"
    )
    checked(tmp_path, Config({"JupyterHub": {"allow_named_servers": False}}), max_sessions=1)


@pytest.mark.parametrize("section", ["Spawner", "KubeSpawner", "KubernetesFGPUSpawner"])
def test_consecutive_failure_limit_is_refused(section: str, tmp_path: Path) -> None:
    c = Config()
    c[section].consecutive_failure_limit = 5
    assert refusal(tmp_path, c).startswith(
        f"c.{section}.consecutive_failure_limit does not go with queued sessions; take it out: one image that fails"
    )
    c.KubernetesFGPUSpawner.consecutive_failure_limit = 0
    checked(tmp_path, c)


@pytest.mark.parametrize("command", [CULLER, " ".join(CULLER), ["jupyterhub-idle-culler"]])
def test_idle_culler_is_refused(command: Any, tmp_path: Path) -> None:
    c = Config()
    c.JupyterHub.services = [{"name": "cull-idle", "command": command}]
    assert refusal(tmp_path, c) == (
        "service 'cull-idle' ends idle sessions without a warning; take it out of c.JupyterHub.services and set "
        'c.FGPU.reclaim = {"*": {"idle_after_s": 3600}}'
    )


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("profile_list", [{"display_name": "One"}], "put its images into the catalogue"),
        ("modify_pod_hook", print, "use extra_pod_config"),
        ("after_pod_created_hook", print, "use extra_pod_config"),
        ("enable_user_namespaces", True, "the one namespace of c.KubeSpawner.namespace"),
        ("services_enabled", True, "at their pods' addresses"),
    ],
)
def test_kubespawner_settings_without_effect_are_refused(
    name: str, value: Any, instead: str, tmp_path: Path
) -> None:
    c = Config()
    c.KubeSpawner[name] = value
    said = refusal(tmp_path, c)
    assert said.startswith(f"c.KubeSpawner.{name} does not go with queued sessions; take it out: ")
    assert instead in said


def test_the_user_scheduler_is_refused_and_another_one_is_not(tmp_path: Path) -> None:
    c = Config()
    c.KubeSpawner.scheduler_name = "hub-user-scheduler"
    assert refusal(tmp_path, c) == (
        "c.KubeSpawner.scheduler_name is 'hub-user-scheduler', which is for servers without a place; set "
        'c.KubernetesFGPUSpawner.scheduler_name = ""'
    )
    c.KubernetesFGPUSpawner.scheduler_name = "gpu-scheduler"
    checked(tmp_path, c)


def test_start_timeout_covers_the_queue(
    tmp_path: Path,
) -> None:
    c = Config()
    c.KubeSpawner.start_timeout = 300
    configure(c, runtime="kubernetes", data_dir=str(tmp_path), queue_timeout_s=3600, launch_timeout_s=300)
    use_start_timeout(SimpleNamespace(config=c, spawner_class=KubernetesFGPUSpawner), FGPU.from_config(c))
    assert configured(KubernetesFGPUSpawner, c)["start_timeout"] == 3600 + 300 + 60


@pytest.mark.parametrize("name", ["private_registry", "registry_credentials", "kai_queue"])
def test_removed_settings_of_pods_are_refused(name: str, tmp_path: Path) -> None:
    c = Config({"KubernetesFGPUSpawner": {name: "x"}})
    assert refusal(tmp_path, c).startswith(f"c.KubernetesFGPUSpawner.{name} does not go with queued")


def test_internal_ssl_is_refused(tmp_path: Path) -> None:
    c = Config({"JupyterHub": {"internal_ssl": True}})
    assert refusal(tmp_path, c).startswith(
        "c.JupyterHub.internal_ssl is True, and sessions are reached by HTTP"
    )


def test_sessions_in_pods_cannot_be_saved_as_images() -> None:
    assert KubernetesFGPUSpawner.capabilities.why_not_saved == (
        "sessions here are pods, which cannot be saved as images"
    )
