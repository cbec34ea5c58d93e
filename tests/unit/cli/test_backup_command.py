"""``fgpu backup`` and ``fgpu restore``: everything is there again, and nothing of what was there is lost."""

from __future__ import annotations

import io
import json
import os
import pwd
import secrets
import sqlite3
import stat
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, NullPool, create_engine, make_url, select, text
from store_worlds import postgres_url

from commandline import AT_S, Fgpu, filled, request, write_config
from fgpu_scheduler import Claim, Store
from fgpuspawner.backup import archive
from fgpuspawner.backup.archive import Manifest, pack
from fgpuspawner.cli.units import as_hub_user


@contextmanager
def databases(kind: str, folder: Path) -> Iterator[Callable[[str], str]]:
    """Give the URLs of new databases, by names; PostgreSQL's are removed afterwards."""
    if kind == "sqlite":
        yield lambda name: f"sqlite:///{folder / name}.sqlite"
        return
    server = make_url(postgres_url())
    engine = create_engine(server, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    own = f"fgpu_backup_{secrets.token_hex(4)}"
    made: dict[str, str] = {}

    def url(name: str) -> str:
        if name not in made:
            made[name] = f"{own}_{name}"
            with engine.connect() as connection:
                connection.execute(text(f"CREATE DATABASE {made[name]}"))
        return server.set(database=made[name]).render_as_string(hide_password=False)

    try:
        yield url
    finally:
        with engine.connect() as connection:
            for name in made.values():
                connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture(params=["sqlite", "postgresql"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], str]]:
    with databases(request.param, tmp_path) as url:
        yield url


def rows(url: str) -> dict[str, list[Any]]:
    """Return all that a database holds."""
    engine = create_engine(url, poolclass=NullPool)
    found = MetaData()
    found.reflect(engine)
    with engine.connect() as connection:
        return {t.name: sorted(map(repr, connection.execute(select(t)))) for t in found.sorted_tables}


def hub_database(folder: Path) -> str:
    """Make a database that stands for the Hub's own."""
    with closing(sqlite3.connect(folder / "hub.sqlite")) as database:
        database.execute("CREATE TABLE users (name TEXT)")
        database.execute("INSERT INTO users VALUES ('alice')")
        database.commit()
    return f"sqlite:///{folder / 'hub.sqlite'}"


def installation(folder: Path, url: str, hub: str) -> str:
    """Write the configuration of a machine, and return its path."""
    folder.mkdir(exist_ok=True)
    path = write_config(folder, db_url=url)
    Path(path).write_text(Path(path).read_text() + f"\nc.JupyterHub.db_url = {hub!r}\n")
    return path


@pytest.fixture
def first(tmp_path: Path, at: Callable[[str], str]) -> str:
    """The configuration of an installation with sessions, a queue and a history."""
    filled(at("first"))
    return installation(tmp_path / "first", at("first"), hub_database(tmp_path))


def test_restore_on_another_machine_brings_back_both_databases(
    tmp_path: Path, fgpu: Fgpu, first: str, at: Callable[[str], str]
) -> None:
    backup = str(tmp_path / "backup.tar.gz")
    status, out, err = fgpu("backup", backup, "--config", first)
    assert (status, err) == (0, "")
    kind = make_url(at("first")).get_backend_name()
    assert f"databases: scheduler ({kind}), hub (sqlite)" in out
    there = installation(tmp_path / "there", at("there"), f"sqlite:///{tmp_path}/there/hub.sqlite")
    status, out, err = fgpu("restore", backup, "--config", there)
    assert (status, err) == (0, "")
    assert "2 waiting: each keeps its place" in out
    assert "3 under way" in out
    assert rows(at("there")) == rows(at("first"))
    assert rows(f"sqlite:///{tmp_path}/there/hub.sqlite") == {"users": ["('alice',)"]}


def test_backup_during_writes_is_of_one_instant(
    tmp_path: Path, fgpu: Fgpu, first: str, at: Callable[[str], str]
) -> None:
    ended, begun = threading.Event(), threading.Event()

    def write() -> None:
        with closing(Store(at("first"))) as store:
            store.connect()
            number = 0
            while not ended.is_set():
                # Each transaction submits two.
                store.submit(
                    [request(f"u{number}", 500), request(f"v{number}", 500)], now_s=AT_S + 10 + number
                )
                number += 1
                begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert begun.wait(60)
        backup = str(tmp_path / "backup.tar.gz")
        assert fgpu("backup", backup, "--config", first)[0] == 0
    finally:
        ended.set()
        writer.join()
    there = installation(tmp_path / "there", at("there"), f"sqlite:///{tmp_path}/there/hub.sqlite")
    assert fgpu("restore", backup, "--config", there)[0] == 0
    with closing(Store(at("there"))) as store:
        store.connect_readonly()
        waiting = [s.request.user for s in store.snapshot(AT_S).sessions if s.request.user[0] in "uv"]
    assert waiting
    assert sorted(name[1:] for name in waiting if name[0] == "u") == sorted(
        name[1:] for name in waiting if name[0] == "v"
    )


