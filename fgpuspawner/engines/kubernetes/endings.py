"""A pod's status as an end cause, a start trouble, and words for the session's owner. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fgpu_scheduler import EndCause
from fgpuspawner.engines.base import LAST_WORDS, Ended
from fgpuspawner.engines.kubernetes.dialects.base import CONTAINER, Manifest
from fgpuspawner.text.logs import shown_lines

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
"""A pod also has this reason while its secret does not exist yet."""
EVICTED = (EndCause.PREEMPTED, "the cluster evicted the session")
GAVE_WAY = (EndCause.PREEMPTED, "the cluster ended the session for a more important pod")
SHUT_DOWN = (EndCause.NODE_LOST, "the session's node was shut down")
BY_CLUSTER: Mapping[str, tuple[EndCause, str]] = {
    "Evicted": EVICTED,
    "EvictionByEvictionAPI": EVICTED,
    "Preempting": GAVE_WAY,
    "PreemptionByScheduler": GAVE_WAY,
    "DeletionByTaintManager": (EndCause.PREEMPTED, "the session's node was closed to it"),
    "TerminationByKubelet": (EndCause.PREEMPTED, "the session's node ended it"),
    "NodeShutdown": SHUT_DOWN,
    "Terminated": SHUT_DOWN,
    "Shutdown": SHUT_DOWN,
    "NodeLost": (EndCause.NODE_LOST, "the session's node is lost"),
    "DeletionByPodGC": (EndCause.NODE_LOST, "the session's node is gone"),
    "NodeAffinity": (EndCause.LAUNCH_FAILED, "the node no longer takes such a session"),
    "UnexpectedAdmissionError": (EndCause.LAUNCH_FAILED, "the node did not admit the session"),
    "DeadlineExceeded": (EndCause.TIME_LIMIT, "the cluster's own time limit ended the session"),
}
"""By the reason of a failed pod, or of its condition DisruptionTarget."""
LONGEST_WORDS = 300
GONE = Ended(0, EndCause.EXITED, "the session's pod was removed outside JupyterHub")
NODE_GONE = Ended(0, EndCause.NODE_LOST, "the session's node was removed from the cluster")
UNBOUND_FOR_S = 30.0
"""How long the cluster may take to bind a pod to its session's node."""
UNREADY_FOR_S = 10.0


@dataclass(frozen=True, slots=True)
class StartTrouble:
    """Why a pod does not come up. It may pass within ``patience_s``. ``unbound``: the pod has no node."""

    cause: EndCause
    message: str
    patience_s: float = 0.0
    unbound: bool = False


def how_it_ended(pod: Manifest) -> Ended | None:
    """Return how a pod's session ended; None while it runs, or may still begin to."""
    status, ended = _status(pod), _state(pod).get("terminated")
    if ended is not None:
        return _of_container(pod, ended)
    if status.get("phase") == "Failed":
        reason = str(status.get("reason") or "")
        cause, words = _by_cluster(status) or _out_of(reason)
        by_cluster = Ended(KILLED, cause, _with(words, status.get("message")))
        return by_cluster if reason else _of_init(pod) or by_cluster
    if status.get("phase") == "Succeeded":
        return Ended(0, EndCause.EXITED, "the session's server ended with status 0")
    if pod["metadata"].get("deletionTimestamp"):
        return Ended(KILLED, *(_disruption(status) or (EndCause.EXITED, GONE.message)))
    return None


def has_ended(pod: Manifest) -> bool:
    """Return whether the pod's node, or the cluster for it, reports that the session's processes have ended."""
    return _status(pod).get("phase") in ("Succeeded", "Failed") or "terminated" in _state(pod)


def _of_container(pod: Manifest, ended: Mapping[str, Any]) -> Ended:
    status, code, said = _status(pod), int(ended.get("exitCode", 0)), str(ended.get("message") or "")
    by = _by_cluster(status)
    if by is not None:
        return Ended(code, by[0], _with(by[1], status.get("message")))
    if ended.get("reason") == "OOMKilled":
        limit = _memory_of(pod)
        return Ended(code, EndCause.OOM, f"the session used more than its {limit} of memory and was ended")
    if pod["metadata"].get("deletionTimestamp"):
        return Ended(code, EndCause.EXITED, GONE.message)
    if ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return Ended(code, EndCause.LAUNCH_FAILED, _with("the session's server could not be started", said))
    message = f"the session's server ended with status {code}"
    last = shown_lines(said.encode(), most=1)
    if code and last:
        message += f"{LAST_WORDS}{last[0].strip()[:200]}"
    return Ended(code, EndCause.EXITED, message)


