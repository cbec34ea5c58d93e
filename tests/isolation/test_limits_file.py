"""What libfgpu takes for a limits file (isolation/libfgpu/limits.c): just what isolation/README.md says."""

from __future__ import annotations

import os
import random
import re
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from regiontool import Tool
from sessionfolders import MakePath, write_read_only

SOURCES = ("tests/limits_check.c", "libfgpu/folder.c", "libfgpu/limits.c")
HEAD = "fgpu-limits 1\nsession=17\nmanaged=charge\n"
DEVICE = "device=GPU-1 memory_mib=2048 device_mib=8192 context_mib=0 compute_percent=25 mode=memory+compute slots=50-75\n"
GOOD = f"{HEAD}{DEVICE}end\n"
OTHER = "device=MIG-2/3 memory_mib=1 device_mib=1 context_mib=300 compute_percent=100 mode=memory slots=-\n"
Check = Callable[[Sequence[bytes]], list[str]]


@pytest.fixture(scope="session")
def check(compile_c: MakePath) -> Check:
    """What libfgpu says to texts, one by one."""
    return lambda texts: _run(compile_c(*SOURCES), texts)


@pytest.fixture(scope="session")
def check_with_sanitizers(compile_c: MakePath) -> Check:
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    program = compile_c(*SOURCES, *flags)
    return lambda texts: _run(program, texts)


