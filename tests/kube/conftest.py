from __future__ import annotations

import os
from pathlib import Path

import pytest
from accounts import world  # noqa: F401
from hubs import Cluster
from kubeapi import KubeApi


# First: pytest-xdist reads the marks that are there.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One after the other: they share a cluster of one small node."""
    for item in items:
        if Path(item.path).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.kubernetes)
            item.add_marker(pytest.mark.xdist_group("kubernetes"))


@pytest.fixture(scope="session")
def kubeconfig() -> Path:
    """Of the cluster that tests/kube/cluster.sh has started. Without it tests are skipped; in CI that is a failure."""
    if "FGPU_TEST_KUBECONFIG" not in os.environ:
        reason = "no cluster (make test-kube, or tests/kube/cluster.sh up and FGPU_TEST_KUBECONFIG)"
        pytest.skip(reason)
    return Path(os.environ["FGPU_TEST_KUBECONFIG"])


@pytest.fixture(scope="session")
def cluster(kubeconfig: Path) -> Cluster:
    """The cluster, with what Hubs on it need."""
    return Cluster()


@pytest.fixture(scope="session")
def kube(cluster: Cluster) -> KubeApi:
    """Its API, for its administrator."""
    return cluster.api
