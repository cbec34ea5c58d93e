"""The administrator's settings: traits with help, and the checks that stop the Hub on a wrong one."""

from __future__ import annotations

import fnmatch
import ipaddress
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from traitlets import Bool, Dict, Float, Integer, List, TraitError, Unicode, Union
from traitlets.config import Config

from fgpu_scheduler import (
    BadAmount,
    BadSettings,
    Caps,
    Device,
    FoundDevice,
    Node,
    NodeState,
    NvmlProbe,
    SimulatedProbe,
    format_milli,
    parse_milli,
)
from fgpuspawner.form_settings import FormSettings
from fgpuspawner.images.settings import ImageSettings
from fgpuspawner.isolation.limits import MANAGED
from fgpuspawner.nodes import (
    LARGEST_MIB,
    MIN_MEMORY_MIB,
    NODE_KEYS,
    SIMULATED_MEMORY_MIB,
    Machine,
    check_node,
    found_elsewhere,
    is_elsewhere,
    is_whole,
    named,
    this_machine,
)
from fgpuspawner.queue_settings import QueueSettings

DEFAULT_GROUP = "default"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
FIREWALL = ("auto", "managed-elsewhere")
EGRESS = ("open", "closed")
ISOLATION = ("auto", "interposer", "driver-cgroup", "mig", "mps", "hami", "none")


