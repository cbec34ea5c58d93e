"""Isolation in real containers, on simulated GPUs: what user code tries, and images that were tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dockerhub import BASE, MINI, ONE, PYTHON, USES_A_GPU, DockerHub, Engine, Running, until

pytestmark = pytest.mark.usefixtures("libfgpu_built")


TOTALS = """
import ctypes, os, sys
mode = getattr(os, sys.argv[1]) if len(sys.argv) > 1 else ctypes.DEFAULT_MODE
cuda = ctypes.CDLL("libcuda.so.1", mode=mode)
nvml = ctypes.CDLL("libnvidia-ml.so.1", mode=mode)
total, handle, memory = ctypes.c_size_t(), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
cuda.cuInit(0)
cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0)
nvml.nvmlInit_v2()
nvml.nvmlDeviceGetHandleByUUID(b"GPU-simulated-two-0", ctypes.byref(handle))
nvml.nvmlDeviceGetMemoryInfo(handle, memory)
print(total.value >> 20, memory[0] >> 20)
"""
SLICE = "2048 2048"
NAMESPACE = """
import ctypes
dlmopen = ctypes.CDLL(None).dlmopen
dlmopen.restype, dlmopen.argtypes = ctypes.c_void_p, [ctypes.c_long, ctypes.c_char_p, ctypes.c_int]
def opened(name):
    handle = dlmopen(-1, name.encode(), 2)
    assert handle, name
    return ctypes.CDLL(name, handle=handle)
"""
"""What dlmopen(LM_ID_NEWLM) finds: a driver of its own, in a namespace without what was preloaded."""
ALLOCATE = f"{USES_A_GPU}print(take(int(sys.argv[1])), flush=True)\n"
OWN_LOADER = """
loader = open("/lib64/ld-linux-x86-64.so.2", "rb").read()
assert b"/etc/ld.so.preload" in loader
import os
with open("/tmp/ld.so", "wb") as file:
    file.write(loader.replace(b"/etc/ld.so.preload", b"/etc/ld.so.ignored"))
os.chmod("/tmp/ld.so", 0o755)
"""
"""A copy of the loader that reads another file: no privilege is needed, and libfgpu is not loaded."""


@pytest.fixture(scope="module")
def half(shared_hub: DockerHub) -> Iterator[Running]:
    """A session of a quarter of a GPU of 8192 MiB."""
    yield shared_hub.running("alice", fgpu="0.5", cpu="0.7", memory_mib=300)
    shared_hub.end("alice")


# --- User code ---


def test_what_runs_in_a_container_sees_the_slice_and_cannot_take_more(engine: Engine, half: Running) -> None:
    assert engine.python_in(half.id, TOTALS) == SLICE
    assert engine.python_in(half.id, ALLOCATE, "2049") == "2"
    assert engine.python_in(half.id, ALLOCATE, "2000") == "0"


DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        environment = {"LD_LIBRARY_PATH": "/run/fgpu/simulated"}
        os.execve(sys.executable, [sys.executable, "-c", sys.argv[1]], environment)
    os.wait()
    os._exit(0)
os.wait()
"""
"""What sshd does for a login: a new session, a new environment."""

WAYS = {
    "env -i": ["env", "-i", "LD_LIBRARY_PATH=/run/fgpu/simulated", PYTHON, "-c", TOTALS],
    "LD_PRELOAD unset": ["env", "-u", "LD_PRELOAD", PYTHON, "-c", TOTALS],
    "LD_PRELOAD empty": ["env", "LD_PRELOAD=", PYTHON, "-c", TOTALS],
    "another LD_PRELOAD": ["env", "LD_PRELOAD=/lib/x86_64-linux-gnu/libm.so.6", PYTHON, "-c", TOTALS],
    "told other limits": ["env", "FGPU_MEMORY_MIB=9999", "FGPU_LIMITS_FILE=/tmp/x", PYTHON, "-c", TOTALS],
    "a new session": [PYTHON, "-c", DAEMON, TOTALS],
    "a login shell": ["bash", "-lc", f"LD_LIBRARY_PATH=/run/fgpu/simulated {PYTHON} -c '{TOTALS}'"],
    "a child of a child": ["sh", "-c", f"({PYTHON} -c '{TOTALS}')"],
    "DEEPBIND": [PYTHON, "-c", TOTALS, "RTLD_DEEPBIND"],
    "dlmopen": [
        PYTHON,
        "-c",
        NAMESPACE + TOTALS.replace('ctypes.CDLL("', 'opened("').replace(", mode=mode", ""),
    ],
    "loader by name": ["/lib64/ld-linux-x86-64.so.2", PYTHON, "-c", TOTALS],
}


