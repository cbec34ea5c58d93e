"""Hypothesis strategies for worlds: nodes, requests, queues."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from simulator import NOW_S, World

from fgpu_scheduler.core.model import Device, Node, NodeState, Request, Session, SessionState
from fgpu_scheduler.core.placement import best_fit, free, place

GROUPS = ("lab", "class")
MODELS = ("m", "m", "m", "other")
STATES = (
    SessionState.SCHEDULED,
    SessionState.PREPARING,
    SessionState.PULLING,
    SessionState.RUNNING,
    SessionState.RUNNING,
    SessionState.TERMINATING,
)


@st.composite
def nodes(draw: st.DrawFn, *, at_least: int = 0) -> tuple[Node, ...]:
    """Up to four nodes of up to four GPUs, in two groups, of several capacities, some not ready."""
    found = []
    for number in range(draw(st.integers(at_least, 4))):
        node_id = f"n{number}"
        memory_mib = draw(st.sampled_from((8192, 16160, 24564, 81559)))
        capacity = draw(st.sampled_from((500, 1000, 1000, 2000, 5000)))
        count = draw(st.integers(1, 4))
        most = draw(st.sampled_from((20, 20, 2)))
        devices = tuple(
            Device(
                f"GPU-{node_id}-{i}",
                node_id,
                i,
                draw(st.sampled_from(MODELS)),
                memory_mib,
                capacity,
                max_shares=most,
            )
            for i in range(count)
        )
        state = draw(st.sampled_from((NodeState.READY,) * 4 + (NodeState.CORDONED, NodeState.LOST)))
        cpu = 1000 * draw(st.integers(1, 16))
        group = draw(st.sampled_from(GROUPS))
        found.append(Node(node_id, group, cpu, 1024 * draw(st.integers(1, 16)), devices, state))
    return tuple(found)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Fractions, whole devices, explicit amounts (some fit nowhere), no GPU; some for one model."""
    fgpu = draw(st.sampled_from((1, 50, 100, 300, 400, 500, 900, 1000, 1500, 2000, 4000, 5000)))
    gpu_memory = percent = None
    if draw(st.sampled_from((False, False, True))):
        fgpu = draw(st.sampled_from((0,) * 9 + (100,)))
        gpu_memory = draw(st.sampled_from((None, 128, 1024, 4096, 5120, 8192, 16160, 24564, 100)))
        percent = draw(st.sampled_from((None, None, 5, 30, 50, 100, 7)))
    return Request(
        user=draw(st.sampled_from("abcdefgh")),
        server_name="",
        image="image",
        resource_group=draw(st.sampled_from(GROUPS)),
        fgpu_milli=fgpu,
        cpu_milli=draw(st.sampled_from((500, 1000, 3000))),
        memory_mib=draw(st.sampled_from((512, 1024, 5000))),
        gpu_memory_mib=gpu_memory,
        compute_percent=percent,
        gpu_models=draw(st.sampled_from(((),) * 4 + (("m",), ("other",), ("m", "other"), ("other", "m")))),
    )


@st.composite
def shrunk(draw: st.DrawFn, node: Node) -> Node:
    """The node, or the node with less of a resource than its sessions may hold."""
    what = draw(st.sampled_from((None,) * 6 + ("cpu", "memory", "gpu memory", "devices")))
    if what == "gpu memory":
        return replace(
            node, devices=tuple(replace(d, memory_mib=d.memory_mib // 4 // 128 * 128) for d in node.devices)
        )
    if what == "devices":
        return replace(node, devices=node.devices[1:])
    cpu_milli = node.cpu_milli // 4 if what == "cpu" else node.cpu_milli
    return replace(node, cpu_milli=cpu_milli, memory_mib=512 if what == "memory" else node.memory_mib)


@st.composite
def worlds(draw: st.DrawFn, *, most: int = 14) -> World:
    """Nodes with running and pending sessions; afterwards the nodes may shrink or get another capacity."""
    lab = World(now_s=NOW_S, version=1, nodes=draw(nodes()))
    for session_id in range(1, 1 + draw(st.integers(0, most))):
        asked = draw(requests())
        where = None
        if draw(st.booleans()) and (found := place(asked, free(lab), score=best_fit)) is not None:
            where = found[0]
        ago_s = draw(st.integers(0, 9000))
        state = draw(st.sampled_from(STATES)) if where else SessionState.PENDING
        new = Session(
            session_id,
            asked,
            state,
            submitted_at_s=NOW_S - ago_s,
            held=where is None and draw(st.sampled_from((False, False, True))),
            attempt=1 if where else 0,
            placement=where,
            started_at_s=NOW_S - ago_s if state is SessionState.RUNNING else None,
        )
        lab = World(NOW_S, 1, lab.nodes, (*lab.sessions, new))
    lab = replace(lab, nodes=tuple(draw(shrunk(node)) for node in lab.nodes))
    for device in [d.uuid for n in lab.nodes for d in n.devices]:
        lab = lab.cordoned_gpu(device) if draw(st.sampled_from((False,) * 5 + (True,))) else lab
    return lab.unit(draw(st.sampled_from(("1", "2", "5")))) if draw(st.booleans()) else lab
