"""A service account in a namespace of its own, with the rights that a test gives it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hubs import MERGE, Cluster
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import load_kube_config

from fgpuspawner.engines.kubernetes.api import run_blocking
from fgpuspawner.engines.kubernetes.rights import RBAC, RIGHTS, Right, manifests

ACCOUNT = "hub"


@dataclass(frozen=True)
class World:
    """A namespace with a service account that has the rights of our manifests, and no other."""

    cluster: Cluster
    namespace: str
    kubeconfig: Path

    @property
    def own(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}"

    def configuration(self) -> Configuration:
        """Return how the service account reaches the API."""
        found = Configuration()
        run_blocking(lambda: load_kube_config(str(self.kubeconfig), client_configuration=found))
        return found

    def give(self, rights: list[Right]) -> None:
        """Have the account have these rights alone."""
        made = manifests(rights, namespace=self.namespace, account=ACCOUNT)
        rules = {manifest["kind"]: manifest.get("rules") for manifest in made}
        for manifest in manifests(list(RIGHTS), namespace=self.namespace, account=ACCOUNT):
            if "rules" in manifest:
                where = _path(manifest, self.namespace)
                body = {"rules": rules.get(manifest["kind"], [])}
                self.cluster.ask("PATCH", f"{where}/{manifest['metadata']['name']}", body=body, content=MERGE)

    def may(self, right: Right, verb: str) -> bool:
        """Return whether the account may do this, as the API itself says."""
        resource, _, part = right.resource.partition("/")
        namespace = {} if right.everywhere else {"namespace": self.namespace}
        asked = {"verb": verb, "group": right.group, "resource": resource, "subresource": part, **namespace}
        user = f"system:serviceaccount:{self.namespace}:{ACCOUNT}"
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": asked},
        }
        answer = self.cluster.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body=body)
        return bool(answer["status"]["allowed"])


def _path(manifest: dict[str, Any], namespace: str) -> str:
    where = f"/namespaces/{namespace}" if "namespace" in manifest["metadata"] else ""
    return f"/apis/{RBAC}/v1{where}/{manifest['kind'].lower()}s"


@pytest.fixture(scope="module")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    name = f"fgpu-{secrets.token_hex(3)}"
    own = f"/api/v1/namespaces/{name}"
    made = manifests(list(RIGHTS), namespace=name, account=ACCOUNT)
    cluster.ask("POST", "/api/v1/namespaces", body={"metadata": {"name": name}})
    try:
        cluster.ask("POST", f"{own}/serviceaccounts", body={"metadata": {"name": ACCOUNT}})
        for manifest in made:
            cluster.ask("POST", _path(manifest, name), body=manifest)
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        answer = cluster.ask("POST", f"{own}/serviceaccounts/{ACCOUNT}/token", body=asked)
        path = tmp_path_factory.mktemp("hub") / "kubeconfig"
        path.write_text(json.dumps(_kubeconfig(cluster.configuration, answer["status"]["token"])))
        yield World(cluster, name, path)
    finally:
        for manifest in made:
            if "namespace" not in manifest["metadata"]:
                cluster.ask("DELETE", f"{_path(manifest, name)}/{manifest['metadata']['name']}")
        cluster.ask("DELETE", f"/api/v1/namespaces/{name}")


def _kubeconfig(reached: Configuration, token: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [
            {"name": "c", "cluster": {"server": reached.host, "certificate-authority": reached.ssl_ca_cert}}
        ],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
