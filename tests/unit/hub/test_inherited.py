"""The settings of JupyterHub's and the engines' own spawner classes: each is used, refused, or said to have no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dockerspawner import DockerSpawner
from jupyterhub.spawner import LocalProcessSpawner, Spawner
from kubespawner import KubeSpawner
from traitlets.config import Config

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.docker.spawner import FGPUSpawner
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.hub.inherited import UNFORESEEN, overruled, rows_of, suspects
from fgpuspawner.spawner.base import QueuedSpawner


def lines(kind: type[QueuedSpawner] = FGPUSpawner, section: str = "DockerSpawner", **given: Any) -> list[str]:
    return overruled(kind, Config({section: given}))


def refusal(**given: Any) -> str:
    with pytest.raises(BadSettings) as caught:
        lines(**given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "parent"),
    [(QueuedSpawner, Spawner), (FGPUSpawner, DockerSpawner), (LocalFGPUSpawner, LocalProcessSpawner)],
)
def test_every_setting_of_the_parent_class_is_in_the_table(
    kind: type[QueuedSpawner], parent: type[Spawner]
) -> None:
    in_table = {name for name in rows_of(kind) if "." not in name}
    assert in_table == set(parent.class_traits(config=True))
    assert set(rows_of(KubeSpawner)) <= set(KubeSpawner.class_traits(config=True))


@pytest.mark.parametrize("name", ["options_form", "options_from_form", "apply_user_options"])
@pytest.mark.parametrize("section", ["Spawner", "DockerSpawner", "FGPUSpawner"])
def test_form_of_a_lab_is_refused_with_the_line_to_take_out(name: str, section: str) -> None:
    assert refusal(section=section, **{name: print}) == (
        f"c.{section}.{name} does not go with queued sessions; take it out: people choose in the launch form; offer "
        "them ready-made choices with c.FGPU.presets, and images with the catalogue (docs/images.md)"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"post_start_cmd": "setup.sh"}, "c.DockerSpawner.post_start_cmd does not go with queued sessions"),
        (
            {"extra_host_config": {"network_mode": "host"}},
            "c.DockerSpawner.extra_host_config['network_mode'] does not go with queued sessions; take it out: each user",
        ),
        (
            {"environment": {"A": ["b"]}},
            "c.DockerSpawner.environment['A'] is a list; a variable is text, a number",
        ),
    ],
)
def test_setting_that_cannot_be_used_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    assert refusal(**given).startswith(said)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"image": "lab/a"}, "image"),
        ({"mem_limit": "2G"}, "mem_limit"),
        ({"cpu_limit": print}, "cpu_limit"),
        ({"start_timeout": 300}, "start_timeout"),
        ({"extra_host_config": {"device_requests": [1]}}, "extra_host_config['device_requests']"),
        ({"extra_create_kwargs": {"name": "lab"}}, "extra_create_kwargs['name']"),
        ({"environment": {"NVIDIA_VISIBLE_DEVICES": "all"}}, "environment['NVIDIA_VISIBLE_DEVICES']"),
        (
            {"group_overrides": {"01": {"groups": ["a"], "spawner_override": {"mem_limit": "2G"}}}},
            "group_overrides['01'] for mem_limit",
        ),
    ],
    ids=str,
)
def test_overruled_setting_has_one_line(given: dict[str, Any], written: str) -> None:
    (line,) = lines(**given)
    assert line.startswith(f"c.DockerSpawner.{written} has no effect: ")


def test_used_settings_and_defaults_have_no_line() -> None:
    used = {"volumes": {"a": "/b"}, "cmd": ["lab"], "environment": {"N": 1, "P": Path("/p"), "F": print}}
    assert lines(group_overrides={"01": {"spawner_override": ["mem_limit"]}, "02": None}) == []
    assert lines(**used, pull_policy="ifnotpresent", remove=False, options_form="", mem_limit=None) == []


@pytest.mark.parametrize(
    ("given", "words", "named"),
    [
        ({"cmd": ["start.sh"]}, "fgpu-start: start.sh cannot be run", ["cmd"]),
        ({"cmd": "start.sh"}, "the server ended with status 1", []),
        (
            {"extra_create_kwargs": {"user": "root", "labels": {}}},
            "it ended",
            ["extra_create_kwargs['user']"],
        ),
        ({"extra_create_kwargs": {"user": 0}}, "it ended", ["extra_create_kwargs['user']"]),
        ({"extra_host_config": {"runtime": "nvidia"}}, "it ended", ["extra_host_config['runtime']"]),
        ({"extra_host_config": {"runtime": "", "security_opt": []}}, "it ended", []),
        ({"environment": {"A": print}}, f"{UNFORESEEN} (KeyError)", ["environment['A']"]),
        ({"environment": {"A": print}}, "it ended", []),
    ],
    ids=str,
)
def test_settings_that_may_have_broken_a_launch_are_named(
    given: dict[str, Any], words: str, named: list[str]
) -> None:
    config = Config({"DockerSpawner": given})
    assert suspects(FGPUSpawner, config, words) == [f"c.DockerSpawner.{name}" for name in named]


@pytest.mark.parametrize(("uid", "named"), [(1000, []), (0, ["c.KubeSpawner.uid"])])
def test_what_a_chart_always_sets_is_not_named(uid: int, named: list[str]) -> None:
    chart = {"uid": uid, "extra_pod_config": {}, "extra_container_config": {}, "cmd": "jupyterhub-singleuser"}
    config = Config({"KubeSpawner": chart})
    assert suspects(KubernetesFGPUSpawner, config, "the server ended with status 1") == named


def test_reference_to_a_secret_is_a_variable_in_pods_alone() -> None:
    given = {"environment": {"KEY": {"valueFrom": {"secretKeyRef": {"name": "lab", "key": "key"}}}}}
    assert lines(KubernetesFGPUSpawner, "KubeSpawner", **given) == []
    assert (
        refusal(**given)
        == "c.DockerSpawner.environment['KEY'] is a dict; a variable is text, a number or a path"
    )
