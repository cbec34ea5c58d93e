"""The administrator's settings: traits with help, and the checks that stop the Hub on a wrong one."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil
from traitlets import Bool, Dict, Float, Integer, List, TraitError, Unicode, Union
from traitlets.config import Config, Configurable

from fgpu_scheduler import (
    BadAmount,
    BadSettings,
    Caps,
    Device,
    FoundDevice,
    Node,
    NvmlProbe,
    Policy,
    SimulatedProbe,
    format_milli,
    parse_milli,
)
from fgpuspawner.isolation.limits import MANAGED

DEFAULT_GROUP = "default"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
NODE_KEYS = ("name", "group", "cpu", "memory_mib", "gpus")
SIMULATED_MEMORY_MIB = 8192
MIN_MEMORY_MIB = 128
"""Below this admission refuses a session."""
LARGEST_MIB = 2**31
"""Two PiB: more is a typing mistake."""
ISOLATION = ("auto", "interposer", "driver-cgroup", "mig", "mps", "hami", "none")


class FGPU(Configurable):
    """What the administrator sets. `checked` refuses what cannot work, with one line that names it."""

    data_dir = Unicode(
        "data",
        help="""Folder for everything that must survive: the database, limits files, logs, homes.

        Example: ``c.FGPU.data_dir = "/var/lib/fgpu"``
        """,
    ).tag(config=True)

    db_url = Unicode(
        "",
        help="""SQLAlchemy URL of the scheduler's database; empty: SQLite in ``data_dir``.

        Example: ``c.FGPU.db_url = "postgresql+psycopg://fgpu:secret@127.0.0.1/fgpu"``
        """,
    ).tag(config=True)

    fgpu_per_gpu = Union(
        [Integer(), Float(), Unicode(), Dict()],
        default_value=2,
        help="""The unit: how many fGPU one GPU is worth. 5 makes 1 fGPU = 0.2 GPU.

        May differ between models: a dict from a pattern of the model's name to a number, with "*" for the rest.

        Example: ``c.FGPU.fgpu_per_gpu = {"*A100*": 10, "*": 2}``
        """,
    ).tag(config=True)

    fgpu_step = Union(
        [Integer(), Float(), Unicode()],
        default_value="0.1",
        help="""The step in which fGPU is chosen, in the form and through the API.

        Example: ``c.FGPU.fgpu_step = "0.25"``
        """,
    ).tag(config=True)

    simulated_gpus = Unicode(
        "auto",
        help="""Simulated GPUs on the nodes that declare none: a number, or "auto".

        With "auto", the GPUs are those that NVML reports; where there is none, one of 8192 MiB is simulated
        and marked as such everywhere. "0" never simulates.

        Example: ``c.FGPU.simulated_gpus = "4"``
        """,
    ).tag(config=True)

    nodes = List(
        Dict(),
        help="""Nodes. Empty: one, this machine, with its CPUs, memory and GPUs.

        Each is a dict with ``name``, ``group`` (resource group, default "default"), ``cpu`` (cores),
        ``memory_mib``, and ``gpus``: "nvml" (all), a list of NVML UUIDs, or ``{"simulated": 2,
        "memory_mib": 8192}``. What is left out is this machine's own.

        Example::

            c.FGPU.nodes = [
                {"name": "research", "gpus": ["GPU-1f...", "GPU-2a..."]},
                {"name": "teaching", "group": "class", "cpu": 16, "memory_mib": 65536, "gpus": ["GPU-3c..."]},
            ]
        """,
    ).tag(config=True)

    groups = Dict(
        help="""Resource groups and who may use them; empty: one, "default", open to everybody.

        Each value is a dict with ``users`` (names) and ``hub_groups`` (JupyterHub groups); with neither, the
        group is open to everybody. An empty list is refused: it would say nobody and mean everybody.

        Example: ``c.FGPU.groups = {"default": {}, "class": {"hub_groups": ["ml101"]}}``
        """,
    ).tag(config=True)

    catalogue = Unicode(
        "",
        help="""Path of the image catalogue (TOML); empty: the one that came with the package.

        Example: ``c.FGPU.catalogue = "/etc/fgpu/catalogue.toml"``
        """,
    ).tag(config=True)

    max_fgpu = Union(
        [Integer(), Float(), Unicode()],
        default_value="",
        help="""Most fGPU in one session; empty: whatever a node has. Example: ``c.FGPU.max_fgpu = 2``""",
    ).tag(config=True)
    max_cpu = Union(
        [Integer(), Float(), Unicode()],
        default_value="",
        help="""Most CPU cores in one session; empty: the node's. Example: ``c.FGPU.max_cpu = 8``""",
    ).tag(config=True)
    max_memory_mib = Integer(
        0,
        help="""Most memory of one session in MiB; 0: the node's. Example: ``c.FGPU.max_memory_mib = 32768``""",
    ).tag(config=True)
    max_sessions = Integer(
        8, help="""Most sessions in one submission. Example: ``c.FGPU.max_sessions = 4``"""
    ).tag(config=True)
    max_pending_per_user = Integer(
        16, help="""Most waiting requests of one user. Example: ``c.FGPU.max_pending_per_user = 5``"""
    ).tag(config=True)

    default_fgpu = Union(
        [Integer(), Float(), Unicode()],
        default_value="",
        help="""fGPU preselected in the form; empty: one GPU's half, rounded down to the step.

        Example: ``c.FGPU.default_fgpu = "0.5"``
        """,
    ).tag(config=True)
    default_cpu = Union(
        [Integer(), Float(), Unicode()],
        default_value="",
        help="""CPU cores preselected; empty: a fair part of the node. Example: ``c.FGPU.default_cpu = 2``""",
    ).tag(config=True)
    default_memory_mib = Integer(
        0,
        help="""Memory in MiB preselected; 0: a fair part. Example: ``c.FGPU.default_memory_mib = 4096``""",
    ).tag(config=True)

    queue_timeout_s = Integer(
        24 * 3600,
        help="""A request that has waited this long is cancelled. Example: ``c.FGPU.queue_timeout_s = 3600``""",
    ).tag(config=True)
    launch_timeout_s = Integer(
        600,
        help="""A launch, image pull included, that takes longer has failed.

        Example: ``c.FGPU.launch_timeout_s = 900``
        """,
    ).tag(config=True)
    resume_grace_s = Integer(
        60,
        help="""After a restart of the Hub nothing is placed until the waiting requests are resumed, or this long.

        Example: ``c.FGPU.resume_grace_s = 120``
        """,
    ).tag(config=True)
    abandoned_after_s = Integer(
        900,
        help="""A request that nobody resumed for this long after a restart is cancelled.

        Example: ``c.FGPU.abandoned_after_s = 3600``
        """,
    ).tag(config=True)

    service_ip = Unicode(
        "127.0.0.1",
        help="""Address the service ``fgpu`` listens on; with ``runtime="docker"`` the host's on the sessions' network.

        Example: ``c.FGPU.service_ip = "127.0.0.1"``
        """,
    ).tag(config=True)
    service_port = Integer(
        10880, help="""Port the service ``fgpu`` listens on. Example: ``c.FGPU.service_port = 10881``"""
    ).tag(config=True)
    service_url_for_sessions = Unicode(
        "",
        help="""URL under which sessions reach the service; empty: its own address and port.

        Example: ``c.FGPU.service_url_for_sessions = "http://172.17.0.1:10880/services/fgpu/"``
        """,
    ).tag(config=True)
    sessions_may_end_sessions = Bool(
        True,
        help="""Whether JupyterLab in a session may end its owner's other sessions.

        Example: ``c.FGPU.sessions_may_end_sessions = False``
        """,
    ).tag(config=True)
    local_sessions_beyond_loopback = Bool(
        False,
        help="""Whether a Hub with sessions as local processes may listen beyond this machine.

        All such sessions run as one system user: whoever may log in can act as everybody.

        Example: ``c.FGPU.local_sessions_beyond_loopback = True``
        """,
    ).tag(config=True)

    isolation = Unicode(
        "auto",
        help="""What holds a session to its slice: "auto", "interposer", "driver-cgroup", "mig", "mps", "hami" or "none".

        "auto" takes the strongest that a node can have: "mig" where its GPUs are MIG instances, else "driver-cgroup"
        where the driver can (r615 or newer), else "interposer", which is libfgpu. If it can have none of these the Hub
        does not start; with simulated GPUs only it starts with "none" and says so. With "none" a session is told its
        limits, and nothing holds it to them.

        Example: ``c.FGPU.isolation = "interposer"``
        """,
    ).tag(config=True)
    managed_memory = Unicode(
        "charge",
        help="""What libfgpu does about managed memory (``cudaMallocManaged``): "charge" it in full, or "refuse" it.

        Example: ``c.FGPU.managed_memory = "refuse"``
        """,
    ).tag(config=True)
    context_mib = Union(
        [Integer(), Unicode()],
        default_value="auto",
        help="""GPU memory that libfgpu charges for every CUDA context of every process, in MiB; 0 charges nothing.

        "auto" measures it once for each GPU model and driver, when the Hub starts, and keeps it in ``data_dir``. Where
        it cannot be measured 512 is charged, and the log says so. A context of a simulated GPU takes nothing.

        Example: ``c.FGPU.context_mib = 400``
        """,
    ).tag(config=True)
    accounting_dir = Unicode(
        "",
        help="""Folder for what a session's processes write all the time about what they hold; best in memory.

        Empty: ``/dev/shm`` where there is one, else the session's folder in ``data_dir``. In it there is a folder for
        the installation, which is nobody else's.

        Example: ``c.FGPU.accounting_dir = "/run/user/1000"``
        """,
    ).tag(config=True)
    verify_timeout_s = Integer(
        60,
        help="""How long the check of a session's limits may take after its start. One that takes longer has failed.

        Example: ``c.FGPU.verify_timeout_s = 120``
        """,
    ).tag(config=True)
    watchdog_every_s = Integer(
        10,
        help="""How often the watchdog compares what the driver says that sessions hold with what they may; 1 to 300.

        It cannot be switched off: what libfgpu counts is kept where the session itself could write it.

        Example: ``c.FGPU.watchdog_every_s = 5``
        """,
    ).tag(config=True)
    watchdog_tolerance_mib = Integer(
        512,
        help="""How far above its limit a session may be on a GPU before the watchdog warns, and ends it at the next look.

        The driver counts what libfgpu does not see, such as the code of kernels.

        Example: ``c.FGPU.watchdog_tolerance_mib = 256``
        """,
    ).tag(config=True)
    hami_library = Unicode(
        "",
        help="""Path of HAMi-core's ``libvgpu.so`` on this machine, for ``isolation = "hami"``.

        Example: ``c.FGPU.hami_library = "/usr/local/vgpu/libvgpu.so"``
        """,
    ).tag(config=True)
    mps_pipe_directory = Unicode(
        "/tmp/nvidia-mps",
        help="""Where the MPS daemon has its pipes (its ``CUDA_MPS_PIPE_DIRECTORY``), for ``isolation = "mps"``.

        The daemon must run as the user that sessions run as, and containers then share the host's shared memory.

        Example: ``c.FGPU.mps_pipe_directory = "/run/nvidia-mps"``
        """,
    ).tag(config=True)

    @classmethod
    def from_config(cls, config: Config) -> FGPU:
        """Return the settings of a Hub's configuration.

        Raises:
            BadSettings: a value of the wrong type, or a name that is no setting.
        """
        known = cls.class_trait_names(config=True)
        for name in config.get("FGPU", {}):
            if name not in known:
                raise BadSettings(
                    f"c.FGPU.{name} is not a setting; the settings are {', '.join(sorted(known))}"
                )
        try:
            return cls(config=config)
        except TraitError as e:
            raise BadSettings(f"c.FGPU: {e}") from e

    @classmethod
    def from_json(cls, text: str) -> FGPU:
        """Return the settings that `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return every setting as JSON, for the service. It can hold the database's password."""
        return json.dumps({name: getattr(self, name) for name in self.trait_names(config=True)})

    def checked(self) -> FGPU:
        """Return these settings if all of them can work together.

        Raises:
            BadSettings: one line that names the setting, the limit and what would work.
        """
        caps = self.caps()
        for pattern, milli in self._units():
            _check_unit(pattern, milli, caps.fgpu_step_milli)
        self._check_amounts(caps)
        self._check_simulated()
        self._check_groups()
        self._check_nodes()
        self._check_isolation()
        for name in ("queue_timeout_s", "launch_timeout_s", "abandoned_after_s", "verify_timeout_s"):
            if getattr(self, name) < 1:
                raise BadSettings(f"c.FGPU.{name} is {getattr(self, name)}; it must be at least 1 second")
        if self.resume_grace_s < 0:
            raise BadSettings(f"c.FGPU.resume_grace_s is {self.resume_grace_s}; it must not be negative")
        if not 1 <= self.service_port <= 65535:
            raise BadSettings(f"c.FGPU.service_port is {self.service_port}; it must be between 1 and 65535")
        for name in ("max_sessions", "max_pending_per_user"):
            if getattr(self, name) < 1:
                raise BadSettings(f"c.FGPU.{name} is {getattr(self, name)}; it must be at least 1")
        return self

    # -- what the scheduler is given ------------------------------------------------------------------

    def policy(self) -> Policy:
        """Return the queue's rules."""
        return Policy()

    def caps(self) -> Caps:
        """Return the limits on one request."""
        step = self._milli("fgpu_step")
        if not step:
            raise BadSettings("c.FGPU.fgpu_step is 0; it must be above 0, such as 0.1")
        return Caps(
            fgpu_step_milli=step,
            max_fgpu_milli=self._milli("max_fgpu"),
            max_cpu_milli=self._milli("max_cpu"),
            max_memory_mib=self.max_memory_mib or None,
            max_count=self.max_sessions,
            max_pending_per_user=self.max_pending_per_user,
        )

    def database_url(self) -> str:
        """Return the URL of the scheduler's database."""
        return self.db_url or f"sqlite:///{self.data_path() / 'fgpu.sqlite'}"

    def data_path(self) -> Path:
        """Return the folder of everything that must survive, absolute."""
        return Path(self.data_dir).absolute()

    def catalogue_path(self) -> Path:
        """Return the catalogue's path."""
        if self.catalogue:
            return Path(self.catalogue).absolute()
        packaged = Path(__file__).parent / "data" / "catalogue.toml"
        # In a checkout the file is where an administrator looks for it; the wheel carries a copy.
        return packaged if packaged.exists() else Path(__file__).parent.parent / "images" / "catalogue.toml"

    def service_url(self) -> str:
        """Return the URL under which sessions reach the service."""
        return self.service_url_for_sessions or f"http://{self.service_ip}:{self.service_port}/services/fgpu/"

    def groups_of(self, user: str, hub_groups: Collection[str]) -> tuple[str, ...]:
        """Return the resource groups that this user may use, in the administrator's order."""
        return tuple(
            name
            for name, rule in (self.groups or {DEFAULT_GROUP: {}}).items()
            if (not rule.get("users") and not rule.get("hub_groups"))
            or user in rule.get("users", ())
            or any(g in rule.get("hub_groups", ()) for g in hub_groups)
        )

    def discover_nodes(self) -> tuple[Node, ...]:
        """Return the configured nodes with the GPUs that are there.

        Raises:
            BadSettings: a GPU that is named is not there, or is named twice.
            ProbeFailed: NVML fails.
        """
        found: Sequence[FoundDevice] | None = None
        nodes: list[Node] = []
        for spec in self.nodes or [{"name": "local"}]:
            gpus = spec.get("gpus", "nvml")
            if isinstance(gpus, dict):
                probe = SimulatedProbe(
                    gpus["simulated"], gpus.get("memory_mib", SIMULATED_MEMORY_MIB), spec["name"]
                )
                devices: Sequence[FoundDevice] = probe.devices()
            else:
                if found is None:
                    found = self._this_machine(spec["name"])
                devices = found if gpus == "nvml" else _named(gpus, found, spec["name"])
            nodes.append(self._node(spec, devices))
        uuids = [d.uuid for n in nodes for d in n.devices]
        for uuid in uuids:
            if uuids.count(uuid) > 1:
                raise BadSettings(
                    f"c.FGPU.nodes: GPU {uuid} is on two nodes; list each node's GPUs by their UUIDs"
                )
        return tuple(sorted(nodes, key=lambda n: n.id))

    # -- parts ----------------------------------------------------------------------------------------

    def _this_machine(self, node_id: str) -> Sequence[FoundDevice]:
        if self.simulated_gpus != "auto" and int(self.simulated_gpus) > 0:
            return SimulatedProbe(int(self.simulated_gpus), SIMULATED_MEMORY_MIB, node_id).devices()
        devices = NvmlProbe().devices()
        if not devices and self.simulated_gpus == "auto":
            return SimulatedProbe(1, SIMULATED_MEMORY_MIB, node_id).devices()
        return devices

    def _node(self, spec: dict[str, Any], devices: Sequence[FoundDevice]) -> Node:
        name = spec["name"]
        return Node(
            id=name,
            resource_group=spec.get("group", DEFAULT_GROUP),
            cpu_milli=parse_milli(str(spec.get("cpu", os.cpu_count() or 1)), field="cpu"),
            memory_mib=spec.get("memory_mib", psutil.virtual_memory().total // 2**20),
            devices=tuple(
                Device(
                    d.uuid, name, d.index, d.model, d.memory_mib, self.capacity_milli(d.model), d.simulated
                )
                for d in devices
            ),
        )

    def capacity_milli(self, model: str) -> int:
        """Return what one GPU of this model is worth in milli-fGPU: the first pattern that matches."""
        for pattern, milli in self._units():
            if fnmatch.fnmatchcase(model, pattern):
                return milli
        raise BadSettings(f'c.FGPU.fgpu_per_gpu has no pattern for {model!r}; add "*"')

    def _units(self) -> list[tuple[str, int]]:
        given = self.fgpu_per_gpu if isinstance(self.fgpu_per_gpu, dict) else {"*": self.fgpu_per_gpu}
        return [(pattern, _milli(value, "fgpu_per_gpu")) for pattern, value in given.items()]

    def _milli(self, name: str) -> int | None:
        value = getattr(self, name)
        return None if value == "" else _milli(value, name)

    def default_milli(self, name: str) -> int | None:
        """Return the form's preselected ``default_fgpu`` or ``default_cpu`` in thousandths, None if not set."""
        return self._milli(name)

    def _check_amounts(self, caps: Caps) -> None:
        for name in ("max_fgpu", "max_cpu", "default_fgpu", "default_cpu"):
            if self._milli(name) == 0:
                raise BadSettings(f'c.FGPU.{name} is 0; it must be above 0, or "" to leave it open')
        for name in ("max_memory_mib", "default_memory_mib"):
            memory_mib = getattr(self, name)
            if memory_mib != 0 and memory_mib < MIN_MEMORY_MIB:
                raise BadSettings(
                    f"c.FGPU.{name} is {memory_mib}; it must be at least {MIN_MEMORY_MIB}, or 0 to leave it open"
                )
        if caps.max_fgpu_milli is not None and caps.max_fgpu_milli < caps.fgpu_step_milli:
            raise BadSettings(
                f"c.FGPU.max_fgpu is {format_milli(caps.max_fgpu_milli)}, below one step of "
                f"{format_milli(caps.fgpu_step_milli)}; nobody could ask for anything"
            )

    def _check_simulated(self) -> None:
        if self.simulated_gpus != "auto" and not re.fullmatch(r"\d{1,4}", self.simulated_gpus):
            raise BadSettings(
                f'c.FGPU.simulated_gpus is {self.simulated_gpus!r}; use "auto" or a number such as "2"'
            )

    def _check_isolation(self) -> None:
        for name, known in (("isolation", ISOLATION), ("managed_memory", MANAGED)):
            if getattr(self, name) not in known:
                raise BadSettings(f"c.FGPU.{name} is {getattr(self, name)!r}; use one of {', '.join(known)}")
        if self.context_mib != "auto" and not _is_whole(self.context_mib, 0):
            raise BadSettings(f'c.FGPU.context_mib is {self.context_mib!r}; use "auto" or MiB such as 400')
        if not 1 <= self.watchdog_every_s <= 300:
            raise BadSettings(
                f"c.FGPU.watchdog_every_s is {self.watchdog_every_s}; it must be between 1 and 300"
            )
        if not 0 <= self.watchdog_tolerance_mib <= LARGEST_MIB:
            raise BadSettings(
                f"c.FGPU.watchdog_tolerance_mib is {self.watchdog_tolerance_mib}; it must not be negative"
            )
        for name in ("hami_library", "mps_pipe_directory", "accounting_dir"):
            path = getattr(self, name)
            if path and not Path(path).is_absolute():
                raise BadSettings(f"c.FGPU.{name} is {path!r}; it must be an absolute path")

    def _check_groups(self) -> None:
        for name, rule in self.groups.items():
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise BadSettings(
                    f"c.FGPU.groups: {name!r} is not a name; use 1 to 40 of a-z, 0-9 and '-', not '-' first"
                )
            if not isinstance(rule, dict) or set(rule) - {"users", "hub_groups"}:
                raise BadSettings(
                    f"c.FGPU.groups[{name!r}] must be a dict with 'users' and 'hub_groups' only, got {rule!r}"
                )
            for key, value in rule.items():
                if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
                    raise BadSettings(
                        f"c.FGPU.groups[{name!r}][{key!r}] must be a list of names, got {value!r}"
                    )
                if not value:
                    raise BadSettings(
                        f"c.FGPU.groups[{name!r}][{key!r}] is empty; name somebody, or leave it out for everybody"
                    )

    def _check_nodes(self) -> None:
        names: list[str] = []
        groups = self.groups or {DEFAULT_GROUP: {}}
        for spec in self.nodes:
            name = spec.get("name")
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise BadSettings(
                    f"c.FGPU.nodes: name {name!r} will not do; use 1 to 40 of a-z, 0-9 and '-', not '-' first"
                )
            if name in names:
                raise BadSettings(f"c.FGPU.nodes: two nodes are named {name!r}")
            names.append(name)
            for key in spec:
                if key not in NODE_KEYS:
                    raise BadSettings(
                        f"c.FGPU.nodes: node {name!r} has an unknown key {key!r}; known are {', '.join(NODE_KEYS)}"
                    )
            group = spec.get("group", DEFAULT_GROUP)
            if not isinstance(group, str) or group not in groups:
                raise BadSettings(
                    f"c.FGPU.nodes: node {name!r} is in group {group!r}, which c.FGPU.groups does not have; "
                    f"it has {', '.join(map(repr, groups))}"
                )
            _check_node(name, spec)
        used = {spec.get("group", DEFAULT_GROUP) for spec in self.nodes} if self.nodes else {DEFAULT_GROUP}
        for group in self.groups:
            if group not in used:
                raise BadSettings(f"c.FGPU.groups: no node is in group {group!r}; add one to c.FGPU.nodes")
        if DEFAULT_GROUP in used and DEFAULT_GROUP not in groups:
            raise BadSettings(
                f"c.FGPU.groups has no group {DEFAULT_GROUP!r}, where this machine is; "
                "add it, or declare c.FGPU.nodes"
            )


def configured(cls: type, config: Config) -> dict[str, Any]:
    """Return what the configuration says for a class: its own section over those of its bases."""
    merged: dict[str, Any] = {}
    for base in reversed(cls.mro()):
        merged.update(config.get(base.__name__, {}))
    return merged


def _milli(value: float | int | str, name: str) -> int:
    try:
        return parse_milli(str(value), field=f"c.FGPU.{name}")
    except BadAmount as e:
        raise BadSettings(str(e)) from None


def _check_unit(pattern: str, milli: int, step_milli: int) -> None:
    where = "c.FGPU.fgpu_per_gpu" if pattern == "*" else f"c.FGPU.fgpu_per_gpu[{pattern!r}]"
    if milli == 0:
        raise BadSettings(f"{where} is 0; one GPU must be worth more than 0 fGPU, such as 2")
    if step_milli > milli:
        raise BadSettings(
            f"c.FGPU.fgpu_step is {format_milli(step_milli)}, above one whole GPU ({where} is "
            f"{format_milli(milli)}); use a step of at most {format_milli(milli)}"
        )


def _check_node(name: str, spec: dict[str, Any]) -> None:
    cpu, node_memory_mib = spec.get("cpu", 1), spec.get("memory_mib", MIN_MEMORY_MIB)
    if not _is_cpu(cpu):
        raise BadSettings(f"c.FGPU.nodes: node {name!r} has cpu {cpu!r}; it must be a number above 0")
    if not _is_whole(node_memory_mib, 1):
        raise BadSettings(
            f"c.FGPU.nodes: node {name!r} has memory_mib {node_memory_mib!r}; it must be a number above 0"
        )
    gpus = spec.get("gpus", "nvml")
    if isinstance(gpus, dict):
        count, memory = gpus.get("simulated"), gpus.get("memory_mib", SIMULATED_MEMORY_MIB)
        known = set(gpus) <= {"simulated", "memory_mib"}
        if not known or not _is_whole(count, 0) or not _is_whole(memory, 128):
            raise BadSettings(
                f"c.FGPU.nodes: node {name!r} has gpus {gpus!r}; use {{'simulated': 2, 'memory_mib': 8192}}"
            )
    elif gpus != "nvml" and not (isinstance(gpus, list) and all(isinstance(u, str) for u in gpus)):
        raise BadSettings(
            f"c.FGPU.nodes: node {name!r} has gpus {gpus!r}; use 'nvml', a list of UUIDs, or {{'simulated': 2}}"
        )


def _is_cpu(value: object) -> bool:
    """Return whether this is a number of cores above 0, with at most three decimals."""
    try:
        return type(value) in (int, float) and parse_milli(str(value), field="cpu") > 0
    except BadAmount:
        return False


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST_MIB


def _named(uuids: list[str], found: Sequence[FoundDevice], node: str) -> Sequence[FoundDevice]:
    by_uuid = {d.uuid: d for d in found}
    for uuid in uuids:
        if uuid not in by_uuid:
            there = ", ".join(by_uuid) or "none"
            raise BadSettings(
                f"c.FGPU.nodes: node {node!r} names GPU {uuid}, which NVML does not report; it has {there}"
            )
    return tuple(by_uuid[uuid] for uuid in uuids)
