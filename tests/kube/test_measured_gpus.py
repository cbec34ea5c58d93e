"""Sessions' use of leased GPUs is measured and watched, with the simulated driver in place of NVIDIA's.

The device plugin and NVIDIA's runtime of the tests give its libraries and its ledger to the pods that get a GPU.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from deviceplugin import LIBRARIES, RESOURCE, DevicePlugin
from hubs import PODS, SMALL, Cluster, on
from test_docker_compute_watch import HERE, SIMULATED
from test_gpu_injection import check

from fgpuspawner.isolation import native
from fgpuspawner.meter.model import METERS
from hubprocess import HubProcess, until

A, B = "GPU-aaaa", "GPU-bbbb"
IMAGE = "fgpuspawner/base:0.1"
CLASS = "fgpu-test-measured"
CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
SETTINGS = f"""
c.KubernetesFGPUSpawner.lease_image = {IMAGE!r}
c.KubernetesFGPUSpawner.runtime_class = {CLASS!r}
c.KubernetesFGPUSpawner.measure_gpus = True
"""
HOLD = """
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
for status in (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
               cuda.cuCtxSetCurrent(context), cuda.cuMemAlloc_v2(ctypes.byref(memory), 512 << 20)):
    assert status == 0, status
print("held", flush=True)
time.sleep(600)
"""
REACH = """
import socket, ssl, urllib.request, sys
lease, api = sys.argv[1:]
open_ports = []
for port in (*range(1, 1024), 8080, 8443, 8888, 9400, 10250):
    with socket.socket() as asked:
        asked.settimeout(0.2)
        if asked.connect_ex((lease, port)) == 0:
            open_ports.append(port)
print("ports", open_ports)
try:
    urllib.request.urlopen(api, context=ssl._create_unverified_context(), timeout=10)
    print("answered")
except urllib.error.HTTPError as e:
    print("status", e.code)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a simulated machine with two GPUs, and a program that computes without libfgpu."""
    found = native.find()
    if found is None:
        pytest.skip(native.NOT_BUILT)
    folder = tmp_path_factory.mktemp("driver")
    for name, source in found.simulated.items():
        shutil.copy(source, folder / name)
    (folder / "machine").write_text(
        "".join(f"gpu uuid={uuid} memory_mib=8192 context_mib=0 name=Test\n" for uuid in (A, B))
    )
    for name in ("ledger", "log"):
        (folder / name).touch()
        (folder / name).chmod(0o666)
    sources = sorted([*SIMULATED.glob("cuda*.c"), *SIMULATED.glob("machine*.c")])
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-w", "-static", f"-I{SIMULATED.parent / 'include'}"]
    words = ["gcc", *flags, "-o", folder / "around", HERE / "aroundlibfgpu.c", *sources, "-pthread"]
    subprocess.run(words, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def plugin(
    cluster: Cluster, driver: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DevicePlugin]:
    cluster.ask("POST", CLASSES, body={"metadata": {"name": CLASS}, "handler": "nvidia"})
    cluster.change_node({"metadata": {"labels": {"fgpu.group": "default"}}})
    plugin = DevicePlugin(tmp_path_factory.mktemp("plugin"), [A, B], cdi=True, driver=driver).start()
    path = f"/api/v1/nodes/{cluster.name}"
    try:
        until(lambda: cluster.ask("GET", path)["status"]["allocatable"].get(RESOURCE) == "2")
        yield plugin
    finally:
        plugin.stop()
        cluster.change_node({"metadata": {"labels": {"fgpu.group": None}}})
        cluster.ask("DELETE", f"{CLASSES}/{CLASS}")
        cluster.ask("DELETE", PODS, query=[("labelSelector", "fgpu.lease")], body={"gracePeriodSeconds": 1})


def test_check_says_whether_use_can_be_measured(cluster: Cluster, tmp_path: Path) -> None:
    status, (measured, session) = check(cluster, tmp_path, SETTINGS)
    assert measured.startswith("OK: start: the use of GPU-")
    assert measured.endswith("can be measured; it has 0 processes now")
    assert session.endswith('alone with gpu_injection "cdi"')
    assert status == 0


@pytest.fixture(scope="module")
def hub(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("hub")
    with on(cluster, folder, before=SETTINGS, nodes=[], watchdog_every_s=1, meter_every_s=2) as hub:
        for user in ("ann", "mallory"):
            hub.add_user(user)
        until(lambda: len([d for n in hub.store.snapshot(0).nodes for d in n.devices]) == 2, within_s=60)
        yield hub


def begin(cluster: Cluster, hub: HubProcess, user: str) -> str:
    """Start a session with half a GPU and return its pod."""
    assert hub.spawn(user, options={"fgpu": "1", **SMALL}).status_code in (201, 202)
    until(lambda: hub.states().get(f"{user}/") == "RUNNING", within_s=90)
    session = hub.sessions()[f"{user}/"]
    return f"fgpu-{hub.store.installation_id}-{session.id}-{session.attempt}"


def run_beside(cluster: Cluster, pod: str, command: list[str]) -> None:
    threading.Thread(target=cluster.run_in, args=(pod, "notebook", command), daemon=True).start()


def test_use_is_measured_and_a_program_around_libfgpu_is_warned_and_ended(
    cluster: Cluster, hub: HubProcess
) -> None:
    pod = begin(cluster, hub, "ann")
    run_beside(cluster, pod, ["python", "-c", HOLD])
    ann = hub.sessions()["ann/"].id

    def held() -> bool:
        found = (METERS.read(hub.data).sessions or {}).get(ann)
        return found is not None and 512 <= (found.now.memory_used_mib or 0) < 1024

    until(held, within_s=60, what="the meter shows what the program holds")

    thief = begin(cluster, hub, "mallory")
    run_beside(cluster, thief, ["env", f"FGPU_SIMULATED_MACHINE={LIBRARIES}", f"{LIBRARIES}/around"])
    ended = until(lambda: hub.store.ended(user="mallory", limit=1), within_s=120, what="it is ended")[0]
    assert (ended.state, ended.end_cause) == ("ERROR", "ISOLATION_FAILED")
    assert "also after a warning" in str(ended.message)
    assert hub.states() == {"ann/": "RUNNING"}
    assert held()
    hub.stop("ann")
    hub.reach({})


def test_session_has_nothing_to_call_in_a_lease_pod(cluster: Cluster, hub: HubProcess) -> None:
    pod = begin(cluster, hub, "ann")
    query = [("labelSelector", f"fgpu.lease={hub.store.installation_id}")]
    lease = cluster.ask("GET", PODS, query=query)["items"][0]
    name, address = lease["metadata"]["name"], lease["status"]["podIP"]
    call = f"https://{cluster.api.host}{PODS}/{name}/exec?command=id&container=lease&stdout=true"
    said = cluster.run_in(pod, "notebook", ["python", "-c", REACH, address, call]).decode()
    ports, answered = said.splitlines()
    assert ports == "ports []"
    assert answered in ("status 401", "status 403")
    seen = cluster.run_in(pod, "notebook", ["sh", "-c", "ls -d /proc/[0-9]* | wc -l"])
    assert int(seen) < 30, "a session does not see its node's processes"
    spec = json.dumps(lease["spec"])
    assert lease["spec"]["automountServiceAccountToken"] is False
    assert "privileged" not in spec
    hub.stop("ann")
    hub.reach({})