def _run(program: Path, texts: Sequence[bytes]) -> list[str]:
    given = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    done = subprocess.run([program], input=given, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode("ascii").splitlines()


def with_device(**fields: str) -> str:
    """Return a good file in which fields of the device have other values."""
    line = DEVICE
    for name, value in fields.items():
        line = re.sub(rf"{name}=\S+", f"{name}={value}", line)
    return f"{HEAD}{line}end\n"


def devices(count: int) -> str:
    return HEAD + "".join(DEVICE.replace("GPU-1 ", f"GPU-1{i} ") for i in range(count)) + "end\n"


WELL_FORMED = {
    "one device": GOOD,
    "two devices": f"{HEAD}{DEVICE}{OTHER}end\n",
    "sixteen devices": devices(16),
    "managed refused": GOOD.replace("charge", "refuse"),
    "long session": GOOD.replace("17", "9" * 18, 1),
    "session 0": GOOD.replace("17", "0", 1),
    "long uuid": with_device(device="GPU-" + "x" * 91),
    "whole device": with_device(memory_mib="8192"),
    "memory only": with_device(compute_percent="0", mode="memory", slots="-"),
    "compute held by others": with_device(mode="memory", slots="-"),
    "all slots": with_device(compute_percent="100", slots="0-100"),
    "fifty parts": with_device(
        compute_percent="50", slots=",".join(f"{i}-{i + 1}" for i in range(0, 100, 2))
    ),
    "parts that touch": with_device(slots="0-10,10-25"),
    "lending": with_device(slots="50-75 lending=100 most_percent=25"),
    "code": with_device(slots="50-75 code_mib=102"),
    "lending and code": with_device(slots="50-75 lending=1 most_percent=25 code_mib=0"),
    "largest": with_device(memory_mib="9" * 10, device_mib="9" * 10, context_mib="9" * 10),
}


@pytest.mark.parametrize("text", WELL_FORMED.values(), ids=WELL_FORMED.keys())
def test_what_the_readme_allows_is_read_as_it_stands_there(check: Check, text: str) -> None:
    assert check([text.encode()]) == ["good " + text.replace("\n", ";")]


MALFORMED = {
    "": "line 1: the file is empty",
    "fgpu-limits 1": "line 1: the file ends here, within a line: it is not complete",
    GOOD.replace("limits 1", "limits 2"): (
        "line 1: this is version 2 of the limits file, and libfgpu knows version 1 only: "
        "install the libfgpu of the spawner that wrote it"
    ),
    "fgpu-limits 1\n": "line 2: the file ends here, where 'session=' should stand: it is not complete",
    GOOD.replace("session=17\n", ""): "line 2: 'session=' should stand where 'managed=charge' does",
    GOOD.replace("session=17", "session="): "line 2: session is ''; only digits are a number here",
    GOOD.replace("17", "1" * 19, 1): "line 2: session has 19 digits; at most 18 are allowed",
    GOOD.replace("charge", "free"): "line 3: managed is 'free'; it must be charge or refuse",
    f"{HEAD}end\n": "line 4: 'device=' should stand where 'end' does",
    HEAD: "line 4: the file ends here, where 'device=' should stand: it is not complete",
    with_device(device="gpu-1"): (
        "line 4: device is 'gpu-1'; it must be a UUID that begins with GPU- or MIG-"
    ),
    with_device(device="GPU-" + "x" * 92): "line 4: device has 96 characters; at most 95 are allowed",
    f"{HEAD}{DEVICE}{DEVICE}end\n": "line 5: device GPU-1 stands on line 4 already",
    devices(17): "line 20: there are more than 16 devices",
    with_device(slots="50-75 lending=0 most_percent=100"): (
        "line 4: lending is 0; it must be from 1 to 100, and needs mode=memory+compute"
    ),
    with_device(mode="memory", slots="- lending=1 most_percent=100"): (
        "line 4: lending is 1; it must be from 1 to 100, and needs mode=memory+compute"
    ),
    with_device(slots="50-75 lending=1"): "line 4: ' most_percent=' should stand where '' does",
    with_device(slots="50-75 code_mib="): "line 4: code_mib is ''; only digits are a number here",
    with_device(slots="50-75 code_mib=-1"): "line 4: code_mib is '-1'; only digits are a number here",
    with_device(slots="50-75 code_mib=01"): "line 4: code_mib is '01'; a number has no leading zeros",
    with_device(
        slots="50-75 code_mib=1 code_mib=1"
    ): "line 4: the line should end where ' code_mib=1' stands",
    with_device(slots="50-75 code=1"): "line 4: ' code_mib=' should stand where '' does",
    with_device(slots="50-75 lending=1 most_percent=24"): (
        "line 4: most_percent is 24; it must be from 25 to 100"
    ),
    with_device(memory_mib="0"): "line 4: memory_mib is 0; it must be from 1 to 9999999999",
    with_device(memory_mib="02048"): "line 4: memory_mib is '02048'; a number has no leading zeros",
    with_device(memory_mib="18446744073709551617"): (
        "line 4: memory_mib has 20 digits; at most 10 are allowed"
    ),
    with_device(memory_mib="8193"): "line 4: memory_mib is 8193; the device has device_mib=8192 only",
    with_device(compute_percent="0"): "line 4: slots add up to 25; compute_percent is 0",
    with_device(compute_percent="101"): "line 4: compute_percent is 101; it must be from 0 to 100",
    with_device(mode="compute"): "line 4: ' mode=memory' should stand where '' does",
    with_device(slots="-"): "line 4: slots is '-'; only digits are a number here",
    with_device(slots="50-74"): "line 4: slots add up to 24; compute_percent is 25",
    with_device(slots="75-50"): (
        "line 4: slots has 75-50 after 0; parts ascend from 0 to 100 and do not overlap"
    ),
    with_device(slots="50-65,60-70"): (
        "line 4: slots has 60-70 after 65; parts ascend from 0 to 100 and do not overlap"
    ),
    with_device(compute_percent="51", slots=",".join(f"{i}-{i + 1}" for i in range(51))): (
        "line 4: slots has more than 50 parts"
    ),
    with_device(mode="memory"): "line 4: '-' should stand where '50-75' does",
    GOOD.replace(" context_mib=0", ""): "line 4: ' context_mib=' should stand where '' does",
    GOOD.removesuffix("end\n"): (
        "line 5: the file ends here, where 'device=' should stand: it is not complete"
    ),
    GOOD.replace("\n", "\r\n"): "line 1: byte 0x0d is not printable ASCII",
    GOOD.replace("17", "1\0" + "7", 1): "line 2: byte 0x00 is not printable ASCII",
    GOOD.replace("GPU-1", "GPU-é"): "line 4: byte 0xc3 is not printable ASCII",
}


@pytest.mark.parametrize("text", MALFORMED, ids=MALFORMED.values())
def test_anything_else_is_refused_with_its_line_and_field(check: Check, text: str) -> None:
    assert check([text.encode()]) == [f"bad {MALFORMED[text]}"]


def test_a_file_cut_off_anywhere_is_refused(check: Check) -> None:
    text = f"{HEAD}{DEVICE}{OTHER}end\n".encode()
    replies = check([text[:size] for size in range(len(text))])
    assert [reply for reply in replies if not reply.startswith("bad line ")] == []


# A second opinion on what is well-formed, in another language and another manner.
NUMBER = r"(?:0|[1-9][0-9]{0,9})"
LINE = re.compile(
    rf"device=(?P<uuid>(?:GPU|MIG)-[!-~]+) memory_mib=(?P<memory>{NUMBER}) device_mib=(?P<device>{NUMBER}) "
    rf"context_mib={NUMBER} compute_percent=(?P<percent>{NUMBER}) "
    r"mode=memory(?: slots=-|\+compute slots=(?P<slots>[0-9,-]+)"
    rf"(?: lending=(?P<lending>[1-9][0-9]?|100) most_percent=(?P<most>{NUMBER}))?)(?: code_mib={NUMBER})?\Z"
)
PART = re.compile(r"(0|[1-9][0-9]?|100)-(0|[1-9][0-9]?|100)\Z")


def is_well_formed(data: bytes) -> bool:
    if not data.endswith(b"\nend\n") or not data.isascii():
        return False
    lines = data.decode("ascii").split("\n")[:-2]
    if len(lines) < 4:
        return False
    heading, session, managed, *lines = lines
    found = [LINE.match(line) for line in lines]
    return (
        heading == "fgpu-limits 1"
        and re.fullmatch("session=(0|[1-9][0-9]{0,17})", session) is not None
        and managed in ("managed=charge", "managed=refuse")
        and 1 <= len(found) <= 16
        and len({match and match["uuid"] for match in found}) == len(found)
        and all(match is not None and _is_possible(match) for match in found)
    )


def _is_possible(match: re.Match[str]) -> bool:
    percent = int(match["percent"])
    if not 1 <= int(match["memory"]) <= int(match["device"]) or not 0 <= percent <= 100:
        return False
    if len(match["uuid"]) > 95:
        return False
    if match["slots"] is None:
        return True
    parts = [PART.match(part) for part in match["slots"].split(",")]
    if not all(parts) or len(parts) > 50:
        return False
    edges = [int(edge) for part in parts if part for edge in part.groups()]
    if match["lending"] is not None and not percent <= int(match["most"]) <= 100:
        return False
    ascend = edges == sorted(edges) and all(a < b for a, b in zip(edges[::2], edges[1::2], strict=True))
    return ascend and sum(edges[1::2]) - sum(edges[::2]) == percent


def mutants(seed: int, count: int) -> Iterator[bytes]:
    """Yield texts a few steps away from well-formed ones, often in what the format is made of."""
    rng = random.Random(seed)
    pieces = [
        b"0",
        b"9",
        b"1",
        b"-",
        b",",
        b" ",
        b"\n",
        b"=",
        b"+",
        b"\0",
        b"\xff",
        b"end\n",
        b"GPU-",
        b"100",
        b"",
    ]
    pieces += [line.encode() + b"\n" for line in GOOD.splitlines()] + [OTHER.encode()]
    starts = [text.encode() for text in WELL_FORMED.values()]
    for _ in range(count):
        text = rng.choice(starts)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text) + 1)
            to = min(len(text), at + rng.choice((0, 0, 1, 1, 2, rng.randrange(120))))
            text = text[:at] + rng.choice(pieces) + text[to:]
        yield text


