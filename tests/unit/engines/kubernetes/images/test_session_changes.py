"""What a session has changed: of what it says only what its user could have done, and what an image can have."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fgpuspawner.engines.base import CannotSave
from fgpuspawner.engines.kubernetes.images import changes as changed
from fgpuspawner.engines.kubernetes.images import saver
from fgpuspawner.engines.kubernetes.images.changes import FORGED, Changes, Who, compared, records, who
from fgpuspawner.engines.kubernetes.images.layer import Layer, wanted

USER = Who(1000, frozenset({1000}), "/home/jovyan")
ROOT = Who(0, frozenset({0}), "/root")
FOLDER, FILE, LINK = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777
Line = list[Any]


def line(path: str, mode: int = FILE, uid: int = 0, **more: Any) -> Line:
    given = {"gid": uid, "size": 3, "mtime": 5, "ctime": 7, "inode": "1:1:1", "target": None, "sealed": False}
    said = {**given, **more}
    order = ("gid", "size", "mtime", "ctime", "inode", "target", "sealed")
    return [path, mode, uid, *(said[name] for name in order)]


IMAGE = [
    line("/", FOLDER),
    line("/opt", FOLDER),
    line("/opt/env", FOLDER, 1000),
    line("/opt/env/mine", FILE, 1000),
    line("/opt/env/old", FOLDER, 1000),
    line("/opt/env/old/file", FILE, 1000),
    line("/opt/env/roots", FOLDER),
    line("/opt/env/roots/file"),
    line("/opt/fgpu", FOLDER),
    line("/opt/fgpu/server"),
    line("/srv", stat.S_IFDIR | 0o1777),
    line("/srv/others"),
    line("/usr", FOLDER),
    line("/usr/open", stat.S_IFREG | 0o666),
]


def listed(*lines: object) -> io.BytesIO:
    return io.BytesIO(b"".join(json.dumps(one).encode() + b"\n" for one in lines))


def session(*more: Line, without: tuple[str, ...] = ()) -> list[Line]:
    """Return the image's list with other lines in it, in order."""
    found = {str(one[0]): one for one in IMAGE if not changed.is_below(str(one[0]), without)}
    found |= {str(one[0]): one for one in more}
    return [found[path] for path in sorted(found, key=lambda p: [x for x in p.split("/") if x])]


def changes(now: list[Line], by: Who = USER) -> Changes:
    skipped = ["/tmp", by.home]
    return compared(by, records(listed(*IMAGE), skipped), records(listed(*now), skipped))


def paths(found: Changes) -> list[str]:
    return [entry.path for entry in found.entries]


def test_what_nobody_has_touched_is_no_change() -> None:
    found = changes(session())
    assert (found.entries, found.gone) == ([], [])


def test_new_changed_and_deleted_things_are_found() -> None:
    now = session(
        line("/opt/env/mine", FILE, 1000, ctime=8),
        line("/opt/env/new", FOLDER, 1000),
        line("/opt/env/new/a", FILE, 1000, size=10),
        line("/opt/env/new/link", LINK, 1000, target="/etc/passwd", size=11),
        line("/usr/open", stat.S_IFREG | 0o666, ctime=8, size=4),
        without=("/opt/env/old",),
    )
    found = changes(now)
    assert paths(found) == [
        "/opt/env/mine",
        "/opt/env/new",
        "/opt/env/new/a",
        "/opt/env/new/link",
        "/usr/open",
    ]
    assert found.gone == ["/opt/env/old"]
    assert found.size_bytes == 3 + 10 + 4
    assert found.kinds["/opt/env/old"] == changed.DELETED


@pytest.mark.parametrize(
    "said",
    [
        line("/opt/fgpu/server", FILE, 1000, ctime=8),
        line("/opt/fgpu/server", FILE, 0, ctime=8),
        line("/opt/fgpu/more", FILE, 1000),
        line("/opt/fgpu", FOLDER, 1000),
        line("/opt/env/su", stat.S_IFREG | 0o4755, 0),
        line("/opt/env/su", stat.S_IFREG | 0o4755, 1000, gid=0),
        line("/opt/env/roots/file", FILE, 1000, ctime=8),
        line("/opt/env/roots/new", FILE, 1000),
        line("/srv/others", FILE, 1000, ctime=8),
        line("/usr/open", stat.S_IFREG | 0o666, 1000, ctime=8),
        line("/usr/lib", LINK, 1000, target="/opt/env"),
        line("/opt/env/device", stat.S_IFBLK | 0o666, 1000),
        line("/opt/env/pipe", stat.S_IFIFO | 0o666, 1000),
    ],
    ids=lambda said: f"{said[0]} {said[1]:o} {said[2]}",
)
def test_what_the_user_could_not_have_done_stays_as_the_image_has_it(said: Line) -> None:
    found = changes(session(said))
    assert (found.entries, found.gone) == ([], [])


