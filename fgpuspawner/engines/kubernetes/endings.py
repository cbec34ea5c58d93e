"""A pod's status translated to end causes and to words for the owner of its session. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fgpu_scheduler import EndCause
from fgpuspawner.engines.base import Ended
from fgpuspawner.engines.kubernetes.api import Manifest
from fgpuspawner.engines.kubernetes.dialects.base import CONTAINER
from fgpuspawner.engines.kubernetes.files import INIT

KILLED = 128 + signal.SIGKILL
NO_IMAGE = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
)
NOT_MADE = ("CreateContainerError", "RunContainerError", "CreatePodSandboxError")
BEGINS = ("ContainerCreating", "PodInitializing")
NO_SECRET = "CreateContainerConfigError"
"""A pod also has this reason while its secret is not there yet."""
BY_NODE: Mapping[str, tuple[EndCause, str]] = {
    "Evicted": (EndCause.PREEMPTED, "the cluster evicted the session"),
    "NodeShutdown": (EndCause.NODE_LOST, "the session's node was shut down"),
    "Terminated": (EndCause.NODE_LOST, "the session's node was shut down"),
    "Shutdown": (EndCause.NODE_LOST, "the session's node was shut down"),
    "NodeLost": (EndCause.NODE_LOST, "the session's node is lost"),
    "NodeAffinity": (EndCause.LAUNCH_FAILED, "the node takes no such session any more"),
    "UnexpectedAdmissionError": (EndCause.LAUNCH_FAILED, "the node did not admit the session"),
    "DeadlineExceeded": (EndCause.TIME_LIMIT, "the cluster's own time limit ended the session"),
    "Preempting": (EndCause.PREEMPTED, "the cluster ended the session for a more important pod"),
}
"""Reasons of a pod that has failed as a whole: why the cluster ended it."""
DISRUPTED: Mapping[str, tuple[EndCause, str]] = {
    "PreemptionByScheduler": (EndCause.PREEMPTED, "the cluster ended the session for a more important pod"),
    "DeletionByTaintManager": (EndCause.PREEMPTED, "the session's node was closed to it"),
    "EvictionByEvictionAPI": (EndCause.PREEMPTED, "the cluster evicted the session"),
    "DeletionByPodGC": (EndCause.NODE_LOST, "the session's node is gone"),
    "TerminationByKubelet": (EndCause.PREEMPTED, "the session's node ended it"),
}
"""Reasons of the condition DisruptionTarget."""
LONGEST_WORDS = 300
GONE = Ended(0, EndCause.EXITED, "the session's pod was removed outside JupyterHub")
NODE_GONE = Ended(0, EndCause.NODE_LOST, "the session's node was removed from the cluster")


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod does not come up. ``unbound``: it has no node, and may get one; ``unready``: it may pass in seconds."""

    cause: EndCause
    message: str
    unbound: bool = False
    unready: bool = False


def how_it_ended(pod: Manifest) -> Ended | None:
    """Return how a pod's session ended; None while it runs, or may still begin to."""
    status, found = pod.get("status") or {}, pod["metadata"]
    ended = _state(status, CONTAINER).get("terminated")
    if ended is not None:
        return _of_container(pod, ended)
    if status.get("phase") == "Failed":
        reason = str(status.get("reason") or "")
        cause, words = _by_whom(status) or BY_NODE.get(reason) or _out_of(reason)
        return (None if reason else _of_init(status)) or Ended(
            KILLED, cause, _with(words, status.get("message"))
        )
    if status.get("phase") == "Succeeded":
        return Ended(0, EndCause.EXITED, "the session's server ended with status 0")
    if found.get("deletionTimestamp"):
        cause, words = _by_whom(status) or (EndCause.EXITED, GONE.message)
        return Ended(KILLED, cause, words)
    return None


def has_ended(pod: Manifest) -> bool:
    """Return whether a pod's node, or the cluster for it, says that the session's processes have ended."""
    status = pod.get("status") or {}
    return status.get("phase") in ("Succeeded", "Failed") or "terminated" in _state(status, CONTAINER)


def _of_container(pod: Manifest, ended: Mapping[str, Any]) -> Ended:
    status, code = pod["status"], int(ended.get("exitCode", 0))
    reason = str(status.get("reason") or "")
    by = _by_whom(status) or BY_NODE.get(reason)
    if by is not None:
        return Ended(code, by[0], _with(by[1], status.get("message")))
    if ended.get("reason") == "OOMKilled":
        limit = _memory_of(pod)
        return Ended(code, EndCause.OOM, f"the session used more than its {limit} of memory and was ended")
    if pod["metadata"].get("deletionTimestamp"):
        return Ended(code, EndCause.EXITED, GONE.message)
    message = f"the session's server ended with status {code}"
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return Ended(
            code,
            EndCause.LAUNCH_FAILED,
            _with("the session's server could not be started", ended.get("message")),
        )
    last = [line.strip() for line in str(ended.get("message") or "").splitlines() if line.strip()]
    return Ended(
        code,
        EndCause.EXITED,
        f"{message}; its last words: {_printable(last[-1], 200)}" if code and last else message,
    )


