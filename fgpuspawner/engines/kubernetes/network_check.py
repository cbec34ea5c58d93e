"""Whether sessions' pods are kept apart on the network, tried with two small pods that are removed afterwards.

They are a session's pod as it would be made now, with its labels, so that the same network policies hold for them: one
listens, the other calls it, and the cloud's metadata. No right is needed that the Hub has not.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from signal import SIGTERM
from typing import Any

from fgpuspawner.concurrency.waiting import to_the_end
from fgpuspawner.engines import marks
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.kubernetes import endings
from fgpuspawner.engines.kubernetes.api import Api, Manifest, Refused
from fgpuspawner.engines.kubernetes.files import INIT
from fgpuspawner.engines.kubernetes.pods import CONTAINER

LABEL = "fgpu.check"
"""On both pods, in place of what a Hub knows its own sessions by."""
METADATA = "169.254.169.254"
"""Where clouds tell a machine its own credentials."""
PORT = 8888
"""A session's own: policies may be for this one."""
CALLS_FOR_S = 4
PATIENCE_S = 120
"""Until both have done what they are there for, an image that has to be fetched included."""
GONE_WITHIN_S = 40
LOOK_EVERY_S = 0.5
OURS = (
    "fgpu.user",
    "fgpu.server",
    "fgpu.image",
    marks.NODE,
    marks.INSTALLATION,
    marks.SESSION,
    marks.ATTEMPT,
)

PYTHON = 'exec "$(command -v python3 || command -v python)" -c "$0" "$@"'
LISTENER = """
import signal, socket, sys
listening = socket.create_server(("", int(sys.argv[1])), backlog=8)
signal.pause()
"""
CALLER = """
import json, socket, sys
def answers(address, port, seconds):
    try:
        socket.create_connection((address, int(port)), float(seconds)).close()
        return True
    except OSError:
        return False
other, port, metadata, seconds = sys.argv[1:]
said = {"other": answers(other, port, seconds), "metadata": answers(metadata, 80, seconds)}
open("/dev/termination-log", "w").write(json.dumps(said))
"""


class NotTried(Exception):
    """Nothing can be said; in words, what came in between."""


@dataclass(frozen=True, slots=True)
class Reached:
    """What a session's pod can call: another session's, the metadata of the cloud."""

    other: bool
    metadata: bool


def probe_pod(
    session: Manifest, *, name: str, node: str, program: str, words: Sequence[object]
) -> dict[str, Any]:
    """Return a session's pod on a node with this Python program in place of its server, and nothing of its user's."""
    pod: dict[str, Any] = copy.deepcopy(dict(session))
    found, spec = pod["metadata"], pod["spec"]
    found["name"] = name
    for key in ("labels", "annotations"):
        found[key] = {k: v for k, v in (found.get(key) or {}).items() if k not in OURS}
    found["labels"][LABEL] = "network"
    container = dict(spec["containers"][0])
    for key in ("envFrom", "volumeMounts", "lifecycle", "startupProbe", "livenessProbe", "workingDir"):
        container.pop(key, None)
    container["command"] = ["sh", "-c", PYTHON, program, *map(str, words)]
    container["args"] = []
    container["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    if program is LISTENER:
        # The node itself calls it, which no policy forbids: it listens for sure.
        container["readinessProbe"] = {"tcpSocket": {"port": PORT}, "periodSeconds": 1}
    affinity = dict(spec.get("affinity") or {})
    affinity["nodeAffinity"] = {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
            ]
        }
    }
    before = [c for c in spec.get("initContainers") or () if c["name"] != INIT and not c.get("volumeMounts")]
    spec |= {
        "containers": [container],
        "initContainers": before,
        "volumes": [],
        "affinity": affinity,
        # Also where whoever asks is killed.
        "activeDeadlineSeconds": PATIENCE_S + GONE_WITHIN_S,
        "terminationGracePeriodSeconds": 1,
    }
    return pod


