"""What a pod waits for at Kueue's gate is told with its place; what can never be admitted is told as that.

The answers are as Kueue gives them: its documentation's, its tests', and messages that people have posted.
"""

from __future__ import annotations

from typing import Any

import pytest

from fgpuspawner.engines.kubernetes.kueue import Waiting, is_gated, labels, preempted, waiting

UID = "5863cf0e-b0e7-43bf-a445-f41fa1abedfa"
UNUSED = (
    "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor hami-t4, 1 more"
    " needed, insufficient unused quota for nvidia.com/total-gpucores in flavor hami-t4, 50 more needed"
)
TOO_MUCH = (
    "couldn't assign flavors to pod set one: insufficient quota for cpu in flavor default, previously considered podsets"
    " requests (0) + current podset request (10) > maximum capacity (8)"
)
TOO_MUCH_OF_ONE = (
    "couldn't assign flavors to pod set main: insufficient quota for nvidia.com/gpu in flavor ml.m5.12xlarge, request >"
    " maximum capacity (8 > 0), insufficient unused quota for nvidia.com/gpu in flavor ml.g5.8xlarge, 1 more needed"
)


def pod(*, gated: bool = True, conditions: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {
        "metadata": {"name": "fgpu-lab-7-1", "uid": UID, "labels": labels("team-a")},
        "spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]} if gated else {},
        "status": {"conditions": conditions or []},
    }


def workload(reason: str, message: str, *, status: str = "False", uid: str = UID) -> dict[str, Any]:
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "fgpu-lab-7-1", "uid": uid, "controller": True}
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": "pod-fgpu-lab-7-1-a91e8", "ownerReferences": [owner]},
        "status": {
            "conditions": [
                {"type": "QuotaReserved", "status": status, "reason": reason, "message": message},
                {"type": "Admitted", "status": "False", "reason": "NoReservation", "message": "..."},
            ]
        },
    }


def summary(*uids: str) -> dict[str, Any]:
    return {
        "kind": "PendingWorkloadsSummary",
        "apiVersion": "visibility.kueue.x-k8s.io/v1beta1",
        "metadata": {"creationTimestamp": None},
        "items": [
            {
                "metadata": {
                    "name": f"pod-{place}-8d56e",
                    "namespace": "jupyter",
                    "ownerReferences": [
                        {"apiVersion": "v1", "kind": "Pod", "name": f"pod-{place}", "uid": uid}
                    ],
                },
                "priority": 0,
                "localQueueName": "team-a",
                "positionInClusterQueue": place + 4,
                "positionInLocalQueue": place,
            }
            for place, uid in enumerate(uids)
        ],
    }


def test_the_label_names_the_queue() -> None:
    assert labels("team-a") == {"kueue.x-k8s.io/queue-name": "team-a"}


def test_a_pod_without_kueues_gate_does_not_wait_for_it() -> None:
    free = pod(gated=False)
    free["spec"]["schedulingGates"] = [{"name": "example.com/other"}]
    assert not is_gated(free)
    assert waiting(free, [workload("WaitingForQuota", UNUSED)], summary(UID)) is None


def test_a_place_counts_from_one_in_the_queue_of_the_pod() -> None:
    found = waiting(pod(), [workload("WaitingForQuota", UNUSED)], summary("other-1", "other-2", UID))
    assert found == Waiting(
        f"Number 3 in the cluster's queue team-a: other workloads hold its quota ({UNUSED}).", position=3
    )
    first = waiting(pod(), [workload("WaitingForQuota", UNUSED)], summary(UID))
    assert first is not None
    assert first.position == 1


def test_without_the_visibility_api_the_place_is_unknown_and_not_zero() -> None:
    for pending in (None, summary("other-1")):
        found = waiting(pod(), [workload("WaitingForQuota", UNUSED)], pending)
        assert found == Waiting(
            f"Waits in the cluster's queue team-a: other workloads hold its quota ({UNUSED})."
        )


def test_before_kueue_has_made_a_workload_it_waits_and_nothing_is_made_up() -> None:
    assert waiting(pod(), [workload("ExceedsMaxQuota", TOO_MUCH, uid="other-1")]) == Waiting(
        "Waits in the cluster's queue team-a."
    )


@pytest.mark.parametrize("reason", ["ExceedsMaxQuota", "Pending", "Inadmissible"])
def test_more_than_the_queue_can_ever_have_is_never_admitted(reason: str) -> None:
    found = waiting(pod(), [workload(reason, TOO_MUCH)], summary(UID))
    assert found == Waiting(
        f"The cluster's queue team-a never has this much: choose less ({TOO_MUCH}).", never=True
    )


@pytest.mark.parametrize("message", [UNUSED, TOO_MUCH_OF_ONE])
def test_what_may_have_room_later_waits(message: str) -> None:
    found = waiting(pod(), [workload("Pending", message)], summary(UID))
    assert found == Waiting(f"Number 1 in the cluster's queue team-a ({message}).", position=1)


def test_a_queue_that_does_not_exist_is_told_in_kueues_words() -> None:
    found = waiting(pod(), [workload("Inadmissible", "LocalQueue team-a doesn't exist")])
    assert found == Waiting("Waits in the cluster's queue team-a (LocalQueue team-a doesn't exist).")


def test_quota_that_is_reserved_is_not_yet_admission() -> None:
    reserved = workload("QuotaReserved", "Quota reserved in ClusterQueue gpu", status="True")
    assert waiting(pod(), [reserved]) == Waiting(
        "The cluster's queue team-a has quota for it, and checks it."
    )


def test_a_pod_that_kueue_has_ended_says_so_and_no_other_does() -> None:
    words = "Preempted to accommodate a higher priority Workload"
    target = {"type": "TerminationTarget", "status": "True", "reason": "StoppedByKueue", "message": words}
    assert preempted(pod(gated=False, conditions=[target])) == words
    assert preempted(pod(gated=False, conditions=[{**target, "status": "False"}])) is None
    assert preempted(pod(gated=False, conditions=[{**target, "reason": "PreemptionByScheduler"}])) is None
    assert preempted(pod(gated=False)) is None
