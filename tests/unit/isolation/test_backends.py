"""Which backend a node gets and why, and what each gives a session, as a container and as a local process."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sessions import MIB, session

from fgpu_scheduler import (
    BadSettings,
    Device,
    Node,
    Share,
    ShareMode,
)
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.backends import BACKENDS, REGION_BYTES, DriverCgroup
from fgpuspawner.isolation.base import CannotPrepare, Host, Mount, Prepared
from fgpuspawner.isolation.choice import choose
from fgpuspawner.isolation.manager import make_backends
from fgpuspawner.isolation.native import Native
from fgpuspawner.isolation.nvml_reader import NvmlReader, NvmlUnknown
from fgpuspawner.settings.isolation import ISOLATION

GPU = Device("GPU-1f", "lab", 0, "NVIDIA A100", 40960, 2000)
MIG = replace(GPU, uuid="MIG-2a", model="NVIDIA A100 MIG 1g.5gb", memory_mib=4864)
SIMULATED = Device("GPU-simulated-lab-0", "lab", 0, "Simulated GPU 8192 MiB", 8192, 2000, True)
R580: dict[str, Any] = {"driver": "580.65", "cgroup_v2": True}
R615: dict[str, Any] = {"driver": "615.71", "memory_limits": True, "cgroup_v2": True, "as_root": True}


def node(*devices: Device) -> Node:
    return Node("lab", "default", 16000, 65536, devices)


@pytest.fixture
def host(tmp_path: Path, native_parts: Native) -> Host:
    """A machine where sessions are containers and everything was built."""
    commands = tmp_path / "data" / "tools"
    (commands / "simulated").mkdir(parents=True)
    for name in ("fgpu-smi", "fgpu-verify", "simulated/nvidia-smi"):
        (commands / name).touch(mode=0o755)
    machine = tmp_path / "data" / "simulated" / "lab"
    machine.mkdir(parents=True)
    return Host(
        data=tmp_path / "data",
        own_root=True,
        native=native_parts,
        accounting=tmp_path / "shm" / "fgpu-abc",
        commands=commands,
        mps_pipe=tmp_path / "mps",
    )


# --- Which ---


def test_the_settings_know_every_backend() -> None:
    assert set(ISOLATION) == {"auto", *(kind.name for kind in BACKENDS)}


@pytest.mark.parametrize(
    ("devices", "facts", "name", "why"),
    [
        ([GPU], R580, "interposer", "not driver-cgroup: driver 580.65 has no memory limits for cgroups"),
        ([GPU], R615, "driver-cgroup", "not mig: GPU-1f is not a MIG instance"),
        ([GPU], {**R615, "cgroup_v2": False}, "interposer", "this machine does not use cgroup v2"),
        ([GPU], {**R615, "as_root": False}, "interposer", "the Hub does not run as root"),
        (
            [GPU],
            {**R615, "own_root": False},
            "interposer",
            "local processes, which have no cgroup of their own",
        ),
        ([MIG], R580, "mig", "held by the hardware"),
        ([MIG], R615, "mig", "held by the hardware"),
        ([GPU, MIG], R615, "interposer", "the driver limits no memory of MIG instances"),
        ([SIMULATED], {}, "interposer", "its GPUs are simulated"),
        ([SIMULATED], R615, "interposer", "its GPUs are simulated"),
        ([], {}, "none", "it has no GPU"),
    ],
)
def test_auto_takes_the_strongest_and_says_why(
    devices: list[Device], facts: dict[str, Any], name: str, why: str, host: Host
) -> None:
    choice = choose("auto", node(*devices), make_backends(replace(host, **facts)))
    assert (choice.backend.name, choice.loud) == (name, False)
    assert why in choice.reason


@pytest.mark.parametrize("devices", [[GPU], [MIG], [GPU, MIG]])
@pytest.mark.parametrize("facts", [R580, R615])
def test_real_gpus_without_a_compiler_are_refused_with_what_to_do(
    devices: list[Device], facts: dict[str, Any], host: Host
) -> None:
    backends = make_backends(replace(host, native=None, **facts))
    with pytest.raises(BadSettings) as refused:
        choose("auto", node(*devices), backends)
    words = str(refused.value)
    assert "apt-get install gcc make libc6-dev" in words
    assert "then install fgpuspawner again" in words
    assert "c.FGPU.isolation = 'none'" in words
    assert "\n" not in words


@pytest.mark.parametrize(
    ("name", "devices", "facts", "trouble"),
    [
        ("mig", [GPU], {}, "GPU-1f is not a MIG instance"),
        ("mig", [MIG, GPU], {}, "GPU-1f is not a MIG instance"),
        ("driver-cgroup", [GPU], R580, "driver 580.65 has no memory limits"),
        ("driver-cgroup", [SIMULATED], R615, "the GPUs are simulated"),
        (
            "mps",
            [GPU],
            {"mps_trouble": "no MPS daemon has its pipes in /x"},
            "no MPS daemon has its pipes in /x",
        ),
        ("mps", [GPU], {"mps_pipe": None}, "c.FGPU.mps_pipe_directory is empty"),
        ("mps", [MIG], {}, "MIG instances need a daemon each"),
        ("mps", [SIMULATED], {}, "the GPUs are simulated"),
        ("mps", [GPU], {"native": None}, "libfgpu is not built"),
        ("interposer", [GPU], {"native": None}, "libfgpu is not built"),
        (
            "interposer",
            [GPU],
            {"own_root": False, "data": Path("/srv/my data")},
            "LD_PRELOAD cannot name /srv/my data",
        ),
    ],
)
def test_unavailable_configured_backend_is_refused(
    name: str, devices: list[Device], facts: dict[str, Any], trouble: str, host: Host
) -> None:
    with pytest.raises(BadSettings) as refused:
        choose(name, node(*devices), make_backends(replace(host, **facts)))
    assert str(refused.value).startswith(f"c.FGPU.isolation is {name!r}, which node 'lab' cannot have: ")
    assert trouble in str(refused.value)


def test_every_enforcing_backend_is_verified_and_watched() -> None:
    assert {kind.name for kind in BACKENDS if not (kind.verified and kind.watched)} == {"none"}


# --- What each gives a session ---


def test_only_the_interposer_parks_sessions(host: Host) -> None:
    backends = make_backends(replace(host, parks=True))
    assert [name for name, backend in backends.items() if not backend.unparkable] == ["interposer"]


def test_a_session_on_demand_is_refused_where_none_can_be_parked(host: Host) -> None:
    """Its GPU would be open to it, and others have its share."""
    asked = session(7, Share.of(SIMULATED, 500))
    asked = replace(asked, request=replace(asked.request, on_demand=True))
    for one in (host, replace(host, elsewhere=True), replace(host, parks=True, driver="565.1")):
        for backend in make_backends(one).values():
            with pytest.raises(CannotPrepare, match=r"no GPU on demand: .*; ask for the GPU at the start"):
                backend.prepare(asked, (SIMULATED,), ())


Prepare = Callable[..., Prepared]


@pytest.fixture
def prepare(host: Host) -> Prepare:
    """Prepare a session with a quarter of a device, by a backend on this host."""

    def prepare(name: str, device: Device = GPU, *more: Device, milli: int = 500, **facts: Any) -> Prepared:
        devices = (device, *more)
        backend = make_backends(replace(host, **facts))[name]
        return backend.prepare(session(7, *(Share.of(d, milli) for d in devices)), devices, ())

    return prepare


def by_target(prepared: Prepared) -> dict[str, Mount]:
    found = {mount.target: mount for mount in prepared.mounts}
    assert len(found) == len(prepared.mounts), "nothing is mounted twice in one place"
    return found


LIBFGPU = {
    "/run/fgpu",
    "/etc/ld.so.preload",
    "/run/fgpu/libfgpu.so",
    "/run/fgpu/probe",
    "/run/fgpu/probe-static",
    "/run/fgpu/fgpu-smi",
    "/run/fgpu/fgpu-verify",
    "/usr/local/bin/fgpu-smi",
    "/usr/local/bin/fgpu-verify",
}
STAYS = LIBFGPU | {"/run/fgpu/limits"}
"""Where a slice cannot change while a session runs."""


def test_a_container_has_libfgpu_from_read_only_files_of_their_own(prepare: Prepare, host: Host) -> None:
    prepared = prepare("interposer")
    found = by_target(prepared)
    assert set(found) == LIBFGPU
    assert {target for target, mount in found.items() if not mount.read_only} == set()
    assert found.pop("/run/fgpu") == Mount(host.data / "limits" / "7", "/run/fgpu")
    assert all(mount.source.is_file() for mount in found.values())
    assert found["/etc/ld.so.preload"].source.read_text() == "/run/fgpu/libfgpu.so\n"
    assert "/run/fgpu/limits" not in found, "what is mounted as a file stays the file that it was"
    assert limits.read(host.data / "limits" / "7") == prepared.limits
    assert prepared.environment == {}, "no limit is in the environment, where it could be changed"
    assert prepared.search_paths == {}


@pytest.mark.parametrize("name", ["interposer", "mps"])
def test_opencl_is_allowed_by_a_file_beside_the_limits(prepare: Prepare, host: Host, name: str) -> None:
    own = host.data / "limits" / "7"
    prepare(name)
    assert not (own / "opencl").exists()
    found = by_target(prepare(name, opencl=True))
    assert found["/run/fgpu/opencl"] == Mount(own / "opencl", "/run/fgpu/opencl")
    assert prepare(name, own_root=False).mounts == ()
    assert not (own / "opencl").exists(), "a second launch may not have what the first one had"
    prepare(name, own_root=False, opencl=True)
    assert (own / "opencl").is_file()


def local_account(prepare: Prepare, host: Host) -> Path:
    prepare("interposer", own_root=False)
    return (host.data / "limits" / "7" / "accounting").resolve()


def test_accounting_file_is_in_memory_in_a_private_folder(prepare: Prepare, host: Host) -> None:
    assert host.accounting is not None
    account = local_account(prepare, host)
    assert account == host.accounting / "7" / "accounting"
    assert account.stat().st_size == REGION_BYTES
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (account, account.parent, account.parent.parent)]
    # The file is any user's, as the container's is not the Hub's; the folder above keeps others out.
    assert modes == [0o666, 0o700, 0o700]


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_file_modes_are_exact_under_any_umask(prepare: Prepare, host: Host, umask: int) -> None:
    before = os.umask(umask)
    try:
        found = by_target(prepare("interposer"))
    finally:
        os.umask(before)
    modes = {target: stat.S_IMODE(mount.source.stat().st_mode) for target, mount in found.items()}
    own = host.data / "limits" / "7"
    assert modes["/etc/ld.so.preload"] == 0o444
    assert [stat.S_IMODE((own / name).stat().st_mode) for name in ("limits", "revision")] == [0o444, 0o444]
    assert stat.S_IMODE((host.data / "limits" / "7" / "written").stat().st_mode) == 0o777


def test_a_second_launch_begins_with_an_account_of_nothing(prepare: Prepare, host: Host) -> None:
    first = local_account(prepare, host)
    first.write_bytes(b"x" * 100)
    second = local_account(prepare, host)
    assert second == first
    assert second.read_bytes() == bytes(REGION_BYTES)


@pytest.mark.parametrize("what", ["link", "another user's", "file"])
def test_foreign_folder_in_shared_memory_is_refused(
    prepare: Prepare, host: Host, tmp_path: Path, what: str
) -> None:
    assert host.accounting is not None
    host.accounting.parent.mkdir()
    if what == "link":
        (tmp_path / "other").mkdir()
        host.accounting.symlink_to(tmp_path / "other")
    elif what == "file":
        host.accounting.touch()
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        host.accounting.mkdir()
        os.chown(host.accounting, 1234, 1234)
    with pytest.raises(CannotPrepare, match="account could not be made"):
        prepare("interposer", own_root=False)


def test_a_simulated_device_comes_with_its_driver_and_nvidia_smi(prepare: Prepare, host: Host) -> None:
    prepared = prepare("interposer", SIMULATED)
    found = by_target(prepared)
    assert set(found) - LIBFGPU == {
        "/run/fgpu/simulated/machine",
        "/run/fgpu/simulated/libcuda.so.1",
        "/run/fgpu/simulated/libcuda.so",
        "/run/fgpu/simulated/libnvidia-ml.so.1",
        "/run/fgpu/simulated/ledger",
        "/usr/local/bin/nvidia-smi",
    }
    at = "/run/fgpu/simulated/machine"
    assert found[at] == Mount(host.data / "simulated" / "lab" / "machine", at)
    writable = {target for target, mount in found.items() if not mount.read_only}
    assert writable == {"/run/fgpu/simulated/ledger"}
    assert prepared.search_paths == {"LD_LIBRARY_PATH": "/run/fgpu/simulated"}


def test_a_local_process_finds_the_same_in_its_folder(prepare: Prepare, host: Host) -> None:
    prepared = prepare("interposer", SIMULATED, own_root=False)
    own = host.data / "limits" / "7"
    assert prepared.mounts == ()
    assert prepared.environment == {"LD_PRELOAD": str(own / "libfgpu.so")}
    tools = host.data / "tools"
    assert prepared.search_paths == {
        "LD_LIBRARY_PATH": str(own / "simulated"),
        "PATH": f"{tools / 'simulated'}:{tools}",
    }
    assert {path.name for path in own.iterdir()} == {
        "libfgpu.so",
        "limits",
        "revision",
        "accounting",
        "log",
        "probe",
        "probe-static",
        "fgpu-smi",
        "fgpu-verify",
        "simulated",
    }
    assert (own / "libfgpu.so").read_text() == "libfgpu.so"
    assert (own / "accounting").stat().st_size == REGION_BYTES
    assert (own / "simulated").resolve() == host.data / "simulated" / "lab"


def test_driver_that_limits_memory_is_not_asked_through_the_environment(prepare: Prepare) -> None:
    prepared = prepare("driver-cgroup", **R615)
    assert prepared.environment == {}, "the toolkit's hook would make a reservation that outlives the session"
    assert set(by_target(prepared)) == LIBFGPU, "libfgpu holds what the driver leaves out"
    assert (prepared.files[0].parent / "revision").is_file(), "its slice can change"


@pytest.mark.parametrize(
    ("answer", "problems"),
    [
        ({"soft_limit": 0, "hard_limit": 10240 * MIB}, 0),
        ({"soft_limit": 10240 * MIB, "hard_limit": 10240 * MIB}, 1),
        ({"soft_limit": 0, "hard_limit": 10241 * MIB}, 1),
        ({"soft_limit": 0, "hard_limit": 2**64 - 1}, 1),
        (NvmlUnknown("Insufficient Permissions"), 1),
    ],
)
async def test_driver_sets_a_hard_limit_without_a_reservation_and_reads_it_back(
    prepare: Prepare, host: Host, monkeypatch: pytest.MonkeyPatch, answer: Any, problems: int
) -> None:
    asked: list[Any] = []

    async def ask(reader: NvmlReader, question: Any) -> Any:
        asked.append(question)
        if isinstance(answer, NvmlUnknown):
            raise answer
        return answer

    monkeypatch.setattr(NvmlReader, "ask", ask)
    backend = DriverCgroup(replace(host, **R615))
    found = await backend.driver_problems(prepare("driver-cgroup", **R615).limits, "/docker/1f")
    assert len(found) == problems
    assert all('c.FGPU.isolation = "interposer"' in words for words in found)
    path = "/sys/fs/cgroup/docker/1f"
    assert asked == [{"do": "limit", "uuid": "GPU-1f", "cgroup": path, "hard_limit": 10240 * MIB}]


async def test_session_whose_cgroup_is_unknown_is_not_handed_out(prepare: Prepare, host: Host) -> None:
    backend = DriverCgroup(replace(host, **R615))
    assert await backend.driver_problems(prepare("driver-cgroup", **R615).limits, None) == [
        "the session's cgroup is not known, so the driver cannot limit its memory"
    ]


def test_a_part_of_an_instance_is_held_by_libfgpu(prepare: Prepare) -> None:
    prepared = prepare("mig", MIG)
    assert set(by_target(prepared)) == STAYS
    assert (prepared.limits.devices[0].uuid, prepared.limits.devices[0].memory_mib) == ("MIG-2a", 1152)


def test_mps_gets_exactly_one_entry_for_each_visible_device(prepare: Prepare, host: Host) -> None:
    small = replace(GPU, uuid="GPU-3c", memory_mib=16384)
    prepared = prepare("mps", GPU, small, milli=2000)
    assert prepared.environment == {
        "CUDA_MPS_PIPE_DIRECTORY": str(host.mps_pipe),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=40960M,1=16384M",
    }
    one = prepare("mps", GPU).environment
    assert one["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M", "a second entry would drop every limit"
    assert one["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"


def test_mps_does_not_limit_the_compute_of_memory_only(host: Host) -> None:
    share = Share(GPU.uuid, 500, 10240, 0, ShareMode.MEMORY)
    prepared = make_backends(host)["mps"].prepare(session(7, share), (GPU,), ())
    assert prepared.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"
    assert prepared.environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=10240M"


def test_mps_shares_its_pipes_and_memory_and_holds_compute_itself(prepare: Prepare, host: Host) -> None:
    prepared = prepare("mps", GPU)
    found = by_target(prepared)
    assert set(found) - STAYS == {str(host.mps_pipe)}
    assert found[str(host.mps_pipe)].read_only is False
    assert prepared.hosts_ipc
    assert prepared.limits.devices[0].slots == (), "libfgpu's slots would halve MPS's part again"
    local = prepare("mps", GPU, own_root=False)
    assert (local.mounts, local.hosts_ipc) == ((), False)


@pytest.mark.parametrize("name", [kind.name for kind in BACKENDS])
@pytest.mark.parametrize("own_root", [True, False])
def test_teardown_leaves_nothing_and_can_be_done_twice(
    prepare: Prepare, host: Host, name: str, own_root: bool
) -> None:
    prepared = prepare(name, MIG if name == "mig" else GPU, own_root=own_root, **R615)
    assert all(path.exists() for path in prepared.files)
    backend = make_backends(host)[name]
    backend.teardown(7)
    backend.teardown(7)
    assert not any(path.exists() for path in prepared.files)
    assert not (host.data / "limits" / "7").exists()
    assert host.native is not None
    assert host.native.library.exists(), "links are not followed"