def test_backup_is_private_and_without_the_secrets_of_the_hub(tmp_path: Path, fgpu: Fgpu, first: str) -> None:
    cookie = tmp_path / "first" / "data" / "jupyterhub_cookie_secret"
    cookie.parent.mkdir(exist_ok=True)
    cookie.write_text("c00c1e")
    backup = tmp_path / "backup.tar.gz"
    assert fgpu("backup", str(backup), "--config", first)[0] == 0
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    with tarfile.open(backup) as packed:
        assert all(b"c00c1e" not in packed.extractfile(m).read() for m in packed if m.isfile())  # type: ignore[union-attr]
    # As docs/operations.md says.
    subprocess.run(["tar", "xzf", backup, "-C", tmp_path, "config"], check=True)
    (config,) = (tmp_path / "config").iterdir()
    assert config.read_text() == Path(first).read_text()


def test_verify_finds_a_damaged_backup(tmp_path: Path, fgpu: Fgpu, first: str) -> None:
    good = tmp_path / "good.tar.gz"
    assert fgpu("backup", str(good), "--config", first)[0] == 0
    status, out, _ = fgpu("backup", "--verify", str(good))
    assert status == 0
    assert out.startswith(f"OK: {good} can be restored\n")
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(good.read_bytes()[:-200])
    assert fgpu.failure("backup", "--verify", str(cut))[1].startswith(f"{cut} is no backup, or damaged: ")
    changed, folder = tmp_path / "changed.tar.gz", tmp_path / "changed"
    folder.mkdir()
    subprocess.run(["tar", "xzf", good, "-C", folder], check=True)
    (folder / "config" / "jupyterhub_config.py").write_text("exit()")
    with tarfile.open(changed, "w:gz") as packed:
        packed.add(folder, arcname=".")
    assert fgpu.failure("backup", "--verify", str(changed)) == (
        1,
        f"{changed} is damaged: config/jupyterhub_config.py is not what was backed up",
    )


