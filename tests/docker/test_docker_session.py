"""What a session gets: its slice, told in a file that it cannot change, its limits, and no privileges."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from dockerhub import DockerHub, Engine, Running

ATTEMPTS = """
import ctypes, errno, json, os

PATH = "/run/fgpu/limits"
FORGED = "/tmp/forged"
MS_REMOUNT, MS_BIND, MNT_DETACH, CLONE_NEWNS, CLONE_NEWUSER = 0x20, 0x1000, 2, 0x20000, 0x10000000
libc = ctypes.CDLL(None, use_errno=True)
with open(FORGED, "w") as file:
    file.write("fgpu-limits 1")

def call(name, *args):
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

attempts = {
    "write": lambda: open(PATH, "w"),
    "append": lambda: open(PATH, "a"),
    "truncate": lambda: os.truncate(PATH, 0),
    "chmod": lambda: os.chmod(PATH, 0o666),
    "chown": lambda: os.chown(PATH, os.getuid(), os.getgid()),
    "remove": lambda: os.remove(PATH),
    "move away": lambda: os.rename(PATH, "/tmp/old"),
    "move away with its folder": lambda: os.rename("/run/fgpu", "/run/old"),
    "replace": lambda: os.replace(FORGED, PATH),
    "put another beside it": lambda: open("/run/fgpu/limits.new", "w"),
    "unmount": lambda: call("umount2", PATH.encode(), MNT_DETACH),
    "mount over": lambda: call("mount", FORGED.encode(), PATH.encode(), None, MS_BIND, None),
    "mount over its folder": lambda: call("mount", b"/tmp", b"/run/fgpu", None, MS_BIND, None),
    "remount writable": lambda: call("mount", None, PATH.encode(), None, MS_REMOUNT | MS_BIND, None),
    "become root": lambda: os.setuid(0),
    "a user namespace of its own": lambda: call("unshare", CLONE_NEWUSER | CLONE_NEWNS),
}
results = {}
for name, attempt in attempts.items():
    try:
        attempt()
        results[name] = "done"
    except OSError as e:
        results[name] = errno.errorcode[e.errno]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def half(shared_hub: DockerHub) -> Iterator[Running]:
    """A session of half a unit where a GPU of 8 GB is worth 2, for tests that only look."""
    yield shared_hub.running("alice", fgpu="0.5", cpu="0.7", memory_mib=300)
    shared_hub.end("alice")


def limits_in(engine: Engine, running: Running) -> str:
    return engine.run_in(running.id, "cat", "/run/fgpu/limits")[1]


def test_half_an_fgpu_at_two_per_gpu_is_a_quarter_of_8_gib(engine: Engine, half: Running) -> None:
    # 8192 MiB x 0.5 / 2 = 2048 MiB; 100 % x 0.5 / 2 = 25 %.
    assert limits_in(engine, half) == (
        "fgpu-limits 1\n"
        f"session={half.session.id}\n"
        "managed=charge\n"
        "device=GPU-simulated-two-0 memory_mib=2048 device_mib=8192 context_mib=0 compute_percent=25"
        " mode=memory+compute slots=0-25 lending=1 most_percent=100 code_mib=0\n"
        "end\n"
    )


def test_two_whole_gpus_are_two_lines_and_both_uuids(engine: Engine, hub: DockerHub) -> None:
    running = hub.running("bob", fgpu="4")
    lines = limits_in(engine, running).splitlines()[3:-1]
    uuids = [share.device_uuid for share in running.session.placement.shares]
    assert len(set(uuids)) == 2
    assert lines == [
        f"device={uuid} memory_mib=8192 device_mib=8192 context_mib=0 compute_percent=100 mode=memory+compute"
        " slots=0-100 code_mib=0"
        for uuid in uuids
    ]
    assert running.env["NVIDIA_VISIBLE_DEVICES"] == ",".join(uuids)


def test_a_session_cannot_change_its_limits(engine: Engine, half: Running) -> None:
    before = limits_in(engine, half)
    results = json.loads(engine.python_in(half.id, ATTEMPTS))
    assert len(results) == 16
    refused = {"EACCES", "EPERM", "EROFS", "EBUSY", "EXDEV"}
    assert {name: code for name, code in results.items() if code not in refused} == {}
    assert limits_in(engine, half) == before


def test_the_limits_are_read_only_on_the_host_too(half: Running, shared_hub: DockerHub) -> None:
    path = shared_hub.data / "limits" / str(half.session.id) / "limits"
    assert path.stat().st_mode & 0o777 == 0o444
    mount = next(m for m in half.container["Mounts"] if m["Destination"] == "/run/fgpu")
    assert (mount["Type"], mount["RW"], mount["Source"]) == ("bind", False, str(path.parent))