@pytest.mark.parametrize("build", ["check", "check_with_sanitizers"])
def test_of_thousands_of_mutants_just_the_well_formed_ones_are_read(
    build: str, request: pytest.FixtureRequest
) -> None:
    texts = [*mutants(3, 6000), *mutants(4, 4000)]
    replies = request.getfixturevalue(build)(texts)
    expected = [is_well_formed(text) for text in texts]
    assert 50 < sum(expected) < len(texts) / 2  # There are some of each.
    wrong = [
        (text, reply)
        for text, reply, well_formed in zip(texts, replies, expected, strict=True)
        if reply.startswith("good ") != well_formed
        or (well_formed and reply != "good " + text.decode("ascii").replace("\n", ";"))
    ]
    assert wrong == []


# The file itself.


@pytest.fixture(scope="session")
def tool(counting_library: Path, compile_c: MakePath) -> Path:
    return compile_c("tests/region_tool.c", counting_library)


@pytest.fixture
def folder(session_folder: MakePath, counting_library: Path) -> Path:
    return session_folder(GOOD, library=counting_library, simulated=False)


def refusals(tool: Path, folder: Path) -> list[str]:
    """Return the log's messages after a process has found that it gets nothing."""
    with Tool(tool, folder) as process:
        assert process.ask("limits") == "none"
        assert process.ask("reserve 0 1 1000000") == "refused"
        assert process.ask("reserve 0 0 1000000") == "refused"
        assert process.ask("index GPU-1") == "-1"
    lines = (folder / "log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z pid \d+: ", line) for line in lines)
    return [line.split(": ", 1)[1] for line in lines]