@pytest.mark.parametrize(
    "path", ["/opt/fgpu", "/opt/fgpu/server", "/opt/env/roots/file", "/srv/others", "/usr"]
)
def test_what_the_user_could_not_have_deleted_stays(path: str) -> None:
    assert changes(session(without=(path,))).gone == []


def test_root_may_change_everything_and_give_rights() -> None:
    now = session(
        line("/opt/fgpu/server", stat.S_IFREG | 0o4755, 33, ctime=8), line("/new", FILE), without=("/usr",)
    )
    found = changes(now, ROOT)
    assert paths(found) == ["/new", "/opt/fgpu/server"]
    assert found.entries[1].mode & 0o7777 == 0o4755
    assert found.gone == ["/usr"]


@pytest.mark.parametrize(
    "lines",
    [
        [*IMAGE, line("/opt/env/late", FILE, 1000)],
        [*IMAGE, line("/usr/open", stat.S_IFREG | 0o666)],
        [*session(), line("/zz/x", FILE, 1000)],
        [line("/opt", FOLDER)],
        [],
        session(line("/opt/env/../../etc/passwd", FILE, 1000)),
        session(line("/opt/env//x", FILE, 1000)),
        session(line("opt/env/x", FILE, 1000)),
        session(line("/opt/env/x\0", FILE, 1000)),
        session(line("/opt/env/" + "x" * 256, FILE, 1000)),
        session(line("/home/jovyan/x", FILE, 1000)),
        session(line("/tmp/x", FILE, 1000)),
        session(line("/opt/env/x", FILE, 1000, size=-1)),
        session(line("/opt/env/x", FILE, 1000, size=2**60)),
        session(line("/opt/env/x", 2**40, 1000)),
        session(line("/opt/env/x", FILE, 1000, mtime=2**70)),
        session(line("/opt/env/x", FILE, 1000, inode="1" * 100)),
        session(line("/opt/env/x", FILE, 1000, target="/etc")),
        session(line("/opt/env/x", LINK, 1000)),
        session(line("/opt/env/x", LINK, 1000, target="a\0b")),
        session(line("/opt/env/\ud800", FILE, 1000)),
        session(line("/opt/env/x", FILE, 1000)[:5]),
        [*session(), {"a": 1}],
        [*session(), 5],
        [*session(), [[]]],
    ],
    ids=str,
)
def test_a_list_that_cannot_be_is_refused_in_one_line(lines: list[Any]) -> None:
    with pytest.raises(CannotSave) as refused:
        changes(lines)
    assert str(refused.value) == FORGED


def test_what_lies_below_a_link_or_a_file_is_refused_or_left_out() -> None:
    through = session(
        line("/opt/env/out", LINK, 1000, target="/opt/fgpu"), line("/opt/env/out/server", FILE, 1000)
    )
    with pytest.raises(CannotSave, match=FORGED):
        changes(through)


@pytest.mark.parametrize("text", [b"{", b"[" * 60_000, b"[" + b"9" * 5000 + b"]", b'"' + b"x" * 70_000])
def test_lines_that_are_none_are_refused(text: bytes) -> None:
    with pytest.raises(CannotSave, match=FORGED):
        list(records(io.BytesIO(text), []))
    with pytest.raises(CannotSave, match="no list of its files"):
        who(io.BytesIO(text))


def test_a_whiteout_of_the_sessions_own_is_refused() -> None:
    with pytest.raises(CannotSave, match=r"whose name begins with \.wh\.; remove /opt/env/\.wh\.mine"):
        changes(session(line("/opt/env/.wh.mine", FILE, 1000)))


def test_a_folder_that_cannot_be_looked_into_is_not_taken_for_an_empty_one() -> None:
    now = session(line("/opt/env/old", stat.S_IFDIR, 1000, sealed=True), without=("/opt/env/old",))
    with pytest.raises(CannotSave, match="/opt/env/old cannot be read"):
        changes(now)


def test_what_is_mounted_is_not_the_sessions_own_and_what_it_hides_is_not_deleted() -> None:
    found = changes(session(["/opt/env/old"], without=("/opt/env/old",)))
    assert (found.entries, found.gone) == ([], [])


def test_a_file_in_place_of_a_folder_and_the_other_way_round() -> None:
    now = session(
        line("/opt/env/old", FILE, 1000),
        line("/opt/env/mine", FOLDER, 1000),
        line("/opt/env/mine/a", FILE, 1000),
        without=("/opt/env/old", "/opt/env/mine"),
    )
    found = changes(now)
    assert paths(found) == ["/opt/env/mine", "/opt/env/mine/a", "/opt/env/old"]
    assert found.gone == []


def test_more_changes_than_are_looked_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changed, "MOST_CHANGES", 2)
    with pytest.raises(CannotSave, match="files have changed"):
        changes(session(*(line(f"/opt/env/x{n}", FILE, 1000) for n in range(3))))