def why_not_up(pod: Manifest) -> Trouble | None:
    """Return why a pod that has not ended does not come up; None while nothing speaks against it."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            words = _with("the cluster does not give the place", condition.get("message"))
            return Trouble(EndCause.LAUNCH_FAILED, words, unbound=True)
    for name, state in _states(status):
        waiting = state.get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), waiting.get("message")
        if reason in NO_IMAGE:
            return Trouble(EndCause.PULL_FAILED, _with(f"image {_image(pod, name)} cannot be had", message))
        if reason in NOT_MADE or reason == NO_SECRET:
            words = _with("the session's container could not be made", message)
            return Trouble(EndCause.LAUNCH_FAILED, words, unready=reason == NO_SECRET)
        if reason and reason not in BEGINS:
            words = _with(f"container {name} does not start ({reason})", message)
            return Trouble(EndCause.LAUNCH_FAILED, words, unready=True)
    return None


def was_refused(pod: Manifest) -> bool:
    """Return whether the node itself refused a pod that the cluster had given it: something else was faster."""
    reason = str((pod.get("status") or {}).get("reason") or "")
    return reason.startswith("OutOf") or reason in ("UnexpectedAdmissionError", "NodeAffinity")


def is_up(pod: Manifest) -> bool:
    """Return whether the session's container runs, or has run."""
    state = _state(pod.get("status") or {}, CONTAINER)
    return bool(state.get("running") or state.get("terminated"))


def is_coming(pod: Manifest) -> bool:
    """Return whether the session's container is up, or nothing that runs before it is left: its node starts it now."""
    status = pod.get("status") or {}
    before = [(one.get("state") or {}).get("terminated") for one in status.get("initContainerStatuses") or ()]
    return is_up(pod) or (bool(before) and all(one is not None and not one.get("exitCode") for one in before))


def is_running(pod: Manifest) -> bool:
    """Return whether the session's container runs, as its node said last."""
    return bool(_state(pod.get("status") or {}, CONTAINER).get("running"))


def holds_nothing(pod: Manifest) -> bool:
    """Return whether all of a pod's processes have ended, as its node says; the pod itself may be there for a while."""
    status = pod.get("status") or {}
    return status.get("phase") in ("Succeeded", "Failed") and "terminated" in _state(status, CONTAINER)


def nothing_runs(pod: Manifest) -> bool:
    """Return whether the session's container has not begun and no other container runs, as their node said last."""
    states = _states(pod.get("status") or {})
    begun = any(name == CONTAINER and "waiting" not in state for name, state in states)
    return not begun and not any("running" in state for _, state in states)


def address_of(pod: Manifest) -> str:
    """Return the pod's IP address; empty where it has none yet."""
    return str((pod.get("status") or {}).get("podIP") or "")


def _state(status: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return dict(_states(status)).get(name, {})


def _states(status: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and states of all containers, those that run before the others first."""
    statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return [(str(one.get("name")), one.get("state") or {}) for one in statuses]


def _by_whom(status: Mapping[str, Any]) -> tuple[EndCause, str] | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = str(condition.get("reason") or "")
            return DISRUPTED.get(reason) or (EndCause.PREEMPTED, f"the cluster ended the session ({reason})")
    return None


def _out_of(reason: str) -> tuple[EndCause, str]:
    if reason.startswith("OutOf"):
        return EndCause.LAUNCH_FAILED, f"the node had too little left for the session ({reason})"
    return EndCause.EXITED, f"the cluster ended the session ({reason or 'it does not say why'})"


def _of_init(status: Mapping[str, Any]) -> Ended | None:
    """Return how a container failed that runs before the session's, ours or an administrator's; None if none did."""
    own = "the session's files could not be put into its pod"
    before = {one.get("name") for one in status.get("initContainerStatuses") or ()}
    for name, state in _states(status):
        ended = state.get("terminated") or {}
        if name in before and ended.get("exitCode"):
            words = own if name == INIT else f"init container {name} failed"
            return Ended(int(ended["exitCode"]), EndCause.LAUNCH_FAILED, _with(words, ended.get("message")))
    return None


def _image(pod: Manifest, name: str) -> str:
    spec = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    return next((str(c.get("image")) for c in containers if c.get("name") == name), "")


def _memory_of(pod: Manifest) -> str:
    for container in pod["spec"]["containers"]:
        if container.get("name") == CONTAINER:
            limit = str(((container.get("resources") or {}).get("limits") or {}).get("memory", ""))
            return f"{limit[:-2]} MiB" if limit.endswith("Mi") else limit
    return "limit"


def _with(words: str, message: object) -> str:
    said = _printable(" ".join(str(message or "").split()), LONGEST_WORDS)
    return f"{words}: {said}" if said else words


def _printable(text: str, most: int) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs())[:most]
