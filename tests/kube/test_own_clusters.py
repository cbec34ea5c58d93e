"""``cluster.sh``: a second cluster beside the first, whose parts are stopped at will, and of which nothing stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubeapi import NAMESPACE, ApiError, KubeApi, node_ready, wait_for

pytestmark = pytest.mark.slow
NUMBER = "97"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
CLUSTER = Path(__file__).parent / "cluster.sh"


def run(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLUSTER, *words], capture_output=True, text=True, timeout=200, **more)


def rules() -> list[str]:
    """The firewall's rules that a Kubernetes could have made."""
    done = subprocess.run(["iptables-save"], capture_output=True, text=True, check=False)
    return [line.partition(" [")[0] for line in done.stdout.splitlines() if "kube" in line.lower()]


def settings() -> list[str]:
    """What a kubelet sets for the whole machine."""
    names = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops")
    return [Path("/proc/sys", name).read_text() for name in names]


def left() -> list[str]:
    """What there is of a cluster on this machine, outside of its processes."""
    found = [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/fgpu-kube-{NUMBER}")]
    places = (Path("/run"), f"fgpu-kube-{NUMBER}"), (Path("/tmp"), f"fgpu-kube.{NUMBER}.*")
    found += [str(path) for folder, pattern in places for path in folder.glob(pattern)]
    found += [str(path) for path in Path("/sys/class/net").glob(f"kube{NUMBER}")]
    found += [line for line in rules() if f"kube{NUMBER} " in line]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return found + [line for line in mounts if f"fgpu-kube.{NUMBER}." in line]


def processes() -> dict[int, str]:
    """The command lines of the processes of a cluster."""
    lines = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"fgpu-kube.{NUMBER}." in line:
                lines[int(path.parent.name)] = line
    return lines


@pytest.fixture
def second(kube: KubeApi) -> Iterator[KubeApi]:
    """A cluster beside the one that is there."""
    done = run("up", "--number", NUMBER)
    assert done.returncode == 0, done.stderr
    told = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert told["FGPU_TEST_KUBE"] == NUMBER
    yield KubeApi.of(Path(told["FGPU_TEST_KUBECONFIG"]))
    assert run("down", NUMBER).returncode == 0


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    before = rules(), settings()
    yield
    assert (left(), processes()) == ([], {})
    assert (rules(), settings()) == before


def test_two_clusters_run_side_by_side_and_a_number_is_used_once(
    nothing_stays: None, kube: KubeApi, second: KubeApi
) -> None:
    assert [node["metadata"]["name"] for node in second.get("/api/v1/nodes")["items"]] == [f"kube{NUMBER}"]
    assert node_ready(second)
    assert node_ready(kube)
    assert run("up", "--number", NUMBER).stderr.startswith(f"kube: cluster {NUMBER} runs already: ")
    folder = Path(Path(f"/run/fgpu-kube-{NUMBER}").read_text().strip())
    with pytest.raises(ApiError) as refused:
        KubeApi.of(folder / "hub.kubeconfig").get(PODS)
    assert refused.value.status == 403
    assert f"system:serviceaccount:{NAMESPACE}:hub" in str(refused.value)


def test_a_crash_leaves_nothing_that_cannot_be_removed(nothing_stays: None, second: KubeApi) -> None:
    first = next(pid for pid, line in processes().items() if " kube-first " in line)
    os.kill(first, signal.SIGKILL)
    wait_for("they do not end", lambda: True if not processes() else None, timeout_s=10)
    assert left()
    assert run("down", NUMBER).returncode == 0
    assert left() == []
