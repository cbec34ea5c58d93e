"""fgpu-smi on the simulated driver: the familiar table, and what scripts ask of it."""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from insession import holding
from sessionfolders import ROOT, UUID, MakePath, preloaded, run_in

SMI = ROOT / "labextension/jupyterlab_fgpu/smi.py"

TABLE = """\
+-----------------------------------------------------------------------------+
| FGPU-SMI N.N.N      Driver Version: N.N.N          CUDA Version: N.N        |
| simulated: no real GPU is behind these figures                              |
| session N                                                                   |
+-------------------------------+----------------------+----------------------+
| GPU  Name                     |               Bus-Id | GPU-Util  Compute M. |
| Fan  Temp  Perf Pwr:Usage/Cap |         Memory-Usage |                Share |
+===============================+======================+======================+
|   N  Simulated GPU N MiB      |     N:N:N.N          |       N%     Default |
| N/A   N/A   N/A     N/A / N/A |    NMiB / NMiB       |                      |
|                               |     slice of NMiB    |          N% of time  |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                                  |
|  GPU       PID  Type  Process name                               GPU Memory |
+=============================================================================+
|    N         N     C  PYTHON                                           NMiB |
+-----------------------------------------------------------------------------+
"""


def smi(folder: Path, *words: str, libfgpu: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
    env = {"FGPU_LIMITS_FILE": str(folder / "limits"), "COLUMNS": "80", **more}
    return run_in(folder, sys.executable, SMI, *words, **env, **({} if libfgpu else {"LD_PRELOAD": ""}))


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout.splitlines()


def without_figures(table: str) -> str:
    """Put N for each number, and one space for many, so that widths of figures do not matter."""
    table = re.sub(r"\S*python\S* -c.*?(?= \d+MiB \|)", "PYTHON ", table)
    table = re.sub(r"\b[0-9A-F]{8}:\d\d:\d\d\.\d\b", "N:N:N.N", table)
    return re.sub(r" +", " ", re.sub(r"\d+", "N", table))


def test_the_table_is_the_familiar_one(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 2048)], compute_percent=25, mode="memory+compute", slots="0-25")
    with holding(folder, 512) as pid:
        done = smi(folder)
    assert without_figures("\n".join(lines(done)) + "\n") == without_figures(TABLE)
    assert {len(line) for line in done.stdout.splitlines() if line} == {79}
    assert re.search(r"\b512MiB / 2048MiB \|", done.stdout)
    assert re.search(rf"\|    0 {pid:>9}     C  .* 512MiB \|", done.stdout)
    assert "slice of 8192MiB |          25% of time |" in done.stdout


def test_without_libfgpu_the_whole_device_shows_and_that_is_a_problem(session_folder: MakePath) -> None:
    done = smi(session_folder(devices=[(UUID, 2048)]), libfgpu=False)
    assert "0MiB / 8192MiB" in done.stdout
    assert done.returncode == 1
    assert done.stderr == "fgpu-smi: GPU 0: NVML shows 8192 MiB, the limit is 2048 MiB: see fgpu-verify\n"


def test_memory_and_processes_of_other_sessions_are_not_shown(session_folder: MakePath) -> None:
    mine = session_folder(devices=[(UUID, 2048)])
    other = session_folder(devices=[(UUID, 4096)], session=18, machine=mine)
    with holding(other, 1024), holding(mine, 100) as pid:
        told = json.loads(smi(mine, "--json").stdout)
        whole = json.loads(smi(mine, "--json", libfgpu=False).stdout)
    [gpu] = told["gpus"]
    assert (gpu["memory_used_mib"], gpu["memory_total_mib"], gpu["memory_free_mib"]) == (100, 2048, 1948)
    assert [(p["pid"], p["memory_mib"]) for p in gpu["processes"]] == [(pid, 100)]
    # The check can fail: the driver itself shows both.
    assert whole["gpus"][0]["memory_used_mib"] == 1124
    assert len(whole["gpus"][0]["processes"]) == 2


MEMORY = {"Total": "2048", "Used": "0", "Free": "2048"}


