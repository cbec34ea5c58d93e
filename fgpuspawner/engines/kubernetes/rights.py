"""What a Hub may do in its cluster: only what the engine's calls need. Pure.

One table: the manifests give these rights, `fgpu kube check` asks for each, docs/kubernetes.md says what each is for, and
tests/kube/test_rights.py takes one after the other away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RBAC = "rbac.authorization.k8s.io"
DRA = "resource.k8s.io"
MARK = {"app.kubernetes.io/part-of": "fgpuspawner"}


@dataclass(frozen=True, slots=True)
class Right:
    """What the Hub does with a kind of objects, in its namespace or ``everywhere``; with one ``dialect``, if it is named.

    A ``resource`` may be a part, such as ``pods/exec``.
    """

    resource: str
    verbs: tuple[str, ...]
    what_for: str
    group: str = ""
    everywhere: bool = False
    dialect: str = ""


RIGHTS = (
    # They are listed and watched as well: by the right to do so with all pods, below.
    Right("pods", ("get", "create", "delete"), "sessions, and pods that lease GPUs"),
    # Who opens a channel needs "get"; from Kubernetes 1.35 on "create" as well.
    Right("pods/exec", ("get", "create"), "checking a session's limits from inside; which GPU a lease has"),
    Right("secrets", ("create",), "who a session is: its token is in no pod's text"),
    Right("persistentvolumeclaims", ("get", "create", "delete"), "homes"),
    Right("resourceclaims", ("create",), "a session's share of a GPU", group=DRA, dialect="dra"),
    Right("nodes", ("list", "watch"), "what machines there are, and how they are", everywhere=True),
    Right("pods", ("list", "watch"), "what pods of others take of a machine", everywhere=True),
    Right("resourceslices", ("list",), "which GPUs there are", group=DRA, everywhere=True, dialect="dra"),
    Right(
        "resourceclaims",
        ("list",),
        "which GPUs pods of others have",
        group=DRA,
        everywhere=True,
        dialect="dra",
    ),
)


def rights_of(dialect: str) -> tuple[Right, ...]:
    """Return the rights that a Hub with this dialect needs."""
    return tuple(right for right in RIGHTS if right.dialect in ("", dialect))


def manifests(rights: Sequence[Right], *, namespace: str, account: str) -> list[dict[str, Any]]:
    """Return the objects that give these rights to a service account of a namespace."""
    own = [right for right in rights if not right.everywhere]
    everywhere = [right for right in rights if right.everywhere]
    # Objects without a namespace have the Hub's in their names: a cluster may have several Hubs.
    whole = f"fgpu-hub-{namespace}"
    return [
        _object("Role", "fgpu-hub", namespace, rules=_rules(own)),
        _object("RoleBinding", "fgpu-hub", namespace, **_bound("Role", "fgpu-hub", namespace, account)),
        _object("ClusterRole", whole, rules=_rules(everywhere)),
        _object("ClusterRoleBinding", whole, **_bound("ClusterRole", whole, namespace, account)),
    ]


def _object(kind: str, name: str, namespace: str = "", **more: Any) -> dict[str, Any]:
    where = {"namespace": namespace} if namespace else {}
    metadata = {"name": name, **where, "labels": dict(MARK)}
    return {"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": metadata, **more}


def _rules(rights: Sequence[Right]) -> list[dict[str, Any]]:
    return [{"apiGroups": [r.group], "resources": [r.resource], "verbs": list(r.verbs)} for r in rights]


def _bound(kind: str, name: str, namespace: str, account: str) -> dict[str, Any]:
    return {
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }
