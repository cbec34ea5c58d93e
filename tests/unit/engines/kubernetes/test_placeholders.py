"""Which waiting requests an autoscaler is told of, and which idle nodes are given back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from aiohttp import web
from apiserver import answering
from traitlets.config import Config

from fgpu_scheduler import (
    BadSettings,
    Device,
    Node,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
    Snapshot,
    WaitReason,
)
from fgpuspawner.engines.kubernetes import placeholders
from fgpuspawner.engines.kubernetes.api import Api
from fgpuspawner.engines.kubernetes.placeholders import Placeholders, placeholder_pod, wanted
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.settings import FGPU

DEVICE = Device("GPU-1", "gpu1", 0, "A100", 40960, 4000)
SETTINGS: dict[str, Any] = {
    "installation": "lab",
    "image": "i",
    "priority_class": "low",
    "session_spec": {},
}
POD_OF = partial(placeholder_pod, **SETTINGS)
NODE = Node(id="gpu1", resource_group="default", cpu_milli=8000, memory_mib=65536, devices=(DEVICE,))


def session(number: int, fgpu_milli: int, reason: WaitReason = WaitReason.RESOURCES, **more: Any) -> Session:
    request = Request("ann", "", "base", more.pop("group", "default"), fgpu_milli, 500, 1024, **more)
    return Session(number, request, SessionState.PENDING, 0, wait_reason=reason)


def asked(*sessions: Session, most: int = 10) -> list[tuple[int, int]]:
    snapshot = Snapshot(0, 1, (NODE,), sessions)
    return [(one.id, gpus) for one, gpus in wanted(snapshot, most)]


def test_only_requests_that_wait_for_resources_get_a_placeholder() -> None:
    others = [session(n, 4000, reason) for n, reason in enumerate(WaitReason) if reason != "RESOURCES"]
    assert asked(*others) == []
    assert asked(*others, session(9, 4000)) == [(9, 1)]


def test_fractions_share_a_gpu_and_whole_gpus_add_up() -> None:
    assert asked(session(1, 2000), session(2, 1000), session(3, 1000), session(4, 1000)) == [(1, 1), (4, 1)]
    assert asked(session(1, 8000), session(2, 4000)) == [(1, 2), (2, 1)]
    assert asked(session(1, 0, gpu_memory_mib=10240), session(2, 3000)) == [(1, 1)]
    assert asked(session(1, 1000), session(2, 1000, group="class")) == [(1, 1), (2, 1)]


def test_the_oldest_requests_come_first_up_to_the_most() -> None:
    assert asked(*(session(n, 4000) for n in (5, 3, 4)), most=2) == [(3, 1), (4, 1)]


def test_a_placeholder_goes_where_the_session_would() -> None:
    spec = {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "team"}], "volumes": [{"name": "home"}]}
    pod = placeholder_pod(session(7, 2000), 1, **{**SETTINGS, "session_spec": spec})
    assert pod["spec"]["nodeSelector"] == {"pool": "gpu", "fgpu.group": "default"}
    assert pod["spec"]["tolerations"] == [{"key": "team"}]
    assert "volumes" not in pod["spec"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "500m", "memory": "1024Mi", "nvidia.com/gpu": "1"}


def node(name: str, group: str = "default") -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"fgpu.group": group}}}


def test_idle_nodes_are_given_back_except_one_and_come_back_when_a_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(placeholders.time, "monotonic", lambda: now[0])
    keeper = Placeholders(Api.__new__(Api), "", POD_OF, installation="lab", most=10)
    nodes = [node("gpu1"), node("gpu2"), node("gpu3"), node("gpu9", "class")]
    share = Share("GPU-2", 4000, 40960, 100)
    running = Session(
        1, session(1, 4000).request, SessionState.RUNNING, 0, placement=Placement("gpu2", (share,))
    )

    def kept(*sessions: Session) -> list[str]:
        found = keeper.kept(nodes, Snapshot(0, 1, (), sessions))
        return [one["metadata"]["name"] for one in found]

    everything = ["gpu1", "gpu2", "gpu3", "gpu9"]
    assert kept(running) == everything
    now[0] = placeholders.IDLE_FOR_S - 1
    assert kept(running) == everything
    now[0] += 1
    assert kept(running) == ["gpu2", "gpu9"], "gpu9 is the only one of its group"
    assert kept() == ["gpu2", "gpu9"], "gpu2 has just become idle"
    now[0] += placeholders.IDLE_FOR_S
    assert kept() == ["gpu1", "gpu9"], "one stays"
    assert kept(session(2, 4000)) == everything


@pytest.mark.parametrize("hub_pod", ["hub-0", "gone", ""])
async def test_placeholders_go_with_the_hubs_pod(hub_pod: str) -> None:
    made: list[dict[str, Any]] = []

    async def cluster(request: web.Request) -> web.Response:
        if request.method == "POST":
            made.append(await request.json())
        if request.path.endswith("/gone"):
            said = {"kind": "Status", "reason": "NotFound", "message": "not found"}
            return web.json_response(said, status=404)
        return web.json_response({"kind": "Pod", "metadata": {"name": "hub-0", "uid": "u-1"}})

    async with answering(cluster) as api:
        keeper = Placeholders(api, "/pods", POD_OF, installation="lab", most=10, hub_pod=hub_pod)
        keeper.mirror.listed = True
        await keeper.reconcile(Snapshot(0, 1, (NODE,), (session(1, 4000),)))
    (pod,) = made
    owners = [(one["kind"], one["name"], one["uid"]) for one in pod["metadata"].get("ownerReferences", ())]
    assert owners == ([("Pod", "hub-0", "u-1")] if hub_pod == "hub-0" else [])


def test_settings_for_lease_pods_need_the_dialect_lease_and_an_image() -> None:
    for setting in ("placeholder_priority_class", "measure_gpus"):
        for own in ({"dialect": "dra", "lease_image": "i"}, {"dialect": "lease"}):
            config = Config(
                {"KubernetesFGPUSpawner": {**own, setting: "low" if "class" in setting else True}}
            )
            with pytest.raises(
                BadSettings, match=rf"{setting} is for pods that lease GPUs: it needs dialect"
            ):
                KubernetesFGPUSpawner.check_settings(config, FGPU())