@pytest.mark.parametrize("way", WAYS)
def test_limit_holds_with_any_environment(engine: Engine, half: Running, way: str) -> None:
    assert engine.output_of(half.id, *WAYS[way]) == SLICE


TAMPER = """
import json, os, shutil
results = {}
def attempt(name, function):
    try:
        function()
        results[name] = "done"
    except OSError as e:
        results[name] = e.strerror
for path in PATHS:
    attempt(f"write {path}", lambda: open(path, "w").close())
    attempt(f"append {path}", lambda: open(path, "a").close())
    attempt(f"truncate {path}", lambda: os.truncate(path, 0))
    attempt(f"remove {path}", lambda: os.remove(path))
    attempt(f"move {path} away", lambda: os.rename(path, "/tmp/moved"))
    other = shutil.copy("/etc/hostname", f"/tmp/other-{os.geteuid()}")
    attempt(f"put another at {path}", lambda: os.replace(other, path))
    attempt(f"chmod {path}", lambda: os.chmod(path, 0o666))
attempt("move the folder", lambda: os.rename("/run/fgpu", "/run/moved"))
attempt("something new in the folder", lambda: open("/run/fgpu/new", "w").close())
attempt("a new machine", lambda: open("/run/fgpu/simulated/new", "w").close())
print(json.dumps(results))
"""
READ_ONLY = [
    "/etc/ld.so.preload",
    *(
        f"/run/fgpu/{name}"
        for name in (
            "libfgpu.so",
            "limits",
            "probe",
            "probe-static",
            "fgpu-smi",
            "fgpu-verify",
            "simulated/libcuda.so.1",
            "simulated/machine",
        )
    ),
    "/usr/local/bin/fgpu-smi",
    "/usr/local/bin/fgpu-verify",
    "/usr/local/bin/nvidia-smi",
]


@pytest.mark.parametrize("user", ["", "0"], ids=["its user", "root"])
def test_isolation_cannot_be_changed_from_inside(engine: Engine, half: Running, user: str) -> None:
    code = TAMPER.replace("PATHS", repr(READ_ONLY))
    results = json.loads(engine.python_in(half.id, code, user=user))
    assert len(results) == 7 * len(READ_ONLY) + 3
    assert {name: became for name, became in results.items() if became == "done"} == {}
    assert engine.python_in(half.id, TOTALS) == SLICE