def why_not_up(pod: Manifest) -> StartTrouble | None:
    """Return why a pod that has not ended does not come up; None if no trouble is reported."""
    for condition in _status(pod).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            words = _with("the cluster does not give the place", condition.get("message"))
            return StartTrouble(EndCause.LAUNCH_FAILED, words, UNBOUND_FOR_S, unbound=True)
    for name, state in _states(pod):
        waiting = state.get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), waiting.get("message")
        if reason in NO_IMAGE:
            words = _with(f"image {_container(pod, name).get('image')} cannot be had", message)
            return StartTrouble(EndCause.PULL_FAILED, words)
        if reason in NOT_MADE or reason == NO_SECRET:
            words = _with("the session's container could not be made", message)
            return StartTrouble(EndCause.LAUNCH_FAILED, words, UNREADY_FOR_S if reason == NO_SECRET else 0.0)
        if reason and reason not in BEGINS:
            words = _with(f"container {name} does not start ({reason})", message)
            return StartTrouble(EndCause.LAUNCH_FAILED, words, UNREADY_FOR_S)
    return None


def was_refused(pod: Manifest) -> bool:
    """Return whether the node refused a pod that the scheduler had bound to it: another pod was faster."""
    reason = str(_status(pod).get("reason") or "")
    return reason.startswith("OutOf") or reason in ("UnexpectedAdmissionError", "NodeAffinity")


def is_up(pod: Manifest) -> bool:
    """Return whether the session's container runs, or has run."""
    return bool(_state(pod).keys() & {"running", "terminated"})


def is_running(pod: Manifest) -> bool:
    """Return whether the session's container runs, by its node's last report."""
    return bool(_state(pod).get("running"))


def holds_nothing(pod: Manifest) -> bool:
    """Return whether all of a pod's processes have ended, by its node's report; the object may remain for a while."""
    return _status(pod).get("phase") in ("Succeeded", "Failed") and "terminated" in _state(pod)


def nothing_runs(pod: Manifest) -> bool:
    """Return whether the session's container has not begun and no other one runs, by the node's last report."""
    begun = any(name == CONTAINER and "waiting" not in state for name, state in _states(pod))
    return not begun and not any("running" in state for _, state in _states(pod))


def address_of(pod: Manifest) -> str:
    """Return the pod's IP address; empty if it has none yet."""
    return str(_status(pod).get("podIP") or "")


def _status(pod: Manifest) -> Mapping[str, Any]:
    return pod.get("status") or {}


def _state(pod: Manifest) -> Mapping[str, Any]:
    return dict(_states(pod)).get(CONTAINER, {})


def _states(pod: Manifest) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and states of all containers, init containers first."""
    status = _status(pod)
    statuses = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return [(str(one.get("name")), one.get("state") or {}) for one in statuses]


def _by_cluster(status: Mapping[str, Any]) -> tuple[EndCause, str] | None:
    return _disruption(status) or BY_CLUSTER.get(str(status.get("reason") or ""))


def _disruption(status: Mapping[str, Any]) -> tuple[EndCause, str] | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = str(condition.get("reason") or "")
            return BY_CLUSTER.get(reason) or (EndCause.PREEMPTED, f"the cluster ended the session ({reason})")
    return None


def _out_of(reason: str) -> tuple[EndCause, str]:
    if reason.startswith("OutOf"):
        return EndCause.LAUNCH_FAILED, f"the node had too little left for the session ({reason})"
    return EndCause.EXITED, f"the cluster ended the session ({reason or 'it does not say why'})"


def _of_init(pod: Manifest) -> Ended | None:
    """Return how an administrator's init container failed; None if none did."""
    for one in _status(pod).get("initContainerStatuses") or ():
        ended = (one.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            words = _with(f"init container {one.get('name')} failed", ended.get("message"))
            return Ended(int(ended["exitCode"]), EndCause.LAUNCH_FAILED, words)
    return None


def _container(pod: Manifest, name: str) -> Mapping[str, Any]:
    spec = pod.get("spec") or {}
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    return next((c for c in containers if c.get("name") == name), {})


def _memory_of(pod: Manifest) -> str:
    resources = _container(pod, CONTAINER).get("resources") or {}
    limit = str((resources.get("limits") or {}).get("memory", "limit"))
    return f"{limit[:-2]} MiB" if limit.endswith("Mi") else limit


def _with(words: str, message: object) -> str:
    said = shown_lines(" ".join(str(message or "").split()).encode(), most=1)
    return f"{words}: {said[0][:LONGEST_WORDS]}" if said else words