async def tried(api: Api, path: str, session: Manifest, nodes: Sequence[str]) -> Reached:
    """Return what one session could reach, with pods on these nodes: the first, and the second if there is one.

    Raises:
        NotTried: that cannot be told.
    """
    name = f"fgpu-check-{secrets.token_hex(3)}"
    names = f"{name}-listens", f"{name}-calls"
    deadline = time.monotonic() + PATIENCE_S
    with _cancelled_by_sigterm():
        try:
            await _clear_earlier(api, path)
            listener = probe_pod(session, name=names[0], node=nodes[0], program=LISTENER, words=[PORT])
            await _make(api, path, listener)
            ready = await _until(api, path, names[0], _is_ready, deadline)
            address = endings.address_of(ready)
            words = [address, PORT, METADATA, CALLS_FOR_S]
            caller = probe_pod(session, name=names[1], node=nodes[-1], program=CALLER, words=words)
            await _make(api, path, caller)
            ended = await _until(api, path, names[1], _has_ended, deadline)
            return _told(ended)
        except (Refused, EngineSilent) as e:
            raise NotTried(str(e)) from e
        finally:
            await to_the_end(_removed(api, path, names))


async def _make(api: Api, path: str, pod: Manifest) -> None:
    await to_the_end(api.ask("POST", f"{path}/pods", body=dict(pod)))


async def _until(
    api: Api, path: str, name: str, is_so: Callable[[Manifest], bool], deadline: float
) -> Manifest:
    trouble = f"it was not ready within {PATIENCE_S} s"
    while time.monotonic() < deadline:
        pod = await api.ask("GET", f"{path}/pods/{name}")
        if is_so(pod):
            return pod
        ended = endings.how_it_ended(pod)
        if ended is not None:
            raise NotTried(f"the pod {name}: {ended.message}")
        found = endings.why_not_up(pod)
        if found is not None:
            trouble = found.message
            if not (found.unbound or found.unready):
                break
        await asyncio.sleep(LOOK_EVERY_S)
    raise NotTried(f"the pod {name}: {trouble}")


def _is_ready(pod: Manifest) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return bool(endings.address_of(pod)) and any(
        c.get("type") == "Ready" and c.get("status") == "True" for c in conditions
    )


def _has_ended(pod: Manifest) -> bool:
    return "message" in _ended(pod)


def _ended(pod: Manifest) -> Mapping[str, Any]:
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        if one.get("name") == CONTAINER:
            return dict((one.get("state") or {}).get("terminated") or {})
    return {}


def _told(pod: Manifest) -> Reached:
    """Return what the pod that calls has said."""
    message = str(_ended(pod).get("message"))
    try:
        said = json.loads(message)
        return Reached(said["other"] is True, said["metadata"] is True)
    except (ValueError, TypeError, KeyError):
        raise NotTried(f"a pod said: {message[:200]!r}") from None


async def _removed(api: Api, path: str, names: Sequence[str]) -> None:
    """Remove both, and wait until they are gone."""
    until = time.monotonic() + GONE_WITHIN_S
    body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 1}
    for name in names:
        while time.monotonic() < until:
            try:
                await api.ask("DELETE", f"{path}/pods/{name}", body=body)
            except Refused:
                break
            except EngineSilent:
                pass
            await asyncio.sleep(LOOK_EVERY_S)


async def _clear_earlier(api: Api, path: str) -> None:
    """Remove what a check has left that was killed; its pods have ended by themselves."""
    left = await api.listed(f"{path}/pods", (("labelSelector", LABEL),), keep=dict)
    over = [pod for pod in left if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")]
    await _removed(api, path, [str(pod["metadata"]["name"]) for pod in over])


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """Have SIGTERM cancel what runs here, as Ctrl-C does, where this is the main thread."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    try:
        loop.add_signal_handler(SIGTERM, task.cancel)
    except (RuntimeError, ValueError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(SIGTERM)