def test_only_the_devices_of_the_limits_are_shown(session_folder: MakePath) -> None:
    machine = "".join(f"gpu uuid=GPU-{n} memory_mib=8192 name=Simulated GPU {n}\n" for n in "abc")
    folder = session_folder(devices=[("GPU-c", 1024), ("GPU-a", 2048)], machine=machine)
    assert lines(smi(folder, "-L")) == [
        "GPU 0: Simulated GPU c (UUID: GPU-c)",
        "GPU 1: Simulated GPU a (UUID: GPU-a)",
    ]
    assert lines(smi(folder, "-L", "-i", "1")) == ["GPU 1: Simulated GPU a (UUID: GPU-a)"]
    assert lines(smi(folder, "--list-gpus", "--id=GPU-c")) == ["GPU 0: Simulated GPU c (UUID: GPU-c)"]
    done = smi(folder, "-L", "-i", "GPU-b")
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == "fgpu-smi: GPU GPU-b: not among this session's GPUs\n"


def test_everything_is_told_as_xml_and_a_value_a_line(folder: Path) -> None:
    with holding(folder, 512, name="<b>&") as pid:
        root = ElementTree.fromstring("\n".join(lines(smi(folder, "-q", "-x"))))
        text = lines(smi(folder, "-q"))
    assert (root.tag, root.findtext("attached_gpus")) == ("nvidia_smi_log", "1")
    asked = (
        "uuid",
        "fb_memory_usage/total",
        "fb_memory_usage/used",
        "utilization/gpu_util",
        "temperature/gpu_temp",
    )
    assert [root.findtext(f"gpu/{path}") for path in asked] == [UUID, "2048 MiB", "512 MiB", "0 %", "N/A"]
    (process,) = root.iterfind("gpu/processes/process_info")
    assert [child.text for child in process][:2] == [str(pid), "C"]
    assert (process.findtext("process_name") or "").startswith("<b>& -c")
    assert process.findtext("used_memory") == "512 MiB"
    assert [line.split() for line in text if "Total" in line or "Pid" in line] == [
        ["Total", ":", "2048", "MiB"],
        ["Pid", ":", str(pid)],
    ]


def test_a_report_of_chosen_parts_has_no_others(folder: Path) -> None:
    memory = [line.split() for line in lines(smi(folder, "-q", "-d", "MEMORY"))]
    assert memory[-4:] == [["FB", "Memory", "Usage"], *([k, ":", n, "MiB"] for k, n in MEMORY.items())]
    assert [words[0] for words in memory[-5:-4]] == ["GPU"]
    both = "\n".join(lines(smi(folder, "-i", "0", "-q", "-d", "utilization,TEMPERATURE")))
    assert "Utilization" in both
    assert "GPU Temp" in both
    assert "Memory Usage" not in both
    done = smi(folder, "-q", "-d", "ECC")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == (
        "smi.py: -q -d takes MEMORY, UTILIZATION, TEMPERATURE, POWER, PERFORMANCE, COMPUTE, PIDS"
    )


def test_monitors_have_a_line_for_each_gpu_or_process_and_end_when_told(folder: Path) -> None:
    titles = ["# gpu", "# Idx"]
    idle = [line.split() for line in lines(smi(folder, "pmon", "-c", "1"))[2:]]
    assert idle == [["0", *"---------"]]
    with holding(folder, 512) as pid:
        gpus = lines(smi(folder, "dmon", "-c", "2", "-d", "0.1"))
        processes = lines(smi(folder, "pmon", "-c", "1"))
    assert [line[:5] for line in gpus[:2]] == [line[:5] for line in processes[:2]] == titles
    assert [line.split() for line in gpus[2:]] == [["0", "-", "-", "-", "0", "0", *"------"]] * 2
    (one,) = (line.split() for line in processes[2:])
    assert one == ["0", str(pid), "C", "0", *"-----", sys.executable]
    assert {len(line.split()) for line in processes[1:]} == {10, 11}, "the second begins with a mark"