class FGPU(QueueSettings, ImageSettings, FormSettings):
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
        "memory_mib": 8192}``. What is left out is the machine's own.

        With ``runtime="docker"`` a node may be another machine: ``engine`` is the URL of its Docker engine
        ("tcp://HOST:2376" with ``tls``, a dict of the paths ``ca``, ``cert`` and ``key``; "ssh://USER@HOST"), and
        ``address`` where this machine reaches the ports that its containers publish, if it is not that host. Its GPUs
        are found where it has the NVIDIA runtime, or declared: a list of ``{"uuid", "model", "memory_mib"}``.

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

    hub_address = Unicode(
        "",
        help="""Address of this machine at which sessions on other machines reach the Hub and the service.

        Needed where a node in ``nodes`` is at tcp:// or ssh://. Empty: the host's address on the sessions' own network.

        Example: ``c.FGPU.hub_address = "10.0.0.1"``
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
    warm_pool = Dict(
        help="""How many containers of an image wait, with its server imported, for the next sessions. Empty: none.

        By the image's slug in the catalogue: a number, or "auto" for as many as were started within five minutes at
        most in the last hour, and never more than 8. Only on this machine's own engine; docs/fast-start.md says what
        else starts as ever, and what a pool costs.

        Example: ``c.FGPU.warm_pool = {"python": 2, "pytorch": "auto"}``
        """,
    ).tag(config=True)
    prefetch = Integer(
        2,
        help="""Of how many of the first waiting requests of each resource group the image is fetched beforehand; 0: none.

        It is fetched on the engine of every node of the group that could hold the session.

        Example: ``c.FGPU.prefetch = 5``
        """,
    ).tag(config=True)
    pulls_at_a_time = Integer(
        3,
        help="""How many images one Docker engine fetches at a time; more wait for their turn, those of a launch first.

        From 2 on, one of these places is kept free for launches.

        Example: ``c.FGPU.pulls_at_a_time = 1``
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
    meter_every_s = Integer(
        10,
        help="""How often the meter looks at what running sessions hold and use of their GPUs; 1 to 300.

        Pages show what it saw last. What it counted is written to the database once a minute.

        Example: ``c.FGPU.meter_every_s = 5``

        .. versionadded:: 0.1
        """,
    ).tag(config=True)
    history_days = Integer(
        365,
        help="""For how many days sessions that have ended, and the log of what became of them, are kept; 0: for ever.

        Fewer than 1 day cannot be set. What older sessions used still counts for fair shares.

        Example: ``c.FGPU.history_days = 90``

        .. versionadded:: 0.1
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

    network_pool = Unicode(
        "10.213.0.0/16",
        help="""Addresses (IPv4) for the networks of users' sessions in containers; nobody else here may use them.

        Each user with sessions has a Docker network of their own, with a subnet of this.

        Example: ``c.FGPU.network_pool = "172.28.0.0/16"``
        """,
    ).tag(config=True)
    network_prefix_length = Integer(
        28,
        help="""How large each user's subnet is: 28 has room for 13 sessions of one user, 27 for 29; 16 to 29.

        Example: ``c.FGPU.network_prefix_length = 27``
        """,
    ).tag(config=True)
    firewall = Unicode(
        "auto",
        help="""Who closes this machine to sessions in containers: "auto" or "managed-elsewhere".

        With "auto" the Hub does, with iptables, if it runs as root; if it cannot, its log says so. With
        "managed-elsewhere" you vouch for it: with what ``fgpu firewall`` prints, or rules of your own.

        Example: ``c.FGPU.firewall = "managed-elsewhere"``
        """,
    ).tag(config=True)
    egress = Unicode(
        "open",
        help="""What sessions in containers reach beyond this machine: all ("open"), or nothing ("closed").

        "closed" needs the firewall. The Hub and the service are always reached.

        Example: ``c.FGPU.egress = "closed"``
        """,
    ).tag(config=True)
    blocked_networks = List(
        Unicode(),
        default_value=["169.254.0.0/16", "fd00:ec2::254/128"],
        help="""Networks that sessions in containers never reach. The default is where clouds keep machines' secrets.

        Name servers of this machine are reached all the same, for names only. The list replaces the default.

        Example: ``c.FGPU.blocked_networks = ["169.254.0.0/16", "10.1.0.0/16"]``
        """,
    ).tag(config=True)
    allowed_ports = List(
        Integer(),
        help="""Ports (TCP) of this machine that sessions in containers reach beside the Hub's and the service's.

        Example: ``c.FGPU.allowed_ports = [443]``
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
        self._check_queue(list(self.groups or {DEFAULT_GROUP: {}}))
        self._check_isolation()
        self._check_network()
        self._check_images()
        self._check_form(list(self.groups or {DEFAULT_GROUP: {}}))
        for slug, size in self.warm_pool.items():
            # A truth value is a number in Python, and means neither.
            if size != "auto" and (
                isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= 100
            ):
                raise BadSettings(
                    f'c.FGPU.warm_pool: {slug!r} has {size!r}; use a number from 0 to 100, or "auto"'
                )
        for name in ("queue_timeout_s", "launch_timeout_s", "abandoned_after_s", "verify_timeout_s"):
            if getattr(self, name) < 1:
                raise BadSettings(f"c.FGPU.{name} is {getattr(self, name)}; it must be at least 1 second")
        if self.resume_grace_s < 0:
            raise BadSettings(f"c.FGPU.resume_grace_s is {self.resume_grace_s}; it must not be negative")
        if not 1 <= self.service_port <= 65535:
            raise BadSettings(f"c.FGPU.service_port is {self.service_port}; it must be between 1 and 65535")
        if self.prefetch < 0:
            raise BadSettings(f"c.FGPU.prefetch is {self.prefetch}; it must be 0 (none) or more")
        for name in ("max_sessions", "max_pending_per_user", "pulls_at_a_time"):
            if getattr(self, name) < 1:
                raise BadSettings(f"c.FGPU.{name} is {getattr(self, name)}; it must be at least 1")
        return self

    # -- what the scheduler is given ------------------------------------------------------------------

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

    def resource_groups(self) -> tuple[str, ...]:
        """Return every resource group, in the administrator's order."""
        return tuple(self.groups or {DEFAULT_GROUP: {}})

    def groups_of(self, user: str, hub_groups: Collection[str]) -> tuple[str, ...]:
        """Return the resource groups that this user may use, in the administrator's order."""
        return tuple(
            name
            for name, rule in (self.groups or {DEFAULT_GROUP: {}}).items()
            if (not rule.get("users") and not rule.get("hub_groups"))
            or user in rule.get("users", ())
            or any(g in rule.get("hub_groups", ()) for g in hub_groups)
        )

    def node_ids(self) -> list[str]:
        """Return the names of the configured nodes."""
        return [spec["name"] for spec in self.nodes] or ["local"]

    def discover_nodes(self, machines: Mapping[str, Machine | None] | None = None) -> tuple[Node, ...]:
        """Return the configured nodes with the GPUs that are there.

        ``machines`` are what the nodes on other engines say of themselves, None for one that does not answer: that is
        LOST, with what is declared of it. Without it those nodes are left out.

        Raises:
            BadSettings: a GPU that is named is not there, or is named twice.
            ProbeFailed: NVML fails.
        """
        found: Sequence[FoundDevice] | None = None
        nodes: list[Node] = []
        for spec in self.nodes or [{"name": "local"}]:
            gpus = spec.get("gpus", "nvml")
            elsewhere = bool(spec.get("engine"))
            if elsewhere and (machines is None or spec["name"] not in machines):
                continue
            machine = machines[spec["name"]] if elsewhere and machines is not None else this_machine()
            if isinstance(gpus, dict):
                probe = SimulatedProbe(
                    gpus["simulated"], gpus.get("memory_mib", SIMULATED_MEMORY_MIB), spec["name"]
                )
                devices: Sequence[FoundDevice] = probe.devices()
            elif elsewhere:
                devices = found_elsewhere(gpus, machine, spec["name"])
            else:
                if found is None:
                    found = self._this_machines_gpus(spec["name"])
                devices = found if gpus == "nvml" else named(gpus, found, spec["name"])
            nodes.append(self._node(spec, machine, devices))
        uuids = [d.uuid for n in nodes for d in n.devices]
        for uuid in uuids:
            if uuids.count(uuid) > 1:
                raise BadSettings(
                    f"c.FGPU.nodes: GPU {uuid} is on two nodes; list each node's GPUs by their UUIDs"
                )
        return tuple(sorted(nodes, key=lambda n: n.id))

    # -- parts ----------------------------------------------------------------------------------------

    def _this_machines_gpus(self, node_id: str) -> Sequence[FoundDevice]:
        if self.simulated_gpus != "auto" and int(self.simulated_gpus) > 0:
            return SimulatedProbe(int(self.simulated_gpus), SIMULATED_MEMORY_MIB, node_id).devices()
        devices = NvmlProbe().devices()
        if not devices and self.simulated_gpus == "auto":
            return SimulatedProbe(1, SIMULATED_MEMORY_MIB, node_id).devices()
        return devices

    def _node(self, spec: dict[str, Any], machine: Machine | None, devices: Sequence[FoundDevice]) -> Node:
        name = spec["name"]
        known = machine or Machine(0, 0)
        return Node(
            id=name,
            resource_group=spec.get("group", DEFAULT_GROUP),
            cpu_milli=parse_milli(str(spec["cpu"]), field="cpu") if "cpu" in spec else known.cpu_milli,
            memory_mib=spec.get("memory_mib", known.memory_mib),
            state=NodeState.LOST if machine is None else NodeState.READY,
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
        if self.context_mib != "auto" and not is_whole(self.context_mib, 0):
            raise BadSettings(f'c.FGPU.context_mib is {self.context_mib!r}; use "auto" or MiB such as 400')
        if not 1 <= self.watchdog_every_s <= 300:
            raise BadSettings(
                f"c.FGPU.watchdog_every_s is {self.watchdog_every_s}; it must be between 1 and 300"
            )
        if not 1 <= self.meter_every_s <= 300:
            raise BadSettings(f"c.FGPU.meter_every_s is {self.meter_every_s}; it must be between 1 and 300")
        if not 0 <= self.history_days <= 36500:
            raise BadSettings(
                f"c.FGPU.history_days is {self.history_days}; it must be a number of days up to 36500, or 0 for ever"
            )
        if not 0 <= self.watchdog_tolerance_mib <= LARGEST_MIB:
            raise BadSettings(
                f"c.FGPU.watchdog_tolerance_mib is {self.watchdog_tolerance_mib}; it must not be negative"
            )
        for name in ("hami_library", "mps_pipe_directory", "accounting_dir"):
            path = getattr(self, name)
            if path and not Path(path).is_absolute():
                raise BadSettings(f"c.FGPU.{name} is {path!r}; it must be an absolute path")

    def _check_network(self) -> None:
        for name, known in (("firewall", FIREWALL), ("egress", EGRESS)):
            value = getattr(self, name)
            if value not in known:
                raise BadSettings(f"c.FGPU.{name} is {value!r}; use {' or '.join(map(repr, known))}")
        try:
            pool = ipaddress.IPv4Network(self.network_pool)
        except ValueError as e:
            raise BadSettings(
                f"c.FGPU.network_pool is {self.network_pool!r}: {e}; use a network such as '10.213.0.0/16'"
            ) from None
        if not 16 <= self.network_prefix_length <= 29 or pool.prefixlen > self.network_prefix_length:
            raise BadSettings(
                f"c.FGPU.network_prefix_length is {self.network_prefix_length}; it must be between 16 and 29, and "
                f"not below that of c.FGPU.network_pool, {pool.prefixlen}"
            )
        if not pool.is_private or self.network_prefix_length - pool.prefixlen > 20:
            raise BadSettings(
                f"c.FGPU.network_pool is {self.network_pool!r}; use a private network of at most a million subnets, "
                "such as '10.213.0.0/16'"
            )
        for network in self.blocked_networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as e:
                raise BadSettings(
                    f"c.FGPU.blocked_networks: {e}; use networks such as '10.1.0.0/16'"
                ) from None
        for port in self.allowed_ports:
            if not 1 <= port <= 65535:
                raise BadSettings(f"c.FGPU.allowed_ports has {port}; ports are between 1 and 65535")

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
            check_node(name, spec)
        away = [spec["name"] for spec in self.nodes if is_elsewhere(spec)]
        if away and not self.hub_address:
            raise BadSettings(
                f"c.FGPU.hub_address is empty, and node {away[0]!r} is another machine; set the address of this one "
                "at which sessions there reach the Hub"
            )
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
