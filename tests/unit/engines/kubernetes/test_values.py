"""images/hub/values.yaml: what its program sets up for Zero to JupyterHub is a Hub that our own checks take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jupyterhub.app import JupyterHub
from traitlets.config import Config

from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.hub.checks import check_hub
from fgpuspawner.settings import FGPU

VALUES = yaml.safe_load((Path(__file__).parents[4] / "images/hub/values.yaml").read_text())


def set_up(c: Config, folder: Path) -> FGPU:
    program = VALUES["hub"]["extraConfig"]["fgpu"]
    exec(program.replace("/srv/jupyterhub/fgpu", str(folder)), {"c": c})
    return FGPU.from_config(c).checked()


def test_values_file_sets_up_a_hub_that_passes_our_checks(tmp_path: Path) -> None:
    c = Config()
    c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
    c.JupyterHub.allow_named_servers = VALUES["hub"]["allowNamedServers"]
    c.Spawner.consecutive_failure_limit = VALUES["hub"]["consecutiveFailureLimit"]
    c.KubeSpawner.start_timeout = 300
    settings = set_up(c, tmp_path)
    c.JupyterHub.log_level = "CRITICAL"
    app = JupyterHub(config=c)
    app.hub = None
    app.proxy = app.proxy_class(parent=app, app=app)
    check_hub(app, settings)
    assert app.spawner_class is KubernetesFGPUSpawner
    assert settings.service_url() == "http://hub:10880/services/fgpu/"


def ports(rules: list[dict[str, Any]]) -> list[int]:
    return [port["port"] for rule in rules for port in rule["ports"]]


@pytest.mark.parametrize("part", ["proxy.chp", "singleuser"])
def test_proxy_and_sessions_reach_only_the_service(part: str, tmp_path: Path) -> None:
    port = set_up(Config(), tmp_path).service_port
    found = VALUES
    for name in part.split("."):
        found = found[name]
    assert ports(found["networkPolicy"]["egress"]) == [port]
    ingress = VALUES["hub"]["networkPolicy"]["ingress"]
    assert ports(ingress) == [port]
    assert all(rule["from"] for rule in ingress)
    assert [one["port"] for one in VALUES["hub"]["service"]["extraPorts"]] == [port]