def test_a_device_of_the_limits_that_nvml_does_not_have_is_a_problem(session_folder: MakePath) -> None:
    machine = "gpu uuid=GPU-a memory_mib=8192 name=Simulated GPU\n"
    folder = session_folder(devices=[("GPU-a", 2048), ("GPU-lost", 2048)], machine=machine)
    done = smi(folder, "-L")
    assert done.stdout == "GPU 0: Simulated GPU (UUID: GPU-a)\n"
    assert (done.returncode, done.stderr) == (
        1,
        "fgpu-smi: GPU-lost, of this session's limits: Not Found\n",
    )


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["--query-gpu=index,name,memory.total,memory.used,memory.free", "--format=csv"],
            [
                "index, name, memory.total [MiB], memory.used [MiB], memory.free [MiB]",
                "0, Simulated GPU 8192 MiB, 2048 MiB, 512 MiB, 1536 MiB",
            ],
        ),
        (["--query-gpu", "memory.total,uuid", "--format", "csv,noheader,nounits"], [f"2048, {UUID}"]),
        (
            ["--query-gpu=gpu_uuid,temperature.gpu,utilization.gpu", "--format=csv,nounits"],
            ["uuid, temperature.gpu, utilization.gpu [%]", f"{UUID}, [N/A], 0"],
        ),
        (
            ["--query-compute-apps=gpu_uuid,used_memory", "--format=csv"],
            ["gpu_uuid, used_gpu_memory [MiB]", f"{UUID}, 512 MiB"],
        ),
        (["--query-compute-apps=used_gpu_memory", "--format=csv, noheader, nounits"], ["512"]),
        (
            # What GPUtil asks, which many programs use.
            [
                "--query-gpu=index,uuid,utilization.gpu,memory.total,memory.used,memory.free,driver_version,name,"
                "gpu_serial,display_active,display_mode,temperature.gpu",
                "--format=csv,noheader,nounits",
            ],
            [f"0, {UUID}, 0, 2048, 512, 1536, 580.95.05, Simulated GPU 8192 MiB, [N/A], [N/A], [N/A], [N/A]"],
        ),
    ],
)
def test_queries_answer_as_scripts_expect(folder: Path, words: list[str], wanted: list[str]) -> None:
    with holding(folder, 512):
        assert lines(smi(folder, *words)) == wanted


def test_outside_of_a_session_everything_that_nvml_has_is_shown(folder: Path) -> None:
    if Path("/run/fgpu").exists():
        pytest.skip("this is a session")
    told = json.loads(smi(folder, "--json", libfgpu=False, FGPU_LIMITS_FILE="").stdout)
    assert (told["session"], told["simulated"], told["problems"]) == (None, True, [])
    assert [(g["memory_total_mib"], g["share"]) for g in told["gpus"]] == [(8192, None)]


def test_limits_that_cannot_be_read_are_a_problem_and_never_a_total(session_folder: MakePath) -> None:
    folder = session_folder("fgpu-limits 9\n")
    done = smi(folder)
    assert done.returncode == 1
    assert "limits cannot be read: it is not a whole limits file of version 1" in done.stderr
    assert "8192MiB" not in done.stdout
    assert "0MiB /" not in done.stdout


