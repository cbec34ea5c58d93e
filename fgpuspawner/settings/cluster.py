"""Which machines and GPUs there are, and who may use them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from traitlets import Bool, Dict, Integer, List, Unicode, Union

from fgpu_scheduler import (
    BadSettings,
    Device,
    FoundDevice,
    Node,
    NodeState,
    NvmlProbe,
    SimulatedProbe,
    parse_milli,
)
from fgpuspawner.settings.amounts import AmountSettings
from fgpuspawner.settings.nodes import (
    SIMULATED_MEMORY_MIB,
    MachineFacts,
    Spec,
    are_found_by_driver,
    check_node,
    gpus_of,
    is_elsewhere,
    this_machine,
)
from fgpuspawner.settings.traits import check_keys

DEFAULT_GROUP = "default"
NODE_KEYS = ("name", "group", "cpu", "memory_mib", "gpus", "engine", "tls", "address")
FOUND_NODE_KEYS = ("name", "group", "cpu", "memory_mib", "gpus")
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
FOUND_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
"""A DNS name, as clusters have it for their nodes. It is also the name of a folder."""
NAME_FORM = "use 1 to 40 of a-z, 0-9 and '-', not '-' first"


class ClusterSettings(AmountSettings):
    """Nodes, simulated GPUs and resource groups."""

    simulated_gpus = Union([Integer(), Unicode()], default_value="auto").tag(example="4")
    """Simulated GPUs on the nodes that declare none: a number, or "auto".

    With "auto", the GPUs are those that NVML reports; where there is none, one of 8192 MiB is simulated
    and marked as such everywhere. "0" never simulates.
    """
    nodes = List(Dict())
    """Nodes. Empty: one, this machine, with its CPUs, memory and GPUs.

    Each is a dict with ``name``, ``group`` (resource group, default "default"), ``cpu`` (cores),
    ``memory_mib``, and ``gpus``: "nvml" (all), a list of NVML UUIDs, or ``{"simulated": 2,
    "memory_mib": 8192}``. What is left out is the machine's own.

    With ``runtime="docker"`` a node may be another machine: ``engine`` is the URL of its Docker engine
    ("tcp://HOST:2376" with ``tls``, a dict of the paths ``ca``, ``cert`` and ``key``; "ssh://USER@HOST"), and
    ``address``, a name or an IPv4 address, where this machine reaches the ports that its containers publish, if it is
    not that host. Its GPUs are found where it has the NVIDIA runtime, or declared: a list of ``{"uuid", "model",
    "memory_mib"}``.

    Example::

        c.FGPU.nodes = [
            {"name": "research", "gpus": ["GPU-1f...", "GPU-2a..."]},
            {"name": "teaching", "group": "class", "cpu": 16, "memory_mib": 65536, "gpus": ["GPU-3c..."]},
            {
                "name": "annex",
                "engine": "tcp://10.0.0.2:2376",
                "tls": {"ca": "/etc/fgpu/ca.pem", "cert": "/etc/fgpu/cert.pem", "key": "/etc/fgpu/key.pem"},
            },
        ]
    """
    finds_nodes = Bool(False).tag(example="True")
    """Set by the engine, not by you: whether it finds the nodes, as in a cluster.

    ``nodes`` then only overrides what was found, by ``name``: ``group``, ``cpu``, ``memory_mib``, ``gpus``. Empty,
    all nodes are used as they are.
    """
    groups = Dict().tag(example='{"default": {}, "class": {"hub_groups": ["ml101"]}}')
    """Resource groups and who may use them; empty: one, "default", open to all users.

    Each value is a dict with ``users`` (names) and ``hub_groups`` (JupyterHub groups); with neither, the
    group is open to all users. An empty list is refused, as it could mean no user or all users.
    """

    def resource_groups(self) -> tuple[str, ...]:
        """Return every resource group, in the administrator's order."""
        return tuple(self.groups) or (DEFAULT_GROUP,)

    def groups_of(self, user: str, hub_groups: Collection[str]) -> tuple[str, ...]:
        """Return the resource groups that this user may use, in the administrator's order."""
        return tuple(
            name for name in self.resource_groups() if admits(self.groups.get(name) or {}, user, hub_groups)
        )

    def node_ids(self) -> list[str]:
        """Return the names of the configured nodes."""
        return [spec["name"] for spec in self._specs]

    def is_elsewhere(self, node_id: str) -> bool:
        """Return whether a node is another machine than the Hub's."""
        return self.finds_nodes or any(s["name"] == node_id and is_elsewhere(s) for s in self.nodes)

    @property
    def _specs(self) -> Sequence[Spec]:
        return self.nodes or ([] if self.finds_nodes else [{"name": "local"}])

    def discover_nodes(self, machines: Mapping[str, MachineFacts | None] | None = None) -> tuple[Node, ...]:
        """Return the configured nodes with the GPUs that are there; none where the engine finds them.

        ``machines`` are what the nodes on other engines say of themselves, None for one that does not answer: that is
        LOST, with what is declared of it. Without it those nodes are left out.
        """
        here: MachineFacts | None = None
        nodes: list[Node] = []
        for spec in () if self.finds_nodes else self._specs:
            machine: MachineFacts | None = this_machine()
            if spec.get("engine"):
                if machines is None or spec["name"] not in machines:
                    continue
                machine = machines[spec["name"]]
            elif are_found_by_driver(spec):
                # It is asked once, and only where a node has to know.
                machine = here = here or this_machine(self._this_machines_gpus(spec["name"]))
            nodes.append(self._node(spec, machine))
        uuids = Counter(device.uuid for node in nodes for device in node.devices)
        for uuid, times in uuids.items():
            if times > 1:
                raise BadSettings(
                    f"c.FGPU.nodes: GPU {uuid} is on two nodes; list each node's GPUs by their UUIDs"
                )
        return tuple(sorted(nodes, key=lambda n: n.id))

    def _this_machines_gpus(self, node_id: str) -> tuple[FoundDevice, ...]:
        wanted = str(self.simulated_gpus)
        devices = NvmlProbe().devices() if wanted == "auto" or int(wanted) == 0 else ()
        count = (0 if devices else 1) if wanted == "auto" else int(wanted)
        return SimulatedProbe(count, SIMULATED_MEMORY_MIB, node_id).devices() if count else devices

    def node_of(self, name: str, machine: MachineFacts | None) -> Node:
        """Return a node that is another machine, as that says and as is configured; LOST where it is silent."""
        spec = next((spec for spec in self.nodes if spec["name"] == name), {"name": name})
        node = self._node(spec, machine)
        if not FOUND_NAME.fullmatch(name):
            raise BadSettings(f"node {name!r}: use a DNS name of up to 253 characters")
        if node.resource_group not in self.resource_groups():
            there = ", ".join(map(repr, self.resource_groups()))
            raise BadSettings(
                f"node {name!r} is in group {node.resource_group!r}, which c.FGPU.groups does not have; it has {there}"
            )
        return node

    def _node(self, spec: Spec, machine: MachineFacts | None) -> Node:
        name = spec["name"]
        known = machine or MachineFacts(0, 0)
        # What a cluster counts is the cluster's to divide.
        reserves = are_found_by_driver(spec) and not self.finds_nodes
        return Node(
            id=name,
            resource_group=spec.get("group", known.group or DEFAULT_GROUP),
            cpu_milli=parse_milli(str(spec["cpu"]), field="cpu") if "cpu" in spec else known.cpu_milli,
            memory_mib=spec.get("memory_mib", known.memory_mib),
            state=NodeState.LOST if machine is None else NodeState.READY,
            devices=tuple(
                Device(
                    d.uuid,
                    name,
                    d.index,
                    d.model,
                    self.sessions_memory_mib(d) if reserves else d.memory_mib,
                    self.capacity_milli(d.model),
                    d.simulated,
                    self.max_shares_per_gpu,
                )
                for d in gpus_of(spec, machine)
            ),
            closed=known.closed,
        )

    def _check_cluster(self) -> None:
        if not re.fullmatch(r"auto|\d{1,4}", str(self.simulated_gpus)):
            raise BadSettings(
                f'c.FGPU.simulated_gpus is {self.simulated_gpus!r}; use "auto" or a number such as 2'
            )
        groups, names = self.resource_groups(), [spec.get("name") for spec in self.nodes]
        for group, rule in self.groups.items():
            if not _is_name(group):
                raise BadSettings(f"c.FGPU.groups: {group!r} is not a name; {NAME_FORM}")
            lists = (
                rule.values() if isinstance(rule, dict) and rule.keys() <= {"users", "hub_groups"} else [()]
            )
            for names_of in lists:
                if not are_names(names_of):
                    raise BadSettings(
                        f"c.FGPU.groups[{group!r}] is {rule!r}; use a dict with 'users' and 'hub_groups', each a list "
                        "of one name or more, or left out for all users"
                    )
        for name in names:
            if not _is_name(name, FOUND_NAME if self.finds_nodes else NAME):
                form = "use the node's name in the cluster" if self.finds_nodes else NAME_FORM
                raise BadSettings(f"c.FGPU.nodes: name {name!r} will not do; {form}")
            if names.count(name) > 1:
                raise BadSettings(f"c.FGPU.nodes: two nodes are named {name!r}")
        for spec in self.nodes:
            where, group = f"c.FGPU.nodes: node {spec['name']!r}", spec.get("group", DEFAULT_GROUP)
            check_keys(where, spec, FOUND_NODE_KEYS if self.finds_nodes else NODE_KEYS)
            if group not in groups:
                raise BadSettings(
                    f"{where} is in group {group!r}, which c.FGPU.groups does not have; "
                    f"it has {', '.join(map(repr, groups))}"
                )
            check_node(spec, where, elsewhere=self.finds_nodes)
        if self.finds_nodes:
            return  # Which groups have nodes is the cluster's to say.
        used = {spec.get("group", DEFAULT_GROUP) for spec in self._specs}
        for group in self.groups:
            if group not in used:
                raise BadSettings(f"c.FGPU.groups: no node is in group {group!r}; add one to c.FGPU.nodes")
        if DEFAULT_GROUP in used - set(groups):
            raise BadSettings(
                f"c.FGPU.groups has no group {DEFAULT_GROUP!r}, where this machine is; "
                "add it, or declare c.FGPU.nodes"
            )


def admits(rule: Mapping[str, Any], user: str, hub_groups: Collection[str]) -> bool:
    """Return whether a rule names the user or one of their Hub groups; one without names admits all users."""
    if "users" not in rule and "hub_groups" not in rule:
        return True
    return user in rule.get("users", ()) or any(g in rule.get("hub_groups", ()) for g in hub_groups)


def are_names(values: object) -> bool:
    """Return whether this is a list of one name or more: an empty one could mean no user or all users."""
    return (
        isinstance(values, list | tuple) and bool(values) and all(isinstance(value, str) for value in values)
    )


def _is_name(name: object, form: re.Pattern[str] = NAME) -> bool:
    return isinstance(name, str) and form.fullmatch(name) is not None