def test_the_limits_are_those_of_the_file(tool: Path, folder: Path) -> None:
    with Tool(tool, folder) as process:
        assert process.ask("folder") == str(folder)
        assert process.ask("limits") == f"17 GPU-1={2048 << 20}"
        assert process.ask("index GPU-1") == "0"
        assert process.ask("index GPU-2") == "-1"
        assert process.ask("reserve 1 1 1") == "refused"  # There is no such device.
    assert (folder / "log").read_text() == ""


def test_the_file_is_read_once(tool: Path, folder: Path) -> None:
    with Tool(tool, folder) as process:
        assert process.ask("limits") == f"17 GPU-1={2048 << 20}"
        write_read_only(folder / "limits", GOOD.replace("=2048", "=4096"))
        assert process.ask("limits") == f"17 GPU-1={2048 << 20}"
        assert process.child("child", "limits") == [f"17 GPU-1={2048 << 20}"]


NOT_LIMITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link": (lambda path: path.symlink_to("real"), "is a link, which is not followed"),
    "folder": (lambda path: path.mkdir(0o555), "is not a regular file"),
    "fifo": (lambda path: os.mkfifo(path, 0o444), "is not a regular file"),
    "large": (
        lambda path: write_read_only(path, GOOD.ljust(16384, "x")),
        "is malformed: line 6: nothing may follow 'end'",
    ),
    "larger": (lambda path: write_read_only(path, GOOD.ljust(16385, "x")), "is larger than 16 KiB"),
    **{
        f"{mode:o}": (
            lambda path, mode=mode: (write_read_only(path, GOOD), path.chmod(mode)),
            "can be written: it must have no write bit in its mode, or be on a read-only mount",
        )
        for mode in (0o644, 0o464, 0o446)
    },
}


@pytest.mark.parametrize("what", NOT_LIMITS)
def test_what_is_no_limits_file_refuses_everything(tool: Path, folder: Path, what: str) -> None:
    put, reason = NOT_LIMITS[what]
    (folder / "limits").rename(folder / "real")
    put(folder / "limits")
    (found,) = set(refusals(tool, folder))
    assert found == f"the limits file {reason}; every allocation is refused"


def test_a_write_bit_does_not_matter_on_a_read_only_mount(tool: Path, folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    (folder / "limits").chmod(0o644)
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$1"'
    before = ["unshare", "--mount", "sh", "-c", script, str(folder / "limits")]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounts are not allowed here")
    with Tool(tool, folder, before=before) as process:
        assert process.ask("limits") == f"17 GPU-1={2048 << 20}"


def test_a_library_that_is_loaded_by_a_relative_path_refuses_everything(
    tool: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with Tool(tool, Path()) as process:
        assert process.ask("folder") == "none"
        assert process.ask("limits") == "none"
        assert process.ask("reserve 0 1 1000000") == "refused"


# The log.


@pytest.mark.parametrize("log", ["missing", "link", "fifo", "full"])
def test_a_log_that_cannot_take_a_line_changes_nothing(tool: Path, folder: Path, log: str) -> None:
    (folder / "limits").unlink()
    (folder / "log").unlink()
    elsewhere = folder / "elsewhere"
    elsewhere.write_text("")
    match log:
        case "link":
            (folder / "log").symlink_to("elsewhere")
        case "fifo":
            os.mkfifo(folder / "log")
        case "full":
            (folder / "log").write_bytes(b"x" * (256 * 1024 - 60))
    with Tool(tool, folder) as process:
        assert process.ask("reserve 0 1 1000000") == "refused"
    assert elsewhere.read_text() == ""
    assert log != "missing" or not (folder / "log").exists()
    assert log != "full" or (folder / "log").stat().st_size == 256 * 1024 - 60


def test_a_line_of_the_log_stays_one_line(tool: Path, folder: Path) -> None:
    write_read_only(folder / "limits", GOOD.replace("charge", "\tfree"))
    assert refusals(tool, folder)[0].startswith("the limits file is malformed: line 3: byte 0x09 is not")
