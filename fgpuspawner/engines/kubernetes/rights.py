"""The rights that a Hub needs in its cluster, and those that it can do without.

From this one table manifests are written, `fgpu kube check` and the Hub ask for each right, and docs/kubernetes.md has a
row for each; tests/kube/test_rights.py removes one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fgpuspawner.engines.kubernetes.api import Api

RBAC = "rbac.authorization.k8s.io"
DRA = "resource.k8s.io"
MARK = {"app.kubernetes.io/part-of": "fgpuspawner"}


@dataclass(frozen=True, slots=True)
class Right:
    """The right to use ``verbs`` on a kind of objects, in the Hub's namespace or ``everywhere``.

    ``resource`` may be a subresource such as ``pods/exec``. With ``dialect`` only that dialect needs the right. ``else_``
    says what is missing without a right that the Hub can do without; it is empty for the others.
    """

    resource: str
    verbs: tuple[str, ...]
    what_for: str
    group: str = ""
    everywhere: bool = False
    dialect: str = ""
    else_: str = ""

    async def lacking(self, api: Api, namespace: str) -> list[str]:
        """Return the verbs that the caller may not use."""
        where = "" if self.everywhere else namespace
        asked = {
            verb: await api.may(verb, self.resource, group=self.group, namespace=where) for verb in self.verbs
        }
        return [verb for verb, may in asked.items() if not may]


RIGHTS = (
    Right("pods", ("get", "list", "watch", "create", "delete"), "sessions, and pods that lease GPUs"),
    # Opening a channel needs "get"; from Kubernetes 1.35 on "create" as well.
    Right("pods/exec", ("get", "create"), "checking a session's limits from inside; which GPU a lease has"),
    Right("pods/log", ("get",), "what a session's server has printed, for its owner"),
    Right("secrets", ("create",), "sessions' tokens, which are in no pod's manifest"),
    Right("configmaps", ("get", "create"), "sessions' files: libfgpu and its tools"),
    Right("persistentvolumeclaims", ("get", "create", "delete"), "homes"),
    Right("resourceclaims", ("create",), "a session's share of a GPU", group=DRA, dialect="dra"),
    Right(
        "nodes",
        ("list", "watch"),
        "the machines and their state",
        everywhere=True,
        else_="nodes, with their cpu and memory_mib, are those of c.FGPU.nodes; taints are not seen, and that a node is "
        "away only by its pods",
    ),
    Right(
        "pods",
        ("list", "watch"),
        "what other pods take of a machine",
        everywhere=True,
        else_="pods of other namespaces are not seen: a session that finds no room beside them waits with the cluster's "
        "words",
    ),
    Right(
        "resourceslices",
        ("list",),
        "which GPUs there are",
        group=DRA,
        everywhere=True,
        dialect="dra",
        else_="the GPUs are those that c.FGPU.nodes declares",
    ),
    Right(
        "resourceclaims",
        ("list",),
        "which GPUs other pods have",
        group=DRA,
        everywhere=True,
        dialect="dra",
        else_="a session that gets no part of a GPU that other pods have waits with the cluster's words",
    ),
)
REACHES = ("namespace", "nodes", "cluster")
"""How far a Hub's rights reach; each includes those before."""


def rights_of(dialect: str, reach: str = "cluster") -> tuple[Right, ...]:
    """Return the rights that a Hub uses with this dialect and reach."""
    return tuple(
        right
        for right in RIGHTS
        if right.dialect in ("", dialect)
        and (not right.everywhere or reach == "cluster" or (reach == "nodes" and right.resource == "nodes"))
    )


def manifests(rights: Sequence[Right], *, namespace: str, account: str) -> list[dict[str, Any]]:
    """Return the objects that give these rights to a service account of a namespace."""
    found: list[dict[str, Any]] = []
    # A cluster may have several Hubs: names of objects without a namespace contain the Hub's.
    for kind, name, where in (
        ("Role", "fgpu-hub", {"namespace": namespace}),
        ("ClusterRole", f"fgpu-hub-{namespace}", {}),
    ):
        rules = [
            {"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)}
            for right in rights
            if right.everywhere is not bool(where)
        ]
        bound = {
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        }
        metadata = {"name": name, **where, "labels": dict(MARK)}
        for own, content in ((kind, {"rules": rules}), (f"{kind}Binding", bound)):
            if rules:
                found.append({"apiVersion": f"{RBAC}/v1", "kind": own, "metadata": metadata, **content})
    return found
