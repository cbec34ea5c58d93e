"""The code of kernels counts against the slice: as the driver counts it for a process, or as the host does."""

from __future__ import annotations

import textwrap

from sessionfolders import UUID, MakePath
from test_hooks_accounting import Program, run
from test_limits_change import set_limit

from fgpuspawner.isolation import limits

MIB = 2**20
CODE_MIB = 100
MACHINE = f"gpu uuid={UUID} memory_mib=8192 context_mib=0 code_mib={CODE_MIB} name=Simulated GPU\n"
EAGER = """
image = b".version 8.0\\n.target sm_90\\n.visible .entry one()\\n{ ret; }\\n"
def load(count=3):
    return [cuda.new("cuModuleLoadData", image) for _ in range(count)]
def fill(mib=10):
    taken = 0
    while cuda.result("cuMemAlloc_v2", byref(c_ulonglong()), mib * MIB) == 0:
        taken += mib
    return taken
"""


def test_program_that_loads_all_code_and_fills_its_slice_is_refused_within_it(
    session_folder: MakePath,
) -> None:
    folder = session_folder(devices=[(UUID, 1000)], machine=MACHINE, code_mib=0)
    taken = run(folder, EAGER + "modules = load(); print(fill(), cuda.used_mib())")
    assert taken == "700 1000.0\n", "with 300 MiB of code it holds exactly its slice"


def test_asynchronous_allocations_meet_the_same_limit(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 1000)], machine=MACHINE, code_mib=0)
    program = """
    modules, taken = load(), 0
    while cuda.result("cuMemAllocAsync", byref(c_ulonglong()), 20 * MIB, 0) == 0:
        taken += 20
    print(600 < taken <= 700, taken + fill(1) <= 700, cuda.used_mib())
    """
    assert run(folder, EAGER + textwrap.dedent(program)) == "True True 1000.0\n"


def test_code_of_all_processes_counts_until_they_end(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 1000)], machine=MACHINE, code_mib=0)
    first = Program(folder, EAGER + "modules = load(2); print(fill(500)); print(fill()); input()")
    assert (first.line(), first.line()) == ("500", "300")
    second = Program(folder, EAGER + "print(fill())")
    assert second.end() == "0\n"
    first.go()
    first.end()
    assert run(folder, EAGER + "print(fill())") == "1000\n"


def test_small_programs_do_not_start_nvml(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 1000)], machine=MACHINE, code_mib=0)
    program = 'modules = load(); cuda.alloc({}); print("libnvidia-ml" in open("/proc/self/maps").read())'
    assert run(folder, EAGER + program.format(60)) == "False\n"
    assert run(folder, EAGER + program.format(70)) == "True\n"


def test_process_that_nvml_does_not_list_is_held_to_the_hosts_count(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 1000)], machine=MACHINE, code_mib=300)
    (folder / "simulated" / "libnvidia-ml.so.1").unlink()
    assert run(folder, EAGER + "modules = load(); print(cuda.used_mib(), fill())") == "300.0 700\n"


def test_counts_of_the_host_and_of_the_processes_are_of_the_same_memory(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 1000)], machine=MACHINE, code_mib=350)
    assert run(folder, EAGER + "modules = load(); print(fill())") == "650\n"


def test_host_changes_its_count_while_a_program_runs(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 1000)], machine=MACHINE, code_mib=0)
    (folder / "simulated" / "libnvidia-ml.so.1").unlink()
    limits.begin_revisions(folder)
    program = Program(folder, EAGER + "modules = load(); print(cuda.alloc(600) > 0); input(); print(fill())")
    program.line()
    set_limit(folder, 1000, code_mib=300)
    program.go()
    assert program.end() == "100\n"


def test_limits_of_an_older_spawner_charge_no_code(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 1000)], machine=MACHINE)
    assert run(folder, EAGER + "modules = load(); print(fill())") == "1000\n"
