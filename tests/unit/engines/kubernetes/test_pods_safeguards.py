"""What sessions' pods see to is judged on a pod as the settings make it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from fgpuspawner.engines.base import Safeguard
from fgpuspawner.engines.kubernetes.sample import LINES, safeguards_of, sample_pod
from fgpuspawner.engines.kubernetes.spawner import KINDS, KubernetesFGPUSpawner

S = Safeguard
PAGE = (Path(__file__).resolve().parents[4] / "docs" / "security.md").read_text()
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: "https://127.0.0.1:9"}}]
users: [{name: u, user: {token: nobody}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
"""


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that is configured, and not asked."""
    path = tmp_path / "kubeconfig"
    path.write_text(KUBECONFIG)
    monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))


def met(*, opaque: bool = False, closed: bool | None = True, **settings: Any) -> dict[Safeguard, bool | None]:
    config = Config({"KubeSpawner": settings})
    pod = asyncio.run(sample_pod(partial(KubernetesFGPUSpawner.sample_options, config)))
    return {guard: held.met for guard, held in safeguards_of(pod, opaque=opaque, closed=closed).items()}


def test_default_pod_is_unprivileged_filtered_and_limited() -> None:
    assert met() == {
        S.UNPRIVILEGED: True,
        S.FILTERED: True,
        S.LIMITS: True,
        S.READ_ONLY: False,
        S.PROCESSES: None,
        S.PORTS: None,
        S.COMMANDS: True,
        S.REMAPPED: False,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"privileged": True},
        {"allow_privilege_escalation": True},
        {"uid": 0},
        {"container_security_context": {"capabilities": {"add": ["SYS_ADMIN"]}}},
        {"extra_pod_config": {"hostNetwork": True}},
        {"extra_pod_config": {"hostPID": True}},
        {"extra_containers": [{"name": "side", "image": "side:1", "securityContext": {"privileged": True}}]},
    ],
    ids=str,
)
def test_privileges_in_settings_are_found(settings: dict[str, Any]) -> None:
    assert met(**settings)[S.UNPRIVILEGED] is False


@pytest.mark.parametrize(("kind", "expected"), [("Unconfined", False), ("Localhost", None)])
def test_own_seccomp_profile_is_unknown_and_none_is_missing(kind: str, expected: bool | None) -> None:
    assert met(container_security_context={"seccompProfile": {"type": kind}})[S.FILTERED] is expected


def test_functions_in_settings_make_met_safeguards_unknown() -> None:
    found = met(opaque=True)
    assert (found[S.UNPRIVILEGED], found[S.FILTERED], found[S.LIMITS], found[S.READ_ONLY]) == (
        None,
        None,
        True,
        False,
    )


def test_read_only_root_is_found_and_user_namespaces_are_unknown() -> None:
    found = met(
        container_security_context={"readOnlyRootFilesystem": True}, extra_pod_config={"hostUsers": False}
    )
    assert (found[S.READ_ONLY], found[S.REMAPPED]) == (True, None)


def test_every_safeguard_has_a_documented_line() -> None:
    assert set(LINES) == set(Safeguard)
    for line in LINES.values():
        assert line in PAGE


@pytest.mark.parametrize("dialect", sorted(KINDS))
def test_sample_pod_requests_a_gpu_by_its_dialect(dialect: str) -> None:
    config = Config({"KubernetesFGPUSpawner": {"dialect": dialect}})
    said = KubernetesFGPUSpawner.dialect_of(config, installation="x")
    plain = asyncio.run(sample_pod(partial(KubernetesFGPUSpawner.sample_options, config)))
    asks = asyncio.run(sample_pod(partial(KubernetesFGPUSpawner.sample_options, config), dialect=said))
    assert asks != plain
    assert asks["metadata"]["name"] == plain["metadata"]["name"]