REMOVE = """
import os
for path in ("/run/fgpu/written", "/run/fgpu/simulated/ledger"):
    for attempt in (os.remove, lambda path: os.rename(path, "/tmp/x")):
        try:
            attempt(path)
            print("done", path)
        except OSError:
            pass
"""
CONTEXT = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
print(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""


def test_writable_files_of_the_isolation_harm_only_their_session(engine: Engine, hub: DockerHub) -> None:
    running = hub.running("bob", fgpu="0.5")
    assert engine.python_in(running.id, REMOVE) == ""
    # An account that makes no sense refuses everything, instead of allowing it.
    assert engine.python_in(running.id, CONTEXT) == "0"
    engine.python_in(running.id, "open('/run/fgpu/written/accounting', 'r+b').truncate(100)")
    assert engine.python_in(running.id, CONTEXT) == "2"


def test_a_container_has_its_mounts_from_the_host_read_only(half: Running, shared_hub: DockerHub) -> None:
    mounts = {m["Destination"]: m for m in half.container["Mounts"]}
    writable = {path for path, mount in mounts.items() if mount["RW"]}
    ours = {p for p in mounts if p.startswith(("/run/fgpu", "/etc/ld.so", "/usr/local/bin"))}
    # Its own word, of whether it has work, is for it to write.
    assert ours & writable == {"/run/fgpu/simulated/ledger", "/run/fgpu/lending/own-0"}
    # The limits are in the folder, which is a mount, as others take their place when the slice changes.
    assert {*READ_ONLY, "/run/fgpu"} - {"/run/fgpu/limits"} <= ours
    # The only one that all sessions share, and only with simulated GPUs, is in the host's memory.
    assert mounts["/run/fgpu/simulated/ledger"]["Source"].startswith(
        f"{shared_hub.accounts}/fgpu-{shared_hub.installation}/"
    )


FILL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
blocks, files, KEEP_SIZE = 0, 0, 1
for name in ("written/log", "written/accounting", "written/more"):
    try:
        with open("/run/fgpu/" + name, "ab") as file:
            offset, length = ctypes.c_long(0), ctypes.c_long(64 << 20)
            assert libc.fallocate(file.fileno(), KEEP_SIZE, offset, length) == -1
        with open("/run/fgpu/" + name, "ab") as file:
            while True:
                file.write(b"x" * (1 << 20))
                file.flush()
    except OSError:
        pass
    blocks += os.stat("/run/fgpu/" + name).st_blocks
try:
    for files in range(100_000):
        open(f"/run/fgpu/written/{files}", "w").close()
except OSError:
    pass
print(blocks * 512 <= 4 << 20, files < 64)
"""


def test_session_cannot_fill_the_hubs_disk(engine: Engine, hub: DockerHub) -> None:
    running = hub.running("bob", fgpu="0.2")
    other = hub.running("carol", fgpu="0.2")
    folder = hub.data / "limits"
    before = sum(path.lstat().st_blocks for path in folder.rglob("*"))
    assert engine.python_in(running.id, FILL) == "True True"
    assert sum(path.lstat().st_blocks for path in folder.rglob("*")) == before
    assert engine.python_in(other.id, CONTEXT) == "0", "nobody else is harmed"


BYPASSED = "BYPASSED (expected)"


def test_fgpu_verify_proves_it_in_any_image(engine: Engine, half: Running) -> None:
    status, said = engine.run_in(
        half.id, "env", f"PATH={Path(PYTHON).parent}:/usr/bin:/bin", "/run/fgpu/fgpu-verify", "--json"
    )
    found = json.loads(said[said.index("{") :])
    by_check = {check["name"]: check["verdict"] for check in found["checks"]}
    not_proved = {name: verdict for name, verdict in by_check.items() if verdict != "PROVED"}
    assert not_proved.pop("static") in (BYPASSED, "NOT TRIED"), said
    assert not_proved == {"loader-copy": BYPASSED, "raw-ioctl": "NOT TRIED"}, said
    assert set(by_check) >= {"env-cleared", "preload-file", "limits-file", "deepbind", "dlmopen", "compute"}
    assert status == 0


# --- Configuration and images ---

DISPLACING = """
c.FGPUSpawner.volumes = {"/usr/share/dict": "/run/fgpu/limits", "fgpu-test-run": "/run"}
c.FGPUSpawner.extra_host_config = {
    "binds": ["/etc/hostname:/etc/ld.so.preload:rw", "/usr/share/dict:/srv/dict:ro"],
    "tmpfs": {"/usr/local/bin/fgpu-smi": ""},
}
c.FGPUSpawner.extra_create_kwargs = {"environment": {"LD_PRELOAD": "/x.so", "NVIDIA_VISIBLE_DEVICES": "all"}}
c.Spawner.environment = {"CUDA_VISIBLE_DEVICES": "all", "CUDA_MPS_PIPE_DIRECTORY": "/x", "KEPT": "1"}
"""


def test_configuration_cannot_displace_the_isolation(
    engine: Engine, make_hub: Callable[..., DockerHub]
) -> None:
    hub = make_hub(after=MINI + DISPLACING).start()
    running = hub.running("alice", fgpu="0.5")
    assert engine.python_in(running.id, TOTALS) == SLICE
    for path in ("/run/fgpu/limits", "/etc/ld.so.preload", "/usr/local/bin/fgpu-smi"):
        assert f"something else is configured to be mounted at {path}; it is left out" in hub.log_text()
    mounted = {m["Destination"] for m in running.container["Mounts"]}
    assert {"/srv/dict", "/run"} <= mounted, "the rest is as it was configured"
    assert "LD_PRELOAD" not in running.env
    assert "CUDA_MPS_PIPE_DIRECTORY" not in running.env
    assert (
        running.env["NVIDIA_VISIBLE_DEVICES"] == running.env["CUDA_VISIBLE_DEVICES"] == "GPU-simulated-two-0"
    )
    assert engine.server_env(running.id)["KEPT"] == "1"
    engine.remove(running.name)
    engine.remove_volume("fgpu-test-run")


KNOBS = """
FROM {base}
ENV LD_AUDIT=/x.so CUDA_MPS_PIPE_DIRECTORY=/x NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=all \\
    CUDA_DEVICE_MEMORY_LIMIT=9g LD_LIBRARY_PATH=/opt/images/lib KEPT=1
"""
TAMPERED = {
    # The loader reads another file: what runs in the image is not held.
    "loader": "FROM {base}\nUSER root\nRUN sed -i s,/etc/ld.so.preload,/etc/ld.so.ignored, "
    "$(readlink -f /lib64/ld-linux-x86-64.so.2)\nUSER 1000\n",
    # It is the user's to move away.
    "run": "FROM {base}\nUSER root\nRUN mkdir -p /usr/local/bin && chown -R 1000 /run /usr/local\nUSER 1000\n",
    # A report that was written beforehand, by a loader that is a program of its own.
    "knobs": KNOBS,
    # What is mounted over a link is mounted where it leads.
    "link": "FROM {base}\nUSER root\nRUN rm -f /etc/ld.so.preload && ln -s /home/jovyan/mine /etc/ld.so.preload && "
    "touch /home/jovyan/mine && chown 1000 /home/jovyan/mine\nUSER 1000\n",
    "entrypoint": "FROM {base}\nENTRYPOINT "
    '["/bin/sh", "-c", "rm -f /etc/ld.so.preload; echo > /etc/ld.so.preload || true; '
    'exec env -u LD_LIBRARY_PATH \\"$@\\"", "-"]\n',
}


@pytest.fixture(scope="module")
def tampered(engine: Engine, image: str, make_hub: Callable[..., DockerHub]) -> DockerHub:
    """A Hub with images that were tampered with, and a watchdog that looks every second."""
    images = {slug: engine.build(slug, text.replace("{base}", BASE)) for slug, text in TAMPERED.items()}
    settings = {"watchdog_every_s": 1, "watchdog_tolerance_mib": 128}
    return make_hub(images={"python": BASE, **images}, **settings).start()


def test_session_without_isolation_is_ended_and_its_owner_learns_why(
    tampered: DockerHub,
) -> None:
    hub = tampered
    hub.add_user("alice")
    hub.spawn("alice", options={**ONE, "fgpu": "0.5", "image": "loader"})
    ended = hub.last("alice")
    assert (ended.state, ended.end_cause, ended.started_at_s) == ("ERROR", "ISOLATION_FAILED", None)
    assert ended.message == (
        "your session was ended because its GPU limit of 2048 MiB was not in force (CUDA reported 8192 MiB); this is "
        "usually the fault of the image (loader): try another one, or ask an administrator"
    )
    until(lambda: hub.engine.of_installation(hub.installation) == {}, what="its container is removed")


def test_image_with_another_preload_file_is_not_trusted(tampered: DockerHub) -> None:
    hub = tampered
    hub.add_user("alice")
    hub.spawn("alice", options={**ONE, "fgpu": "0.5", "image": "link"})
    ended = until(lambda: [s for s in hub.store.ended(user="alice", limit=9) if s.request.image == "link"])[0]
    assert ended.end_cause == "ISOLATION_FAILED"
    assert "(/etc/ld.so.preload " in str(ended.message)


def test_images_isolation_variables_are_removed_and_its_search_path_comes_after_ours(
    tampered: DockerHub, engine: Engine
) -> None:
    running = tampered.running("bob", image="knobs", fgpu="0.5")
    assert engine.python_in(running.id, TOTALS) == SLICE
    inside = dict(
        line.split("=", 1) for line in engine.output_of(running.id, "env").splitlines() if "=" in line
    )
    assert {"LD_AUDIT", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_DEVICE_MEMORY_LIMIT"}.isdisjoint(inside)
    assert inside["NVIDIA_VISIBLE_DEVICES"] == "GPU-simulated-two-0"
    assert inside["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert inside["LD_LIBRARY_PATH"] == "/run/fgpu/simulated:/opt/images/lib"
    assert inside["KEPT"] == "1"
    tampered.end("bob")


@pytest.mark.parametrize("slug", ["run", "entrypoint"])
def test_image_prepared_to_avoid_isolation_does_not_avoid_it(
    tampered: DockerHub, engine: Engine, slug: str
) -> None:
    running = tampered.running("carol", image=slug, fgpu="0.5")
    code = TAMPER.replace("PATHS", repr(READ_ONLY))
    results = json.loads(engine.python_in(running.id, code))
    done = {name for name, became in results.items() if became == "done"}
    assert done == set(), "not in an image where the folder above is the user's, either"
    assert engine.output_of(running.id, *WAYS["env -i"]) == SLICE
    tampered.end("carol")
