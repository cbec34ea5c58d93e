"""Kueue's gate: a pod that has its place with us may have to wait for the cluster's own quota. Pure.

A pod with the queue's label is held by a scheduling gate until Kueue admits the Workload that it makes of the pod. Why it
waits is a condition of that Workload; where it stands, Kueue's visibility API says. A pod that Kueue preempts it deletes.

Sources: Kueue, "Run Plain Pods", "Troubleshooting Pods", "Pending Workloads on-demand" and the API reference of
kueue.x-k8s.io and visibility.kueue.x-k8s.io; KEP-10852 (reasons, behind the feature gate
UnadmittedWorkloadsObservability; without it they are "Pending" and "Inadmissible", and only the message tells);
pkg/controller/jobs/pod (gate, condition TerminationTarget).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Manifest = Mapping[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
GATE = "kueue.x-k8s.io/admission"

_WORDS = {
    "WaitingForQuota": "other workloads hold its quota",
    "WaitingForPreemptedWorkloads": "workloads that make room for it are ending",
    "WaitingForPodsReady": "pods that were admitted before it are starting",
    "PendingEvaluation": "it hasn't been looked at yet",
    "TopologyPlacementFailed": "no nodes close enough together are free",
    "Suspended": "the cluster's administrator has stopped the queue",
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a pod waits for at the gate, in words for its owner.

    ``position`` counts from 1 in its queue, None where it is not known. ``never``: it can't be admitted as it is, so the
    session has to end with these words.
    """

    words: str
    position: int | None = None
    never: bool = False


def labels(queue: str) -> dict[str, str]:
    """Return the labels of a pod that is to wait in this LocalQueue of its namespace."""
    return {QUEUE_LABEL: queue}


def is_gated(pod: Manifest) -> bool:
    """Return whether Kueue holds this pod back."""
    return any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates") or ())


def waiting(pod: Manifest, workloads: Sequence[Manifest], pending: Manifest | None = None) -> Waiting | None:
    """Return what the pod waits for; None once it is let through, or if Kueue never held it.

    ``workloads`` are those of its namespace; ``pending`` is the PendingWorkloadsSummary of its LocalQueue, None where
    the API does not answer.
    """
    if not is_gated(pod):
        return None
    queue = pod["metadata"]["labels"][QUEUE_LABEL]
    workload = next((w for w in workloads if _is_of(w, pod)), None)
    position = _position(pod, pending)
    said = _condition(workload or {}, "QuotaReserved") or {}
    if said.get("status") == "True":
        return Waiting(f"The cluster's queue {queue} has quota for it, and checks it.", position)
    reason, message = str(said.get("reason", "")), str(said.get("message", ""))
    told = f" ({message})" if message else ""
    if _exceeds(reason, message):
        return Waiting(f"The cluster's queue {queue} never has this much: choose less{told}.", never=True)
    place = f"Number {position} in" if position is not None else "Waits in"
    why = _WORDS.get(reason)
    if why is None:
        return Waiting(f"{place} the cluster's queue {queue}{told}.", position)
    return Waiting(f"{place} the cluster's queue {queue}: {why}{told}.", position)


def preempted(pod: Manifest) -> str | None:
    """Return Kueue's words if it has ended this pod: it is to be queued again, by us. None if it has not."""
    stopped = _condition(pod, "TerminationTarget")
    if stopped is None or stopped.get("status") != "True" or stopped.get("reason") != "StoppedByKueue":
        return None
    return str(stopped.get("message") or "Kueue gives no reason")


def _exceeds(reason: str, message: str) -> bool:
    if reason == "ExceedsMaxQuota":
        return True
    # Of several flavors one may still have room later: that is said beside the one that never has.
    return (
        reason in {"Pending", "Inadmissible"}
        and "maximum capacity" in message
        and "insufficient unused quota" not in message
    )


def _is_of(manifest: Manifest, pod: Manifest) -> bool:
    uid = pod["metadata"]["uid"]
    return any(owner["uid"] == uid for owner in manifest["metadata"].get("ownerReferences") or ())


def _position(pod: Manifest, pending: Manifest | None) -> int | None:
    places = (item for item in (pending or {}).get("items") or () if _is_of(item, pod))
    # The first place is 0, and is written.
    return next((item["positionInLocalQueue"] + 1 for item in places), None)


def _condition(manifest: Manifest, kind: str) -> Manifest | None:
    conditions = (manifest.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind), None)
