"""isolation/files: the program of the files image writes what it is told, whole, and nowhere else."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Put = Callable[..., "subprocess.CompletedProcess[str]"]
LARGE = random.Random(7).randbytes((1 << 20) + 7)
DIGEST = hashlib.sha256(LARGE).hexdigest()
NOBODY = 65534


@pytest.fixture
def program(isolation_build: Path) -> Path:
    return isolation_build / "put-files"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.fixture
def put(program: Path, target: Path, tmp_path: Path) -> Put:
    """Run the program with these lines; its image has one large file."""
    sources = tmp_path / "files"
    sources.mkdir()
    (sources / DIGEST).write_bytes(LARGE)

    def put(*lines: str) -> subprocess.CompletedProcess[str]:
        command = [program, target, sources]
        return subprocess.run(
            command, env={"FGPU_FILES": "\n".join(lines)}, capture_output=True, text=True, timeout=60
        )

    return put


def inline(content: bytes) -> str:
    return "base64:" + base64.b64encode(content).decode()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_files_of_the_image_files_in_the_variable_and_folders_are_written_with_their_modes(
    put: Put, target: Path
) -> None:
    previous = os.umask(0o077)
    try:
        done = put(
            f"755 libfgpu.so sha256:{DIGEST}",
            f"0444 limits {inline(b'fgpu-limits 1')}",
            "644 log base64:",
            "777 written/ -",
            f"640 a/b/with a space {inline(bytes(range(256)))}",
        )
    finally:
        os.umask(previous)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (target / "libfgpu.so").read_bytes() == LARGE
    assert (target / "limits").read_bytes() == b"fgpu-limits 1"
    assert (target / "log").read_bytes() == b""
    assert (target / "a/b/with a space").read_bytes() == bytes(range(256))
    assert {str(p.relative_to(target)): mode(p) for p in target.rglob("*")} == {
        "libfgpu.so": 0o755,
        "limits": 0o444,
        "log": 0o644,
        "written": 0o777,
        "a": 0o755,
        "a/b": 0o755,
        "a/b/with a space": 0o640,
    }


def test_it_says_that_the_image_is_of_another_version_where_it_lacks_a_file(put: Put, target: Path) -> None:
    done = put(f"755 libfgpu.so sha256:{'0' * 64}")
    assert done.returncode == 3
    assert done.stderr == (
        "put-files: this image is of another version than the Hub: it has no file for libfgpu.so "
        "(sha256:000000000000...); write it again with 'fgpu kube image', and push it\n"
    )
    assert not (target / "libfgpu.so").exists()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("444 /etc/passwd base64:", "absolute"),
        ("444 ../out base64:", "'..'"),
        ("444 a/../../out base64:", "'..'"),
        ("444 .. base64:", "'..'"),
        ("755 ../ -", "'..'"),
        ("444 a//b base64:", "empty name"),
        ("444 ./a base64:", "'.'"),
        ("444 a/ base64:", "ends in '/'"),
        ("755 a -", "does not end in '/'"),
        ("755 / -", "does not end in '/'"),
        ("555 a/ -", "7 for its owner"),
        ("444 " + "a/" * 512 + "bb base64:", "1 to 1024 bytes"),
        ("444  base64:", "1 to 1024 bytes"),
        ("4755 a base64:", "above 0777"),
        ("00444 a base64:", "octal"),
        ("888 a base64:", "octal"),
        (" a base64:", "octal"),
        ("444 a", "not MODE PATH SOURCE"),
        ("", "not MODE PATH SOURCE"),
        ("444 a base64:QUJ", "cut short"),
        ("444 a base64:Q===", "another character"),
        ("444 a base64:QU=D", "another character"),
        ("444 a base64:QU*D", "another character"),
        ("444 a sha256:../../secret", "64 digits"),
        (f"444 a sha256:{DIGEST}0", "64 digits"),
        (f"444 a sha256:{DIGEST.upper()}X", "64 digits"),
        ("444 a file:/etc/passwd", "none of"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_written_outside(
    put: Put, target: Path, line: str, why: str
) -> None:
    done = put("444 first base64:", line, "444 last base64:")
    assert done.returncode == 2
    assert done.stderr.startswith("put-files: FGPU_FILES, line 2: ")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (target / "last").exists()
    assert sorted(p.name for p in target.parent.iterdir()) == ["files", "target"]


def test_no_link_leads_out_of_the_folder(put: Put, target: Path) -> None:
    outside = target.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    (target / "folder").symlink_to(outside)
    for line in ("444 folder/new base64:", "777 folder/ -", "777 folder/new/ -"):
        done = put(line)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    (target / "limits").symlink_to(outside / "kept")
    (target / ".put-files.new").symlink_to(outside / "kept")
    assert put(f"444 limits {inline(b'limits')}").returncode == 0
    assert (outside / "kept").read_bytes() == b"kept"
    assert (mode(outside), [p.name for p in outside.iterdir()]) == (0o755, ["kept"])
    assert not (target / "limits").is_symlink()


def test_without_the_variable_or_the_folder_it_says_so(program: Path, target: Path) -> None:
    def said(*words: Path, **env: str) -> tuple[int, str]:
        done = subprocess.run([program, *words], env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    assert said(target) == (2, "put-files: FGPU_FILES is not set\n")
    assert said(FGPU_FILES="")[0] == 2
    missing = target / "missing"
    assert said(missing, FGPU_FILES="") == (
        1,
        f"put-files: {missing} cannot be written: No such file or directory\n",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_is_said_and_no_half_file_is_left_under_its_name(program: Path, tmp_path: Path) -> None:
    sources = tmp_path / "files"
    sources.mkdir()
    (sources / DIGEST).write_bytes(LARGE)
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=64k none {small} && "$0" {small} {sources}; status=$?; ls {small}; exit $status'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, program],
        env=os.environ | {"FGPU_FILES": f"755 libfgpu.so sha256:{DIGEST}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "put-files: libfgpu.so cannot be written: No space left on device\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_it_runs_as_anybody_with_no_capability_on_a_root_of_its_own(program: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("files", "run"):
        (root / name).mkdir(parents=True)
    (root / "files" / DIGEST).write_bytes(LARGE)
    shutil.copy(program, root / "put-files")
    (root / "run").chmod(0o777)
    # Nothing but the program is there: no loader, no C library, no /proc.
    nobody = ["--userspec", f"{NOBODY}:{NOBODY}", "--groups", ""]
    done = subprocess.run(
        ["chroot", *nobody, root, "/put-files", "/run"],
        env=os.environ | {"FGPU_FILES": f"755 libfgpu.so sha256:{DIGEST}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = root / "run" / "libfgpu.so"
    assert (found.read_bytes(), found.stat().st_uid) == (LARGE, NOBODY)
