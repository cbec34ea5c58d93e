"""The values for Zero to JupyterHub: what is against sessions is off, and our settings are set again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jupyterhub.app import JupyterHub
from traitlets.config import Config

from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.engines.kubernetes.values import CATALOGUE, DATA, Values, values
from fgpuspawner.hub.checks import check_hub
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.settings import FGPU


def image(slug: str, reference: str, *, enabled: bool = True) -> Image:
    return Image(slug, slug, "python", "3", "3", reference, enabled=enabled)


IMAGES = Catalogue(
    (
        image("python", "registry.lab:5000/python:3.11"),
        image("latest", "registry.lab:5000/torch"),
        image("fixed", "registry.lab/torch@sha256:0123"),
        image("off", "registry.lab/off:1", enabled=False),
    )
)


def made(
    *, dialect: str = "lease", catalogue_text: str = "", config: Config | None = None, **own: Any
) -> Values:
    settings = FGPU(data_dir="data", **own)
    return values(
        config or Config(),
        settings,
        IMAGES,
        catalogue_text,
        hub_image="registry.lab:5000/hub:1",
        dialect=dialect,
    )


def program(found: Values) -> str:
    text = str(found.values["hub"]["extraConfig"]["fgpu"])
    compile(text, "extraConfig", "exec")
    return text


def test_what_the_chart_sets_against_sessions_is_off() -> None:
    found = made().values
    assert found["hub"]["consecutiveFailureLimit"] == 0
    assert found["hub"]["allowNamedServers"] is True
    assert found["cull"] == {"enabled": False}
    assert found["scheduling"]["userScheduler"] == {"enabled": False}
    assert found["hub"]["image"] == {"name": "registry.lab:5000/hub", "tag": "1"}


@pytest.mark.parametrize(("dialect", "blocks"), [("lease", None), ("dra", None), ("hami", False)])
def test_the_charts_privileged_container_is_left_out_where_hami_would_deny_the_pod(
    dialect: str, blocks: bool | None
) -> None:
    given = made(dialect=dialect).values["singleuser"].get("cloudMetadata", {})
    assert given.get("blockWithIptables") is blocks


def test_the_service_is_reached_by_the_proxy_and_by_sessions_on_its_port_and_by_nobody_else() -> None:
    found = made(service_port=10999).values
    assert found["hub"]["service"]["extraPorts"] == [{"name": "fgpu", "port": 10999, "targetPort": 10999}]
    (rule,) = found["hub"]["networkPolicy"]["ingress"]
    assert rule["ports"] == [{"port": 10999}]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"hub.jupyter.org/network-access-hub": "true"}}}]
    for one in (found["proxy"]["chp"], found["singleuser"]):
        (out,) = one["networkPolicy"]["egress"]
        assert out["ports"] == [{"port": 10999}]


def test_images_that_are_offered_are_pulled_before_with_the_reference_that_the_chart_puts_together() -> None:
    found = made().values["prePuller"]["extraImages"]
    assert {slug: f"{i['name']}:{i['tag']}" for slug, i in found.items()} == {
        "python": "registry.lab:5000/python:3.11",
        "latest": "registry.lab:5000/torch:latest",
        "fixed": "registry.lab/torch@sha256:0123",
    }


def test_settings_are_set_again_and_those_of_the_place_where_the_hub_ran_are_not() -> None:
    config = Config()
    config.FGPU.quotas = [{"user": "*", "max_fgpu": 2}]
    config.FGPU.data_dir = "/home/me/data"
    config.KubernetesFGPUSpawner.dialect = "dra"
    config.KubernetesFGPUSpawner.namespace = "my-own"
    found = made(config=config)
    text = program(found)
    assert "c.FGPU.quotas = [{'user': '*', 'max_fgpu': 2}]\n" in text
    assert "c.KubernetesFGPUSpawner.dialect = 'dra'\n" in text
    assert "data_dir='/srv/jupyterhub/fgpu'" in text
    assert "/home/me" not in text
    assert "my-own" not in text
    assert list(found.left_out) == []


def test_the_program_sets_up_a_hub_that_its_own_checks_take(tmp_path: Path) -> None:
    config = Config()
    config.KubernetesFGPUSpawner.files_image = "registry.lab/files:1"
    config.FGPU.max_sessions = 4
    c = Config()
    c.JupyterHub.spawner_class = "kubespawner.KubeSpawner"
    c.JupyterHub.allow_named_servers = True
    c.Spawner.consecutive_failure_limit = 0
    c.KubeSpawner.start_timeout = 300
    exec(program(made(config=config)).replace(DATA, str(tmp_path)), {"c": c})
    c.JupyterHub.log_level = "CRITICAL"
    app = JupyterHub(config=c)
    app.hub = None
    app.proxy = app.proxy_class(parent=app, app=app)
    settings = FGPU.from_config(c).checked()
    check_hub(app, settings)
    assert app.spawner_class is KubernetesFGPUSpawner
    assert settings.service_url() == "http://hub:10880/services/fgpu/"
    assert settings.max_sessions == 4


def test_what_no_file_can_hold_is_named() -> None:
    config = Config()
    config.KubernetesFGPUSpawner.pre_spawn_hook = print
    found = made(config=config)
    assert list(found.left_out) == ["c.KubernetesFGPUSpawner.pre_spawn_hook"]
    assert "pre_spawn_hook" not in program(found)


def test_a_password_of_the_database_is_in_no_value_but_in_a_secret_of_yours() -> None:
    found = made(db_url="postgresql+psycopg://fgpu:pa55@db/fgpu")
    assert "pa55" not in repr(found.values)
    assert 'db_url=os.environ["FGPU_DB_URL"]' in program(found)
    (key,) = [e["valueFrom"]["secretKeyRef"] for e in found.values["hub"]["extraEnv"].values()]
    assert key == {"name": "fgpu", "key": "db-url"}
    assert "db_url='postgresql+psycopg://fgpu@db/fgpu'" in program(
        made(db_url="postgresql+psycopg://fgpu@db/fgpu")
    )


def test_a_catalogue_of_your_own_comes_with_it() -> None:
    found = made(catalogue_text="[[image]]\n")
    assert found.values["hub"]["extraFiles"] == {
        "fgpu-catalogue": {"mountPath": CATALOGUE, "stringData": "[[image]]\n"}
    }
    assert f"catalogue={CATALOGUE!r}" in program(found)
    assert "extraFiles" not in made().values["hub"]
