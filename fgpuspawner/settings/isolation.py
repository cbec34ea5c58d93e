"""How sessions are held to their slices of a GPU, and to their part of the disk."""

from __future__ import annotations

from traitlets import Bool, Enum, Integer, Union

from fgpuspawner.settings.traits import LARGEST_MIB, AbsolutePath, Settings, Whole

LARGEST_FILES = 2**40
ISOLATION = ("auto", "interposer", "driver-cgroup", "mig", "mps", "none")
MANAGED = ("charge", "refuse")
"""Managed memory counts against the limit, or is refused."""
COMPUTE = ("strict", "elastic")
"""What a share of compute is: a ceiling too, or a floor."""
OPENCL = ("hide", "allow")
"""What becomes of NVIDIA's OpenCL, which libfgpu does not hold."""
AROUND = ("end", "warn")
"""What becomes of sessions that compute around libfgpu."""


class IsolationSettings(Settings):
    """The backend of isolation, what libfgpu charges, and the watchdog."""

    isolation = Enum(ISOLATION, "auto").tag(example='"interposer"')
    """Isolation that holds a session to its slice: "auto", "interposer", "driver-cgroup", "mig", "mps" or "none".

    "auto" takes the strongest that a node can have: "mig" where its GPUs are MIG instances, else "driver-cgroup"
    where the driver can (r615 or newer), else "interposer", which is libfgpu. If it can have none of these the Hub
    does not start; with simulated GPUs only it starts with "none" and says so. With "none" limits are shown to
    a session and not enforced.
    """
    managed_memory = Enum(MANAGED, "charge").tag(example='"refuse"')
    """Managed memory (``cudaMallocManaged``): "charge" it in full, or "refuse" it."""
    compute = Enum(COMPUTE, "elastic").tag(example='"strict"')
    """Compute of sessions that share a GPU: "elastic" lends idle compute; "strict" keeps each session at its share.

    With "elastic" a session that is alone on its GPU, or beside idle neighbours, computes up to ``max_percent``. A
    neighbour with new work has its share at once. This holds for sessions in containers on the Hub's machine and for
    local sessions, where libfgpu holds compute. In pods, on other machines, and with MIG or MPS it is "strict".
    Sessions keep what they were started with.
    """
    max_percent = Integer(100, min=1, max=100).tag(example="50")
    """Most compute of a session, with what it borrows, in percent of a GPU; its share is never cut.

    Only with ``compute = "elastic"``.
    """
    opencl = Enum(OPENCL, "hide").tag(example='"allow"')
    """NVIDIA's OpenCL in sessions that libfgpu holds: "hide" it, or "allow" it without limits.

    It does not pass through CUDA, so libfgpu can neither count nor time it. Other platforms, such as those for
    processors, stay. A session that has all of its GPUs to itself always has it. Sessions keep what they were started
    with.
    """
    context_mib = Union([Enum(["auto"]), Whole(min=0, max=LARGEST_MIB)], default_value="auto").tag(
        example="400", remedy='use "auto" or MiB such as 400'
    )
    """GPU memory charged for each CUDA context of each process, in MiB; 0: nothing.

    "auto" measures it once for each GPU model and driver, when the Hub starts, and keeps it in ``data_dir``. Where
    it cannot be measured 512 is charged, and the log says so. A context of a simulated GPU takes nothing.
    """
    accounting_dir = AbsolutePath().tag(example='"/run/user/1000"')
    """Folder in which local sessions' processes keep account of what they hold; best in memory.

    Containers have a place of their own. Simulated GPUs are shared through it by all sessions.

    Empty: ``/dev/shm`` where there is one, else ``memory`` in ``data_dir``. The installation has a
    private folder in it.
    """
    verify_timeout_s = Integer(60, min=1).tag(example="120")
    """Longest check of a session's limits after its start, in seconds; then it counts as failed."""
    watchdog_every_s = Integer(10, min=1, max=300).tag(example="5")
    """Least seconds from one strike of the watchdog for GPU memory to the next; 1 to 300.

    Readings of the GPUs are at least as often on average, and at least every 5 s. They come at random times, at most four
    times as far apart, so that no program can dodge them. It cannot be switched off, as a session could write
    libfgpu's account itself.
    """
    watchdog_tolerance_mib = Integer(256, min=0, max=LARGEST_MIB).tag(example="512")
    """GPU memory in MiB that a session may hold above its limit before the watchdog counts it.

    The code of kernels is charged, but a program can load more of it after it has filled its slice. With PyTorch, JAX and
    CuPy that was 121 MiB at most on an H100.
    """
    watchdog_compute = Enum(AROUND, "end").tag(example='"warn"')
    """Sessions with programs that compute without libfgpu, above their share: "end" them after warnings, or only "warn".

    A statically linked program is one. The watchdog warns after 5 s on average and ends after 15 s, at most after 30 s.
    Where the driver does not report compute per process, it does neither.
    """
    mps_pipe_directory = AbsolutePath("/tmp/nvidia-mps").tag(example='"/run/nvidia-mps"')
    """Where the MPS daemon has its pipes (its ``CUDA_MPS_PIPE_DIRECTORY``), for ``isolation = "mps"``.

    The daemon must run as the user that sessions run as, and containers then share the host's shared memory.
    """
    local_sessions_beyond_loopback = Bool(False).tag(example="True")
    """Let a Hub with local sessions listen beyond this machine.

    All local sessions run as one system user, so each user can act as every other.
    """


class DiskSettings(Settings):
    """Limits of a session and of a home. Local processes have none: they are the Hub's own user."""

    session_disk_mib = Whole(20 * 1024, min=0, max=LARGEST_MIB).tag(example="51200")
    """Most that a session may write outside its home (system, /tmp, its image's volumes), in MiB; 0: no limit.

    Where the engine can enforce it (see ``fgpu check``), writing more fails. Elsewhere it is watched: see ``disk_over``.
    If removed files take as much and no session explains it, no session starts on that machine.
    """
    session_files = Whole(1_000_000, min=0, max=LARGEST_FILES).tag(example="500_000")
    """Most files and folders that a session may make outside its home; 0: no limit."""
    home_disk_mib = Whole(50 * 1024, min=0, max=LARGEST_MIB).tag(example="102400")
    """Most that a user's home may take, in MiB; 0: no limit."""
    home_files = Whole(2_000_000, min=0, max=LARGEST_FILES).tag(example="500_000")
    """Most files and folders that a user's home may have; 0: no limit."""
    disk_over = Enum(("end", "warn"), "end").tag(example='"warn"')
    """Action above one of these limits: "warn" the owner, or warn and then "end" the session."""
    disk_grace_s = Integer(600, min=1).tag(example="1800")
    """Seconds from the warning to the end; at the next check if the session takes a quarter more than the limit.

    A session that starts with its home above the limit has this time, too.
    """
    disk_every_s = Integer(60, min=5, max=3600).tag(example="300")
    """Seconds between checks of sessions' disk use, 5 to 3600. Checks of large homes keep the disk busy for a while."""
