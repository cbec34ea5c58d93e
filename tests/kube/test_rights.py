"""The Hub's rights in its cluster are sufficient, and each is needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from accounts import World
from hubs import SMALL, on
from kubeapi import disconnected
from kubernetes_asyncio.client.exceptions import ApiException
from kubernetes_asyncio.config import kube_config
from labs import KubeLab
from traitlets.config import Config

from fgpu_scheduler import FGPUError
from fgpuspawner.engines.base import Engine, Installation, LaunchSpec
from fgpuspawner.engines.kubernetes.api import Api, run_blocking
from fgpuspawner.engines.kubernetes.dialects.dra import Dra
from fgpuspawner.engines.kubernetes.dialects.lease import Lease
from fgpuspawner.engines.kubernetes.engine import KubernetesEngine
from fgpuspawner.engines.kubernetes.files import LABEL
from fgpuspawner.engines.kubernetes.pods import PodOptions
from fgpuspawner.engines.kubernetes.rights import RIGHTS, Right
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from hubprocess import until

WHOLE = {"fgpu": "2", **SMALL}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "home"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
}
EXEC_CREATE = ("pods/exec", "create", False)
"""Asked for from Kubernetes 1.35 on."""


def test_hub_with_only_these_rights_runs_sessions_and_finds_them_after_a_restart(
    world: World, tmp_path: Path
) -> None:
    own = {"namespace": world.namespace, "kubeconfig": str(world.kubeconfig)}
    with on(world.cluster, tmp_path, gpus=1, **own) as hub:
        for user in ("ann", "ben"):
            hub.add_user(user)
            assert hub.spawn(user, options=WHOLE).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "ben/": "PENDING"})
        (pod,) = world.cluster.pods(hub, world.namespace).values()
        hub.kill()
        hub.start()
        hub.reach({"ann/": "RUNNING", "ben/": "PENDING"})
        (again,) = world.cluster.pods(hub, world.namespace).values()
        assert again["metadata"]["uid"] == pod["metadata"]["uid"]
        assert hub.stop("ann").status_code in (202, 204)
        hub.reach({"ben/": "RUNNING"})
        assert hub.stop("ben").status_code in (202, 204)
        hub.reach({})
        assert hub.api("DELETE", "users/ann").status_code == 204
        assert "forbidden" not in hub.log_text().lower()


# --- Each right is removed once ---


class RightsLab(KubeLab):
    """The Hub's own engine, as the service account."""

    def __init__(self, folder: Path, world: World, dialect: str) -> None:
        self.world = world
        self.dialect = dialect
        super().__init__(folder)

    def make(self, installation: Installation) -> Engine:
        return KubernetesEngine(
            installation,
            self.world.configuration(),
            namespace=self.world.namespace,
            stop_timeout_s=1,
            dialect=Dra() if self.dialect == "dra" else Lease(installation.id),
        )


@dataclass(frozen=True)
class Lost:
    """A Hub that has lost a right: its lab, its engine, and its log."""

    lab: RightsLab
    engine: Any
    heard: Callable[[], str]

    def spec(self, claim: Any = None) -> LaunchSpec:
        found = self.lab.spec(self.engine, self.lab.session())
        assert isinstance(found.options, PodOptions)
        return replace(found, options=replace(found.options, claim=claim))

    def pod(self) -> LaunchSpec:
        """Make a pod as a session's, as the administrator, and return the session's specification."""
        found = self.spec()
        labels = {
            "fgpu.installation": self.lab.id,
            "fgpu.session": str(found.session.id),
            "fgpu.attempt": "1",
        }
        name = f"fgpu-{self.lab.id}-{found.session.id}-1"
        made = {"name": "notebook", "image": self.lab.reference, "command": ["sleep", "60"]}
        body = {
            "metadata": {"name": name, "labels": labels},
            "spec": {"containers": [made], "terminationGracePeriodSeconds": 1},
        }
        self.lab.ask("POST", f"{self.lab.world.own}/pods", body=body)
        return found


async def starts(lost: Lost) -> None:
    await lost.engine.start(lost.spec())


async def starts_with_new_files(lost: Lost) -> None:
    # Other sessions of the namespace may have made those of this Hub.
    path = f"{lost.lab.world.own}/configmaps"
    for one in lost.lab.ask("GET", f"{path}?labelSelector={LABEL}")["items"]:
        lost.lab.ask("DELETE", f"{path}/{one['metadata']['name']}")
    await lost.engine.start(lost.spec())


async def starts_with_a_home(lost: Lost) -> None:
    await lost.engine.start(lost.spec(CLAIM))


async def deletes_a_home(lost: Lost) -> None:
    config = Config()
    config.KubernetesFGPUSpawner.namespace = lost.lab.world.namespace
    config.KubernetesFGPUSpawner.delete_pvc = True
    await KubernetesFGPUSpawner(config=config, _mock=True).delete_forever()


async def starts_with_a_claim_on_a_gpu(lost: Lost) -> None:
    # The Hub's own call: before Kubernetes 1.34 no claim can be made, but rights are checked first.
    await lost.engine._make("resourceclaims", {"metadata": {"name": "x"}}, api="/apis/resource.k8s.io/v1")


async def stops(lost: Lost) -> None:
    assert not await lost.engine.stop(lost.pod().session, now=True)


async def observes(lost: Lost) -> None:
    assert (await lost.engine.observe()).nodes == ()


async def checks(lost: Lost) -> None:
    await lost.engine.probe(lost.pod().session, ["fgpu-probe"], environment={}, timeout_s=10)