def test_the_environment_informs_and_limits_nothing(engine: Engine, half: Running) -> None:
    told = {key: half.env[key] for key in half.env if key.startswith(("FGPU_", "NVIDIA_", "CUDA_"))}
    served = engine.server_env(half.id)
    assert served["FGPU_SERVICE_URL"].endswith("/services/fgpu/")
    assert {**served, **told} == served
    assert told == {
        "FGPU_SESSION_ID": str(half.session.id),
        "FGPU_AMOUNT": "0.5",
        "FGPU_MEMORY_MIB": "2048",
        "FGPU_COMPUTE_PERCENT": "25",
        "FGPU_LIMITS_FILE": "/run/fgpu/limits",
        "FGPU_SIMULATED": "1",
        "NVIDIA_VISIBLE_DEVICES": "GPU-simulated-two-0",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "CUDA_VISIBLE_DEVICES": "GPU-simulated-two-0",
    }
    more = engine.run_in(half.id, "env", "-i", "FGPU_MEMORY_MIB=99999", "/bin/cat", "/run/fgpu/limits")[1]
    assert more == limits_in(engine, half), "whatever a process sets, or forgets, its limits are the file's"


def test_cpu_memory_swap_and_processes_are_limited(engine: Engine, half: Running) -> None:
    host = half.host
    assert host["CpuQuota"] / host["CpuPeriod"] == pytest.approx(0.7, abs=1e-4)
    assert host["Memory"] == 300 * 2**20
    assert host["MemorySwap"] == host["Memory"], "no swap on top"
    assert host["PidsLimit"] == 1024


def test_administrators_settings_hold_except_limits_and_labels(engine: Engine, half: Running) -> None:
    assert half.host["ShmSize"] == 128 * 2**20
    assert "/srv/shared" in {m["Destination"] for m in half.container["Mounts"]}
    assert half.labels["lab.course"] == "of alice"
    assert half.labels["fgpu.user"] == "alice"
    # mem_limit and cpu_quota were set as well, and do not count: see the test above.


def test_a_session_has_no_privileges(engine: Engine, half: Running) -> None:
    assert half.host["CapDrop"] == ["ALL"]
    assert half.host["CapAdd"] is None
    assert half.host["SecurityOpt"] == ["no-new-privileges"]
    assert half.host["Privileged"] is False
    status = dict(
        line.split(":\t", 1)
        for line in engine.run_in(half.id, "cat", "/proc/1/status")[1].splitlines()
        if ":\t" in line
    )
    assert status["NoNewPrivs"] == "1"
    assert {status[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["Uid"].split() == ["1000"] * 4


@pytest.mark.parametrize("slug", ["root", "zero", "toor"])
def test_a_session_of_an_image_that_runs_as_root_does_not(engine: Engine, hub: DockerHub, slug: str) -> None:
    running = hub.running("bob", image=slug)
    assert running.container["Config"]["User"] == "1000:1000"
    users = engine.run_in(running.id, "ps", "-e", "-o", "uid=")[1].split()
    assert set(users) == {"1000"}


def test_labels_say_whose_it_is_also_with_an_image_that_forges_them(hub: DockerHub) -> None:
    running = hub.running("bob", image="forged", fgpu="0.5")
    ours = ("installation", "session", "attempt", "node", "user", "server", "image", "amount")
    assert {key: running.labels[f"fgpu.{key}"] for key in ours} == {
        "installation": hub.installation,
        "session": str(running.session.id),
        "attempt": "1",
        "node": "two",
        "user": "bob",
        "server": "",
        "image": "forged",
        "amount": "0.5",
    }


@pytest.mark.parametrize("user", ["a{username}b", "a{b", "{0}{{}}"])
def test_braces_in_a_users_name_stay_as_they_are(hub: DockerHub, user: str) -> None:
    assert hub.running(user).labels["fgpu.user"] == user


def test_the_engine_never_removes_a_container_by_itself(half: Running) -> None:
    # How it ended has to be seen first.
    assert half.host["AutoRemove"] is False
    assert half.host["RestartPolicy"]["Name"] in ("", "no")
    assert half.host["LogConfig"]["Config"]["max-size"] == "10m"


def test_stop_and_start_at_once_never_finds_the_name_taken(hub: DockerHub) -> None:
    names = set()
    hub.add_user("bob")
    for _ in range(4):
        names.add(hub.running("bob").name)
        assert hub.stop("bob").status_code in (202, 204)
    assert len(names) == 4
    assert "Conflict" not in hub.log_text()
