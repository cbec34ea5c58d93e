"""Warm containers: what they do not have, what a session that takes one gets, and that none is had twice."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from dockerhub import BASE, DockerHub, Engine, entry, until
from warmpool import HALF, Pool

WITH_HOMES = """
from fgpuspawner.config import configure
c.FGPUSpawner.volumes = {{"{prefix}-home-{{username}}": "/home/jovyan"}}
"""
ALLOCATE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
print(cuda.cuInit(0), end=" ")
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
print(cuda.cuDeviceGet(ctypes.byref(device), 0), end=" ")
print(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device), end=" ")
print(cuda.cuMemAlloc_v2(ctypes.byref(pointer), 1 << 20))
"""


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory, image: str) -> Path:
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.toml"
    path.write_text(entry("python", BASE))
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """A folder that users may choose."""
    path = tmp_path_factory.mktemp("shared")
    path.chmod(0o755)
    (path / "big").write_text("data")
    return {"sets": {"path": str(path)}}


@pytest.fixture(scope="module")
def pool(
    make_hub: Callable[..., DockerHub], engine: Engine, catalogue: Path, shared: dict[str, dict[str, str]]
) -> Iterator[Pool]:
    """Homes are volumes; the image has been used once, so that its pool is full."""
    hub = make_hub(
        before=WITH_HOMES.format(prefix=engine.prefix),
        after="",
        catalogue=str(catalogue),
        warm_pool={"python": 2},
        folders=shared,
    ).start()
    found = Pool(hub, engine)
    for user in ("alice", "bob", "carol"):
        # A new volume is filled by the engine, so that the first start of each is cold.
        running = hub.running(user, **HALF)
        engine.run_in(running.id, "bash", "-c", f"echo {user} > whose")
        hub.end(user)
    found.filled(2)
    yield found
    hub.terminate()
    left = engine.of_installation(hub.installation)
    assert [name for name in left if "-warm-" in name] == [], "they end with the Hub"
    assert hub.installation not in Path("/proc/self/mountinfo").read_text(), "and so do the places of homes"
    for user in ("alice", "bob", "carol"):
        engine.remove_volume(f"{engine.prefix}-home-{user}")


def test_warm_container_has_no_token_gpu_network_or_users_files(pool: Pool, engine: Engine) -> None:
    for name, container in pool.filled(2).items():
        found = engine.inspect(container)
        assert found is not None
        assert "JUPYTERHUB" not in json.dumps(found), name
        for row in engine.client.top(container, ps_args="-eo pid")["Processes"]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has ended.
                assert "JUPYTERHUB" not in Path(f"/proc/{row[0]}/environ").read_text()
        codes = engine.python_in(container, ALLOCATE).split()
        assert codes[-1] != "0", "no memory"
        limits = engine.run_in(container, "cat", "/run/fgpu/limits")[1]
        assert "device=" not in limits
        assert engine.run_in(container, "ls", "-A", "/home/jovyan")[1] == ""
        assert found["NetworkSettings"]["Networks"] == {}


def test_session_in_a_warm_container_has_its_slice_limits_home_network_and_identity(
    pool: Pool, engine: Engine
) -> None:
    pool.filled(2)
    running, _ = pool.take("alice", fgpu="1")
    assert running.name == pool.hub.container_name(running.session)
    limits = engine.run_in(running.id, "cat", "/run/fgpu/limits")[1]
    assert f"session={running.session.id}\n" in limits
    assert "memory_mib=4096 device_mib=8192" in limits
    host = running.host
    assert host["Memory"] == host["MemorySwap"] == 700 * 2**20
    assert (host["CpuQuota"] / host["CpuPeriod"], host["PidsLimit"]) == (0.5, 1024)
    assert engine.run_in(running.id, "cat", "whose")[1] == "alice\n"
    assert f"Session {running.session.id} is verified" in pool.hub.log_text()
    status, output = engine.run_in(running.id, "nvidia-smi")
    assert status == 0
    assert "/4096MiB" in output.replace(" ", "")
    uuid = running.session.placement.shares[0].device_uuid
    as_the_server = ["env", f"CUDA_VISIBLE_DEVICES={uuid}", "/opt/fgpu/bin/python", "-c", ALLOCATE]
    assert engine.run_in(running.id, *as_the_server)[1].split() == ["0", "0", "0", "0"]
    headers = {"Authorization": f"token {running.token}"}
    url = f"{pool.hub.url}/user/alice/fgpu/api/status"
    answer = requests.get(url, headers=headers, timeout=30).json()
    assert (answer["hub"], answer["session"]["id"]) == ("ok", running.session.id)
    lab = requests.get(f"{pool.hub.url}/user/alice/lab", headers=headers, timeout=30)
    assert lab.status_code == 200
    assert len(running.container["NetworkSettings"]["Networks"]) == 1
    pool.hub.end("alice")


