"""End causes, start troubles and their words from a pod's status."""

from __future__ import annotations

from typing import Any

import pytest

from fgpu_scheduler import EndCause
from fgpuspawner.engines.kubernetes.endings import (
    GONE,
    holds_nothing,
    how_it_ended,
    is_up,
    why_not_up,
)


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    limits = {"limits": {"memory": "3000Mi"}}
    return {
        "metadata": {"name": "fgpu-lab-7-1", **metadata},
        "spec": {
            "initContainers": [{"name": "mesh", "image": "mesh:1"}],
            "containers": [{"name": "notebook", "image": "python:3", "resources": limits}],
        },
        "status": status,
    }


def session(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "notebook", "state": state}]}


def mesh(**state: Any) -> dict[str, Any]:
    """Return the status of an administrator's init container."""
    return {"initContainerStatuses": [{"name": "mesh", "state": state}]}


def test_running_pod_has_not_ended() -> None:
    running = pod({"phase": "Running", **session(running={"startedAt": "now"})})
    assert how_it_ended(running) is None
    assert why_not_up(running) is None
    assert is_up(running)


@pytest.mark.parametrize(
    ("status", "cause", "words"),
    [
        (
            session(terminated={"exitCode": 137, "reason": "OOMKilled"}),
            EndCause.OOM,
            "more than its 3000 MiB of memory",
        ),
        (
            session(terminated={"exitCode": 3, "reason": "Error", "message": "a\nno luck\n\n"}),
            EndCause.EXITED,
            "status 3; its last words: no luck",
        ),
        (
            session(terminated={"exitCode": 3, "reason": "Error", "message": "no log-in with token=abcdef"}),
            EndCause.EXITED,
            "its last words: no log-in with token=[masked]",
        ),
        (session(terminated={"exitCode": 0, "reason": "Completed"}), EndCause.EXITED, "status 0"),
        (
            session(terminated={"exitCode": 128, "reason": "StartError", "message": "no such file"}),
            EndCause.LAUNCH_FAILED,
            "could not be started: no such file",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
            EndCause.PREEMPTED,
            "evicted the session: The node was low on resource",
        ),
        ({"phase": "Failed", "reason": "NodeShutdown"}, EndCause.NODE_LOST, "node was shut down"),
        (
            {"phase": "Failed", "reason": "OutOfcpu"},
            EndCause.LAUNCH_FAILED,
            "too little left for the session (OutOfcpu)",
        ),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, EndCause.LAUNCH_FAILED, "did not admit"),
        (
            {
                "phase": "Failed",
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
                ],
                **session(terminated={"exitCode": 143, "reason": "Error"}),
            },
            EndCause.PREEMPTED,
            "a more important pod",
        ),
        (
            {
                "phase": "Failed",
                **mesh(terminated={"exitCode": 3, "message": "iptables: Permission denied"}),
                **session(waiting={"reason": "PodInitializing"}),
            },
            EndCause.LAUNCH_FAILED,
            "init container mesh failed: iptables: Permission denied",
        ),
        ({"phase": "Failed"}, EndCause.EXITED, "it does not say why"),
    ],
)
def test_end_has_its_cause_and_words(status: dict[str, Any], cause: EndCause, words: str) -> None:
    found = how_it_ended(pod(status))
    assert found is not None
    assert found.cause is cause
    assert words in found.message


def test_deleted_pod_has_ended() -> None:
    going = pod({"phase": "Running", **session(running={})}, deletionTimestamp="2026-01-01T00:00:00Z")
    found = how_it_ended(going)
    assert found is not None
    assert (found.cause, found.message) == (GONE.cause, GONE.message)
    ended = pod(session(terminated={"exitCode": 0}), deletionTimestamp="2026-01-01T00:00:00Z")
    found = how_it_ended(ended)
    assert found is not None
    assert found.message == GONE.message


UNBOUND = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 1 Insufficient cpu.",
}
MISSING = {"reason": "ErrImagePull", "message": "not found"}


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        *(
            (
                session(waiting={"reason": reason, "message": "not found"}),
                "image python:3 cannot be had: not found",
            )
            for reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
        ),
        (mesh(waiting=MISSING), "image mesh:1 cannot be had: not found"),
        ({"conditions": [UNBOUND]}, f"the cluster does not give the place: {UNBOUND['message']} (may pass)"),
        (
            session(waiting={"reason": "CreateContainerConfigError", "message": "no secret"}),
            "the session's container could not be made: no secret (may pass)",
        ),
        (session(waiting={"reason": "RunContainerError"}), "the session's container could not be made"),
        *(
            (mesh(waiting={"reason": reason}), f"container mesh does not start ({reason}) (may pass)")
            for reason in ("CrashLoopBackOff", "PostStartHookError", "SignatureValidationFailed")
        ),
        (session(waiting={"reason": "ContainerCreating"}), None),
        (session(waiting={"reason": "PodInitializing"}), None),
    ],
)
def test_start_trouble_is_named_and_some_may_pass(status: dict[str, Any], trouble: str | None) -> None:
    found = why_not_up(pod({"phase": "Pending", **status}))
    assert (found and found.message + (" (may pass)" if found.patience_s else "")) == trouble
    assert found is None or (found.cause is EndCause.PULL_FAILED) is ("cannot be had" in found.message)
    assert found is None or found.unbound is ("conditions" in status)


def test_messages_contain_no_terminal_commands() -> None:
    found = how_it_ended(pod(session(terminated={"exitCode": 1, "message": "\x1b[31mred"})))
    assert found is not None
    assert "\x1b" not in found.message


@pytest.mark.parametrize(
    ("status", "nothing"),
    [
        ({"phase": "Succeeded", **session(terminated={"exitCode": 0})}, True),
        ({"phase": "Failed", **session(terminated={"exitCode": 1})}, True),
        ({"phase": "Running", **session(terminated={"exitCode": 1})}, False),
        ({"phase": "Failed", "reason": "NodeLost", **session(running={})}, False),
        ({"phase": "Failed", "reason": "Evicted"}, False),
        ({}, False),
    ],
)
def test_pod_holds_nothing_once_its_node_reports_the_end(status: dict[str, Any], nothing: bool) -> None:
    assert holds_nothing(pod(status)) is nothing
