"""A sample of a session's pod, as a configuration makes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from fgpu_scheduler import Device, Placement, Request, Session, SessionState, Share
from fgpuspawner.engines.base import LaunchSpec
from fgpuspawner.engines.kubernetes.api import Manifest
from fgpuspawner.engines.kubernetes.dialects import Dialect
from fgpuspawner.engines.kubernetes.files import carry
from fgpuspawner.engines.kubernetes.pods import PodOptions, made, tolerations
from fgpuspawner.images.model import Image
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.limits import Limits

GPU = "GPU-00000000-0000-0000-0000-000000000000"
IMAGE = Image("sample", "Sample", "python", "3", "3", "fgpuspawner/sample:1", enabled=True)


OptionsOf = Callable[[Session, Image], Awaitable[PodOptions]]
"""Returns what the configuration sets for a session's pod. It may raise anything: functions of the administrator run."""


async def sample_spec(options_of: OptionsOf) -> Manifest:
    """Return the spec of a session's pod without a node; it says which nodes take the pod."""
    spec = (await options_of(_session(), IMAGE)).manifest.get("spec") or {}
    return {**spec, "tolerations": tolerations(spec)}


def _session() -> Session:
    request = Request("sample", "", "sample", "default", 500, 100, 128)
    return Session(1, request, SessionState.PREPARING, 0)


async def sample_pod(
    options_of: OptionsOf,
    *,
    node: str = "sample",
    dialect: Dialect | None = None,
    image: str = "",
    gpu: str = GPU,
) -> Manifest:
    """Return a small session's pod, with half of a GPU, or a whole device, where a dialect is given.

    Raises what ``options_of`` raises.
    """
    model, memory_mib = "Tesla T4", 2048
    if dialect is not None and dialect.whole_only:
        model, memory_mib = "Tesla T4 MIG 1g.5gb", 4096
    share = Share(gpu, 500, memory_mib, 50)
    session = replace(_session(), placement=Placement(node, (share,)))
    own = replace(IMAGE, reference=image) if image else IMAGE
    # Without its place: what a session is told of its slice takes a Hub that runs.
    options = await options_of(replace(session, placement=None), own)
    spec = LaunchSpec(
        session,
        own,
        command=(),
        arguments=(),
        environment={},
        told={},
        prepared=Prepared("none", Limits(1, "none", ())),
        devices=(Device(gpu, node, 0, model, 4096, 1000),),
        folder=Path("/"),
        port=8888,
        options=options,
    )
    carried = carry(spec.prepared) if dialect is None or dialect.init_containers else None
    pod = made(spec, options, carried, installation="sample", node=node).pod
    if dialect is None:
        return pod
    return dialect.patch((share,), spec.devices, name=pod["metadata"]["name"]).applied(pod)