def test_warm_containers_are_used_once_and_replaced(pool: Pool, engine: Engine) -> None:
    pool.filled(2)
    alice, before = pool.take("alice")
    bob, _ = pool.take("bob")
    assert alice.id != bob.id
    assert engine.run_in(alice.id, "cat", "whose")[1] == "alice\n"
    assert engine.run_in(bob.id, "cat", "whose")[1] == "bob\n"
    assert alice.network != bob.network
    engine.run_in(alice.id, "bash", "-c", "echo more > kept")
    pool.hub.end("alice")
    pool.hub.end("bob")
    after = set(pool.filled(2).values())
    assert not after & before
    engine.wait_gone(alice.id)
    again, _ = pool.take("alice")
    assert engine.run_in(again.id, "cat", "kept")[1] == "more\n"
    pool.hub.end("alice")


def test_session_with_a_new_home_starts_cold(pool: Pool, engine: Engine) -> None:
    before = set(pool.filled(2).values())
    running = pool.hub.running("dora", **HALF)
    assert running.id not in before
    assert engine.run_in(running.id, "bash", "-c", "touch mine && ls -A")[0] == 0
    assert f"Session {running.session.id} starts cold: the volume is new" in pool.hub.log_text()
    pool.hub.end("dora")
    engine.remove_volume(f"{engine.prefix}-home-dora")


def test_session_with_a_chosen_folder_starts_cold_and_has_it_and_the_pool_stays(
    pool: Pool, engine: Engine
) -> None:
    before = pool.filled(2)
    running = pool.hub.running("alice", folders=["sets"], **HALF)
    assert running.id not in before.values()
    assert engine.run_in(running.id, "cat", "/run/fgpu/folders/sets/big") == (0, "data")
    pool.hub.end("alice")
    assert pool.filled(2) == before


def test_restarted_hub_removes_the_old_warm_containers(pool: Pool, engine: Engine) -> None:
    pool.filled(2)
    hub = pool.hub
    hub.add_user("carol")
    # So little CPU that its server needs a while.
    slow = {**HALF, "cpu": "0.1"}
    with ThreadPoolExecutor(1) as threads:
        threads.submit(hub.spawn, "carol", options=slow)
        until(lambda: len(pool.waiting()) < 2, what="carol's is taken")
        hub.kill()
    waited = set(pool.waiting().values())
    # The following holds in both cases.
    assert hub.states() in ({"carol/": "PREPARING"}, {"carol/": "RUNNING"})
    hub.start()
    until(
        lambda: not waited & set(engine.of_installation(hub.installation).values()), what="they are removed"
    )
    hub.spawn("carol", options=slow)
    hub.wait_ready("carol")
    session = hub.sessions()["carol/"]
    sessions = [name for name in engine.of_installation(hub.installation) if "-warm-" not in name]
    assert sessions == [hub.container_name(session)]
    assert engine.run_in(hub.container_name(session), "cat", "whose")[1] == "carol\n"
    hub.end("carol")
    pool.filled(2)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a file server that does not answer")
def test_hanging_home_delays_no_other_user(
    make_hub: Callable[..., DockerHub], engine: Engine, catalogue: Path, tmp_path: Path
) -> None:
    homes = f'c.FGPUSpawner.volumes = {{"{tmp_path}/{{username}}": "/home/jovyan"}}\n'
    hub = make_hub(before=homes, after="", catalogue=str(catalogue), warm_pool={"python": 2})
    pool = Pool(hub.start(), engine)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    for user in ("alice", "bob"):
        (tmp_path / user).mkdir()
        os.chown(tmp_path / user, 1000, 1000)
    hub.running("alice", **HALF)
    hub.end("alice")
    pool.filled(2)
    # The file server does not read the kernel's requests.
    silent = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={silent},rootmode=40777,user_id=0,group_id=0".encode()
    try:
        assert ctypes.CDLL(None).mount(b"silent", str(tmp_path / "bob").encode(), b"fuse", 0, options) == 0
        hub.add_user("bob")
        small = {"fgpu": "0.2", "cpu": "0.2", "memory_mib": 300}
        for number in range(5):
            assert hub.spawn("bob", f"s{number}", options=small).status_code == 202
        pool.take("alice")
        until(
            lambda: hub.log_text().count("starts cold: its home does not answer") == 5,
            what="bob's sessions are told from others",
        )
    finally:
        os.close(silent)
        subprocess.run(["umount", "--lazy", str(tmp_path / "bob")], check=True)
