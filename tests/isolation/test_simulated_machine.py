"""The file that says what a simulated machine has (isolation/simulated/machine.c)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sessionfolders import MakePath
from simulatedmachine import Machine

GPU = "gpu uuid=GPU-a memory_mib=1024"

Make = Callable[..., Machine]


@pytest.fixture
def read(compile_c: MakePath, tmp_path: Path) -> Callable[..., str]:
    """What the parser makes of a text."""
    import subprocess

    program = compile_c("tests/sim_machine.c", *(f"simulated/machine{part}.c" for part in PARTS))

    def read(text: str, *, refused: bool = False) -> str:
        (tmp_path / "machine").write_text(text)
        done = subprocess.run([program, tmp_path / "machine"], capture_output=True, text=True, check=False)
        assert done.returncode == int(refused), done.stdout
        return done.stdout

    return read


PARTS = ("", "_ledger", "_cgroup")


def test_a_machine_is_read_field_by_field(read: Callable[..., str]) -> None:
    said = read(
        "# two\n"
        "driver=615.10.02\n\n"
        "kernel_us=25\n"
        "gpu uuid=GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0 memory_mib=81920 context_mib=512 sm_count=144"
        " compute_capability=10.3 name=Large GPU 80 GiB  # the good one\r\n"
        "mig parent=GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0 uuid=MIG-x memory_mib=9728 name=1g.10gb\n"
        "gpu memory_mib=8192 uuid=GPU-b"
    )
    assert said.splitlines()[:2] == [
        "driver 615.10.02 cuda 13040 kernel 25000",
        "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0|Large GPU 80 GiB|81920|512|144|10.3|-1|0"
        "|0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    ]
    assert said.splitlines()[2].startswith("MIG-x|1g.10gb|9728|0|16|10.3|0|0|")
    assert said.splitlines()[3].startswith("GPU-b|Simulated GPU|8192|0|132|9.0|-1|1|")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 0, "no gpu line"),
        ("driver=580\n", 1, "no gpu line"),
        (f"{GPU}\ngpu memory_mib=1", 2, "uuid= is missing"),
        ("\ngpu uuid=GPU-a", 2, "memory_mib= is missing"),
        (f"{GPU}\n{GPU}", 2, "uuid=GPU-a stands on an earlier line too"),
        ("gpu uuid=a memory_mib=1", 1, "does not start with GPU-"),
        (f"gpu uuid=GPU-{'a' * 100} memory_mib=1", 1, "longer than 95"),
        ("gpu uuid=GPU-a memory_mib=0", 1, "memory_mib=0 is not a whole number from 1"),
        ("gpu uuid=GPU-a memory_mib=-5", 1, "memory_mib=-5 is not"),
        ("gpu uuid=GPU-a memory_mib=8GiB", 1, "memory_mib=8GiB is not"),
        ("gpu uuid=GPU-a memory_mib=99999999999999999999", 1, "is not a whole number"),
        (f"{GPU} memory_mib=5", 1, "memory_mib= stands twice"),
        (f"{GPU} size=5", 1, "unknown field size="),
        (f"{GPU} parent=GPU-a", 1, "unknown field parent="),
        (f"{GPU} big", 1, "'big' is not of the form name=value"),
        (f"{GPU} context_mib=1024", 1, "context_mib= leaves nothing"),
        (f"{GPU} compute_capability=nine", 1, "compute_capability=nine is not a version"),
        (f"{GPU} name=", 1, "name= is empty"),
        (f"{GPU}\nmig uuid=MIG-a memory_mib=1", 2, "parent= is missing"),
        (f"{GPU}\nmig parent=GPU-b uuid=MIG-a memory_mib=1", 2, "parent=GPU-b is no gpu of an earlier line"),
        (f"{GPU}\nmig parent=GPU-a uuid=GPU-c memory_mib=1", 2, "does not start with MIG-"),
        (f"{GPU}\nmig parent=GPU-a uuid=MIG-a memory_mib=1025", 2, "have 1025 MiB together, it has 1024"),
        ("driver=new", 1, "driver=new is not a version"),
        ("cuda=14.0", 1, "cuda=14.0 is not from 11.0 to 13.9"),
        ("kernel_us=x", 1, "kernel_us=x is not"),
        ("tpu uuid=GPU-a memory_mib=1", 1, "starts with none of gpu, mig"),
        ("\n".join(f"gpu uuid=GPU-{i} memory_mib=1" for i in range(17)), 17, "more than 16 GPUs"),
        (
            "\n".join([GPU, *(f"mig parent=GPU-a uuid=MIG-{i} memory_mib=1" for i in range(8))]),
            9,
            "GPU-a has 7 instances already",
        ),
        (f"gpu {'x' * 1100}", 1, "longer than 1023 characters"),
    ],
)
def test_a_mistake_is_named_with_its_line(
    read: Callable[..., str], text: str, line: int, reason: str
) -> None:
    said = read(text, refused=True)
    assert said.startswith(f"machine, line {line}: ")
    assert reason in said


def test_without_a_machine_there_is_no_device_and_the_log_says_why(simulated_machine: Make) -> None:
    machine = simulated_machine(f"{GPU}\ngpu uuid=GPU-b memory=5\n")
    assert machine.run("sim_tool", "init") == "100\n"
    assert "machine, line 2: unknown field memory=" in machine.log()
    (machine.folder / "machine").unlink()
    assert machine.run("sim_tool", "init") == "100\n"
    assert "machine cannot be read: No such file or directory" in machine.log()


def test_a_ledger_of_something_else_is_refused(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    (machine.folder / "ledger").write_bytes(b"something else")
    assert machine.run("sim_tool", "init") == "100\n"
    assert "is not a ledger of this version" in machine.log()


def test_the_ledger_is_everybodys(simulated_machine: Make) -> None:
    machine = simulated_machine(GPU)
    assert machine.run("sim_tool", "init", before=("sh", "-c", 'umask 077; exec "$@"', "sh")) == "0\n"
    assert (machine.folder / "ledger").stat().st_mode & 0o777 == 0o666


def test_devices_keep_their_place_in_the_ledger_by_uuid(simulated_machine: Make) -> None:
    first = simulated_machine("gpu uuid=GPU-a memory_mib=100\ngpu uuid=GPU-b memory_mib=200", name="host")
    second = simulated_machine("gpu uuid=GPU-b memory_mib=200", name="session")
    assert first.run("sim_tool", "info") == "100 100\n"
    (second.folder / "ledger").hardlink_to(first.folder / "ledger")
    with second.running("sim_tool", "hold", 150):
        assert first.run("sim_tool", "info", CUDA_VISIBLE_DEVICES="1") == "50 200\n"
        second.describe("gpu uuid=GPU-b memory_mib=300")
        assert second.run("sim_tool", "init") == "100\n"
        assert "GPU-b is in use with another memory_mib" in second.log()
    assert second.run("sim_tool", "info") == "300 300\n"


TWO = "gpu uuid=GPU-aa memory_mib=10 name=first\ngpu uuid=GPU-ab memory_mib=20 name=second\n"
MIG = (
    "gpu uuid=GPU-c memory_mib=100 name=cut\n"
    "mig parent=GPU-c uuid=MIG-1 memory_mib=30 name=part one\n"
    "mig parent=GPU-c uuid=MIG-2 memory_mib=40 name=part two\n"
)


@pytest.mark.parametrize(
    ("text", "visible", "expected"),
    [
        (TWO, "0", ["first 10"]),
        (TWO, "1,0", ["second 20", "first 10"]),
        (TWO, "GPU-ab", ["second 20"]),
        (TWO, "gpu-aa,1", ["first 10", "second 20"]),
        (TWO, "0,7,1", ["first 10"]),
        (TWO, "GPU-a", None),
        (TWO, "0,0", None),
        (TWO, "", None),
        (TWO, "-1", None),
        (TWO, "MIG-1", None),
        (TWO + MIG, None, ["first 10", "second 20"]),
        (MIG, None, ["part one 30"]),
        (MIG, "MIG-2", ["part two 40"]),
        (MIG, "MIG-2,MIG-1", ["part two 40"]),
        (MIG, "0", ["part one 30"]),
        (TWO + MIG, "0,MIG-1", ["first 10"]),
    ],
)
def test_visible_devices_are_chosen_as_by_the_driver(
    simulated_machine: Make, text: str, visible: str | None, expected: list[str] | None
) -> None:
    machine = simulated_machine(text)
    chosen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if expected is None:
        assert machine.run("sim_tool", "init", **chosen) == "100\n"
    else:
        assert machine.run("sim_tool", "devices", **chosen).splitlines() == expected