def test_restore_refuses_a_running_hub_and_a_used_database(
    tmp_path: Path, fgpu: Fgpu, first: str, at: Callable[[str], str]
) -> None:
    backup = str(tmp_path / "backup.tar.gz")
    assert fgpu("backup", backup, "--config", first)[0] == 0
    before = rows(at("first"))
    with closing(Claim(at("first"))) as claim, pytest.MonkeyPatch.context() as patched:
        claim.take()
        patched.setattr("fgpu_scheduler.store.claim.LOCK_WAIT_S", 0)
        assert "another Hub serves the sessions of" in fgpu.failure("restore", backup, "--config", first)[1]
    if make_url(at("first")).get_backend_name() == "postgresql":
        said = fgpu.failure("restore", backup, "--config", first)[1]
        assert "c.FGPU.db_url: " in said
        assert "make an empty database (createdb), and name that one here" in said
    else:
        # What was there stays beside it.
        status, out, _ = fgpu("restore", backup, "--config", first)
        assert status == 0
        assert out.count("; what was there is ") == 2
        (kept,) = tmp_path.glob("first.sqlite.before-????????T??????")
        assert rows(f"sqlite:///{kept}") == before
    assert rows(at("first")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_files_that_root_restores_belong_to_the_hub_user(tmp_path: Path, fgpu: Fgpu) -> None:
    user = 4711
    # Others than root cannot enter the folders of tests.
    with tempfile.TemporaryDirectory() as name, databases("sqlite", Path(name, "data")) as url:
        folder, data, nightly = Path(name), Path(name, "data"), Path(name, "nightly")
        folder.chmod(0o755)
        for own in (data, nightly):
            own.mkdir(mode=0o700)
            os.chown(own, user, user)
        filled(url("fgpu"))
        backup, config = (
            str(tmp_path / "backup.tar.gz"),
            installation(folder, url("fgpu"), hub_database(data)),
        )
        assert fgpu("backup", backup, "--config", config)[0] == 0
        for left in data.iterdir():
            os.chown(left, user, user)
        assert fgpu("restore", backup, "--config", config)[0] == 0
        assert (os.getuid(), os.geteuid(), os.getegid()) == (0, 0, 0)
        found = {path.name: path.stat() for path in data.iterdir()}
        assert {"fgpu.sqlite", "hub.sqlite", "hub.lock"} <= found.keys()
        assert {(s.st_uid, s.st_gid) for s in found.values()} == {(user, user)}
        assert {found[n].st_mode & 0o777 for n in ("fgpu.sqlite", "hub.sqlite")} == {0o600}
        os.setegid(user)
        os.seteuid(user)
        try:
            with closing(Claim(url("fgpu"))) as claim, closing(Store(url("fgpu"))) as store:
                claim.take()
                store.open()
            assert fgpu("backup", str(nightly), "--keep", "2", "--config", config)[0] == 0
        finally:
            os.seteuid(0)
            os.setegid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_root_acts_as_the_hub_user_with_that_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def chown(path: Path, user: int, group: int, *, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        given.append(path.name)

    with tempfile.TemporaryDirectory() as name:
        data, lent = Path(name, "data"), Path(name, "lent")
        data.mkdir()
        (lent / "inner").mkdir(parents=True)
        (lent / "inner/file").touch()
        user = pwd.getpwnam("nobody")
        os.chown(data, user.pw_uid, user.pw_gid)
        monkeypatch.setattr(os, "chown", chown)
        monkeypatch.setenv("HOME", "/root")
        with as_hub_user(data, lent):
            assert os.environ["HOME"] == user.pw_dir
        assert (os.environ["HOME"], given) == ("/root", ["file", "inner", "lent"])


def test_keep_removes_all_but_the_newest_backups(tmp_path: Path, fgpu: Fgpu, first: str) -> None:
    folder = tmp_path / "backups"
    folder.mkdir()
    for day in ("01", "02", "03"):
        (folder / f"fgpu-202601{day}T000000Z.tar.gz").touch()
    (folder / "notes.txt").touch()
    status, out, _ = fgpu("backup", str(folder), "--keep", "2", "--config", first)
    assert status == 0
    left = sorted(path.name for path in folder.iterdir())
    assert left[0] == "fgpu-20260103T000000Z.tar.gz"
    assert left[2:] == ["notes.txt"]
    assert "removed fgpu-20260101T000000Z.tar.gz" in out
    assert fgpu.failure("backup", str(tmp_path / "x.tar.gz"), "--keep", "2", "--config", first) == (
        2,
        "--keep: a number of at least 1, with a folder",
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("../escaped", tarfile.REGTYPE), ("/tmp/escaped", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)],
)
def test_archive_with_paths_outside_its_folder_is_refused(
    tmp_path: Path, fgpu: Fgpu, name: str, kind: bytes
) -> None:
    backup = tmp_path / "backup.tar.gz"
    with tarfile.open(backup, "w:gz") as packed:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc"
        packed.addfile(member)
    assert fgpu.failure("backup", "--verify", str(backup)) == (
        1,
        f"{backup} is no backup, or damaged: {name} is no file of a backup",
    )


@pytest.mark.parametrize(
    ("name", "most"),
    [("databases/fgpu.sqlite", "MOST_BYTES"), ("config/a.py", "MOST_OTHER_BYTES"), ("b", "MOST_FILES")],
)
def test_archive_above_the_limits_is_not_unpacked(
    tmp_path: Path, fgpu: Fgpu, monkeypatch: pytest.MonkeyPatch, name: str, most: str
) -> None:
    monkeypatch.setattr(archive, most, 1)
    backup = tmp_path / "backup.tar.gz"
    with tarfile.open(backup, "w:gz") as packed:
        for number in range(2):
            member = tarfile.TarInfo(f"{name}{number}")
            member.size = 2
            packed.addfile(member, io.BytesIO(b"ab"))
    assert "is more than a backup may hold" in fgpu.failure("backup", "--verify", str(backup))[1]


def test_a_backup_with_another_schema_is_refused_before_anything_is_changed(
    tmp_path: Path, fgpu: Fgpu, first: str, at: Callable[[str], str]
) -> None:
    backup = tmp_path / "backup.tar.gz"
    assert fgpu("backup", str(backup), "--config", first)[0] == 0
    folder = tmp_path / "changed"
    folder.mkdir()
    subprocess.run(["tar", "xzf", backup, "-C", folder], check=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "schema": "0015", "version": "0.1"}))
    _again(folder, backup)
    before = rows(at("first"))
    for command in (("restore", str(backup), "--config", first), ("backup", "--verify", str(backup))):
        said = fgpu.failure(*command)[1]
        assert said.startswith(
            f"{backup} is of fgpuspawner 0.1, whose tables this version cannot use; restore it"
        )
    assert rows(at("first")) == before


def _again(folder: Path, to: Path) -> None:
    """Pack a changed backup as the program would have."""
    manifest = Manifest(**json.loads((folder / "manifest.json").read_text()))
    (folder / "manifest.json").unlink()
    pack(folder, manifest, to)