async def packed(found: Changes, *content: bytes) -> bytes:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in content:
            yield piece

    layer = Layer(found)
    whole = b"".join([piece async for piece in layer.pieces(pieces())])
    assert layer.packed_bytes == len(whole)
    return whole


async def test_a_layer_has_the_entries_with_their_rights_and_the_whiteouts() -> None:
    name = "/opt/env/" + "l" * 200 + "\udcff"
    now = session(
        line("/opt/env/a", stat.S_IFREG | 0o751, 1000, size=5, inode="1:9:2"),
        line("/opt/env/b", stat.S_IFREG | 0o751, 1000, size=5, inode="1:9:2"),
        line(name, FILE, 1000, size=700),
        line("/opt/env/link", LINK, 1000, target="../x"),
        without=("/opt/env/old",),
    )
    # The content comes in pieces that have nothing to do with the files, an empty one first.
    whole = await packed(changes(now), b"", b"hel", b"lo" + b"x" * 699, b"x")
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        found = {member.name: member for member in tar}
        assert list(found) == [
            "opt/env/.wh.old",
            "opt/env/a",
            "opt/env/b",
            "opt/env/link",
            name[1:],
        ]
        file = tar.extractfile("opt/env/a")
        assert file is not None
        assert file.read() == b"hello"
    assert (found["opt/env/a"].mode, found["opt/env/a"].uid, found["opt/env/a"].gid) == (0o751, 1000, 1000)
    assert (found["opt/env/b"].islnk(), found["opt/env/b"].linkname) == (True, "opt/env/a")
    assert found["opt/env/link"].linkname == "../x"
    assert found[name[1:]].size == 700


@pytest.mark.parametrize(
    ("content", "why"),
    [([], "could not all be read"), ([b"ab"], "could not all be read"), ([b"abc", b"d"], "gave more")],
    ids=["nothing", "less", "more"],
)
async def test_a_session_that_gives_another_amount_than_it_said_is_not_saved(
    content: list[bytes], why: str
) -> None:
    with pytest.raises(CannotSave, match=why):
        await packed(changes(session(line("/opt/env/x", FILE, 1000))), *content)


async def test_a_session_that_gives_without_end_is_stopped_after_what_it_said() -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 1000

    layer = Layer(changes(session(line("/opt/env/x", FILE, 1000, size=10_000))))
    with pytest.raises(CannotSave, match="gave more"):
        async for _ in layer.pieces(endless()):
            pass
    assert taken == 11


def inside(*words: str, said: bytes = b"", **environment: str) -> bytes:
    """Run what is run in a session, here."""
    command = [sys.executable, "-I", "-S", "-c", saver.INSIDE, *words]
    return subprocess.run(
        command, input=said, capture_output=True, check=True, timeout=120, env={**os.environ, **environment}
    ).stdout


def test_the_list_is_in_the_order_in_which_it_is_read(tmp_path: Path) -> None:
    for name in ("a", "a.b", "a/c", "b"):
        folder = tmp_path / "tree" / name
        folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "tree/link").symlink_to("gone")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/tree/\xff")).write_bytes(b"1")
    parents = {str(parent) for parent in (tmp_path, *tmp_path.parents)}
    beside = (
        {str(p) for folder in parents for p in Path(folder).iterdir()} - parents - {str(tmp_path / "tree")}
    )
    said = inside("list", *sorted(beside), HOME="/nowhere")
    file = io.BytesIO(said)
    assert who(file) == Who(os.getuid(), who(io.BytesIO(said)).groups, "/nowhere")
    found = [r.path.removeprefix(str(tmp_path)) for r in records(file, []) if "/tree" in r.path]
    assert found == ["/tree", "/tree/a", "/tree/a/c", "/tree/a.b", "/tree/b", "/tree/link", "/tree/\udcff"]


def test_files_are_given_with_exactly_as_many_bytes_as_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    (tmp_path / "long").write_bytes(b"0123456789")
    asked = json.dumps([[str(tmp_path / "short"), 5], [str(tmp_path / "long"), 4]]).encode()
    assert inside("pack", said=b"%d\n%s" % (len(asked), asked)) == b"abc\0\0" + b"0123"


def test_of_a_file_that_became_a_link_nothing_is_given(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    asked = json.dumps([[str(tmp_path / "link"), 5]]).encode()
    with pytest.raises(subprocess.CalledProcessError):
        inside("pack", said=b"%d\n%s" % (len(asked), asked))


def test_only_the_first_name_of_a_file_is_asked_for() -> None:
    now = session(
        line("/opt/env/a", FILE, 1000, inode="1:9:2"), line("/opt/env/b", FILE, 1000, inode="1:9:2")
    )
    assert list(wanted(changes(now))) == [("/opt/env/a", 3)]
