"""Which fields of a cluster's objects are kept: a node tells of all its images, a pod of who changed what. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fgpuspawner.engines.kubernetes.api import Manifest

Fields = Mapping[str, "Fields | None"]
"""The fields that are kept of an object; None keeps everything."""

_METADATA: Fields = dict.fromkeys(("name", "namespace", "uid", "labels", "annotations", "deletionTimestamp"))
_CONTAINER: Fields = dict.fromkeys(("name", "image", "resources"))
_STATE: Fields = dict.fromkeys(("name", "state"))

_OWN_POD: Fields = {
    "metadata": _METADATA,
    "spec": {
        "nodeName": None,
        "terminationGracePeriodSeconds": None,
        "containers": _CONTAINER,
        "initContainers": _CONTAINER,
    },
    "status": {
        **dict.fromkeys(("phase", "reason", "message", "podIP")),
        "conditions": dict.fromkeys(("type", "status", "reason", "message")),
        "containerStatuses": _STATE,
        "initContainerStatuses": _STATE,
    },
}
"""Of a session's or a lease's."""

OTHERS_POD: Fields = {
    "metadata": _METADATA,
    "spec": {
        **dict.fromkeys(("nodeName", "overhead", "resourceClaims")),
        "containers": {"resources": None, "env": dict.fromkeys(("name", "value"))},
        "initContainers": {"resources": None},
    },
    "status": dict.fromkeys(("phase", "resourceClaimStatuses")),
}
"""Kept of every pod: what it takes of its node, and of which GPU."""

_NODE: Fields = {
    "metadata": _METADATA,
    "spec": dict.fromkeys(("unschedulable", "taints")),
    "status": {"allocatable": None, "conditions": dict.fromkeys(("type", "status"))},
}


def node_kept(node: Manifest) -> dict[str, Any]:
    """Return what is kept of a node."""
    return kept(node, _NODE)


def own_kept(pod: Manifest) -> dict[str, Any]:
    """Return what is kept of a pod of ours."""
    return kept(pod, _OWN_POD)


def kept(found: Manifest, fields: Fields) -> dict[str, Any]:
    """Return those of these fields that an object has."""
    return {name: _kept(found[name], below) for name, below in fields.items() if found.get(name) is not None}


def _kept(found: Any, fields: Fields | None) -> Any:
    if fields is None:
        return found
    if isinstance(found, list):
        return [kept(one, fields) for one in found]
    return kept(found, fields)