def test_no_library_is_the_loaders_words(session_folder: MakePath, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    done = smi(session_folder(), LD_LIBRARY_PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (12, "")
    assert "libnvidia-ml.so.1: file too short" in done.stderr


OLD_NVML = r"""
/* Of a driver with one version of the lists of processes, or none: three longs for an entry, or two. */
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == 3 ? "Not Supported" : "No Permission"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)8; return (int)index; }
int nvmlDeviceGetName(void *device, char *name, unsigned size) { (void)device; strncpy(name, "Old", size); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    (void)device;
    memory[0] = 8192ull << 20, memory[1] = 8092ull << 20, memory[2] = 100ull << 20;
    return 0;
}
int nvmlDeviceGetSerial(void *device, char *serial, unsigned size) { (void)device, (void)serial, (void)size; return 4; }
int nvmlDeviceGetFanSpeed(void *device, unsigned *speed) { (void)device, (void)speed; return 2; }
#ifdef LIST
int LIST(void *device, unsigned *count, unsigned long long *entries) {
    (void)device;
    memset(entries, 0, 2 * WORDS * sizeof *entries);
    entries[0] = 4000001, entries[1] = 60ull << 20;
    entries[WORDS] = 4000002, entries[WORDS + 1] = 40ull << 20;
    *count = 2;
    return 0;
}
#endif
"""
VERIFY_LISTS = f"""
import ctypes, sys
sys.path.insert(0, {str(SMI.parent)!r})
import verify
print(verify.listed_pids(verify.open_nvml(), ctypes.c_void_p(8)))
"""
LISTED = [
    {"pid": 4000000 + n, "type": "C", "name": "[Not Found]", "memory_mib": mib}
    for n, mib in ((1, 60), (2, 40))
]


@pytest.mark.parametrize(
    ("version", "wanted", "words"), [("_v3", LISTED, 3), ("_v2", LISTED, 3), ("", LISTED, 2), (None, None, 3)]
)
def test_what_older_drivers_have_is_shown_and_what_none_has_is_not_known(
    compile_c: MakePath, tmp_path: Path, version: str | None, wanted: list[Any] | None, words: int
) -> None:
    source = tmp_path / "old_nvml.c"
    source.write_text(OLD_NVML)
    flags = [] if version is None else [f"-DLIST=nvmlDeviceGetComputeRunningProcesses{version}"]
    library = compile_c(source, "-shared", "-fPIC", "-Wno-missing-prototypes", f"-DWORDS={words}", *flags)
    (tmp_path / "libnvidia-ml.so.1").symlink_to(library)
    command = [sys.executable, str(SMI)]
    env = {"LD_LIBRARY_PATH": str(tmp_path), "FGPU_LIMITS_FILE": "", "COLUMNS": "80"}
    done = subprocess.run([*command, "--json"], env=env, capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
    [gpu] = json.loads(done.stdout)["gpus"]
    assert gpu["processes"] == wanted
    assert gpu["serial"] is None
    table = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ("|  N/A " in table.stdout.split("GPU Memory")[1]) == (wanted is None)
    assert "No running processes found" not in table.stdout
    listed = subprocess.run(
        [*command[:1], "-c", VERIFY_LISTS], env=env, capture_output=True, text=True, timeout=60
    )
    assert listed.stdout == f"{[p['pid'] for p in wanted]}\n" if wanted else "NotThere" in listed.stderr


def test_no_process_can_write_to_the_terminal_through_its_name(folder: Path) -> None:
    with holding(folder, 1, name="\x1b[2J\u00fc\n|"):
        done = smi(folder, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert re.search(r"\|    0 +\d+     C  \?\[2J\?+\| -c", done.stdout)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-x"], "-x needs -q"),
        (["topo", "-m"], "invalid choice: 'topo'"),
        (["--query-gpu=name,clocks.sm", "--format=csv"], 'field "clocks.sm" is not supported'),
        (["--query-gpu=name"], "need --format=csv"),
        (["--format=csv"], "need --format=csv"),
        (["--query-gpu=name", "--format=xml"], "--format is csv[,noheader][,nounits]"),
        (["-l", "0"], "--loop takes 0.1 to 86400 seconds"),
        (["-L", "--json"], "not allowed with argument"),
    ],
)
def test_what_is_not_supported_is_said_with_what_is(tmp_path: Path, words: list[str], text: str) -> None:
    name = tmp_path / "nvidia-smi"
    name.symlink_to(SMI)
    done = subprocess.run([sys.executable, str(name), *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("nvidia-smi: ")
    assert text in done.stderr.splitlines()[0]
    assert "--query-compute-apps=FIELD" in done.stderr
    assert "memory.total" in done.stderr


def test_a_loop_goes_on_until_it_is_interrupted(folder: Path) -> None:
    words = ["--query-gpu=memory.total", "--format=csv", "-l", "0.1"]
    env = preloaded(folder, FGPU_LIMITS_FILE=str(folder / "limits"))
    command = [sys.executable, str(SMI), *words]
    # Where the tests run in the background, it is ignored, and a child would do the same.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, text=True, preexec_fn=heard) as process:
        assert process.stdout is not None
        shown = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
    assert shown == ["memory.total [MiB]\n", "2048 MiB\n", "2048 MiB\n"]
    assert process.returncode == 130


def test_closed_pipe_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} {SMI} -L -l 0.1 | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = run_in(folder, "bash", "-c", command, FGPU_LIMITS_FILE=str(folder / "limits"))
    assert (done.returncode, done.stderr) == (0, "")