async def reads_its_log(lost: Lost) -> None:
    await lost.engine.log(lost.pod().session, lines=9)


async def surveys(lost: Lost) -> None:
    lost.engine.survey()


NOT_FOLLOWED = "The cluster's pods cannot be followed now"


async def follows(lost: Lost) -> None:
    for _ in range(100):
        if NOT_FOLLOWED in lost.heard():
            return
        await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Case:
    does: Callable[[Lost], Awaitable[None]]
    words: str
    refusal: str = 'cannot {verb} resource "{resource}"'


LESS = "{resource} in the whole cluster: "
"""A Hub that starts without the right says what it does not know, and goes on."""


CASES: dict[tuple[str, str, bool], Case] = {
    ("pods", "get", False): Case(stops, "could not be removed: "),
    ("pods", "create", False): Case(starts, "the cluster refuses the session: "),
    ("pods", "delete", False): Case(stops, "could not be removed: "),
    ("pods/exec", "get", False): Case(
        checks, "the cluster did not run the check of the session's GPU limit", "HTTP 403"
    ),
    EXEC_CREATE: Case(checks, "the cluster did not run the check of the session's GPU limit", "HTTP 403"),
    ("pods/log", "get", False): Case(reads_its_log, "the cluster does not return the log: "),
    ("secrets", "create", False): Case(starts, "the cluster refuses the session: "),
    ("configmaps", "get", False): Case(starts, "the cluster refuses the session: "),
    ("configmaps", "create", False): Case(starts_with_new_files, "the cluster refuses the session: "),
    ("persistentvolumeclaims", "get", False): Case(starts_with_a_home, "the cluster refuses the session: "),
    ("persistentvolumeclaims", "create", False): Case(
        starts_with_a_home, "the cluster refuses the session: "
    ),
    ("persistentvolumeclaims", "delete", False): Case(deletes_a_home, "Forbidden"),
    ("resourceclaims", "create", False): Case(starts_with_a_claim_on_a_gpu, "resourceclaims"),
    ("pods", "list", False): Case(observes, "What runs in the cluster cannot be seen now: "),
    ("pods", "watch", False): Case(follows, NOT_FOLLOWED),
    ("nodes", "list", True): Case(surveys, "the Hub may not list nodes, and c.FGPU.nodes has no cpu", LESS),
    ("nodes", "watch", True): Case(surveys, "the Hub may not list nodes, and c.FGPU.nodes has no cpu", LESS),
    ("pods", "list", True): Case(surveys, "pods of other namespaces are not seen", LESS),
    ("pods", "watch", True): Case(surveys, "pods of other namespaces are not seen", LESS),
    ("resourceslices", "list", True): Case(surveys, "the GPUs are those that c.FGPU.nodes declares", LESS),
    ("resourceclaims", "list", True): Case(surveys, "a session that gets no part of a GPU", LESS),
}


def key_of(right: Right, verb: str) -> tuple[str, str, bool]:
    return right.resource, verb, right.everywhere


EACH = [(right, verb) for right in RIGHTS for verb in right.verbs]


@asynccontextmanager
async def without(
    right: Right, verb: str, world: World, folder: Path, heard: Callable[[], str]
) -> AsyncIterator[Lost]:
    """Yield an engine that started with all rights and has lost one."""
    lab = RightsLab(folder, world, right.dialect)
    started = lab.engine()
    fewer = tuple(v for v in right.verbs if v != verb)
    # A right to pods of the whole cluster includes that to the namespace's.
    whole = [r for r in RIGHTS if r.everywhere and r.resource == right.resource]
    less = [
        replace(r, verbs=fewer) if r is right else r for r in RIGHTS if right.everywhere or r not in whole
    ]
    world.give([r for r in less if r.verbs])
    try:
        until(lambda: not world.may(right, verb), what="the right is gone")
        if verb == "watch" or right.everywhere:
            # A watch that runs continues for up to a minute, and the Hub asks for its rights when it starts.
            await _closed(lab)
            started = lab.engine()
        yield Lost(lab, started, heard)
    finally:
        world.give(list(RIGHTS))
        until(lambda: world.may(right, verb), what="the right is back")
        await _closed(lab)
        lab.close()


async def _closed(lab: RightsLab) -> None:
    assert lab.background is not None
    await lab.background.close()
    await disconnected()
    lab.background = None


@pytest.mark.parametrize(("right", "verb"), EACH, ids=lambda value: getattr(value, "resource", value))
async def test_removing_any_right_fails_with_a_message_that_names_it(
    right: Right,
    verb: str,
    world: World,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = key_of(right, verb)
    if key == EXEC_CREATE and _version(world) < (1, 35):
        pytest.skip("Kubernetes asks for it from 1.35 on")
    case = CASES[key]
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(world.kubeconfig))
    caplog.set_level(logging.WARNING)
    async with without(right, verb, world, tmp_path, lambda: caplog.text) as lost:
        said = ""
        began = time.monotonic()
        try:
            await case.does(lost)
        except (FGPUError, ApiException) as e:
            said = str(e)
        assert time.monotonic() - began < 180
        said += caplog.text
    assert case.words in said
    assert case.refusal.format(verb=verb, resource=right.resource) in said.replace("\\", "")


def _version(world: World) -> tuple[int, int]:
    async def asked() -> tuple[int, int]:
        api = Api(world.cluster.configuration)
        try:
            return await api.version()
        finally:
            await api.close()

    return run_blocking(asked)


def test_every_right_has_a_case() -> None:
    assert {key_of(right, verb) for right, verb in EACH} == CASES.keys()
