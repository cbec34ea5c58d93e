"""The command ``fgpu setup`` on a folder in place of the machine: its plan, its files, again, and back."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from commandline import Fgpu
from fgpuspawner.cli.setup.answers import Answers
from fgpuspawner.cli.setup.files import TOKEN, Programs, files
from fgpuspawner.cli.setup.machine import Machine, Record
from fgpuspawner.cli.setup.writer import DAEMON, Setup

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("systemctl") and shutil.which("systemd-sysusers")),
        reason="there is no systemd here",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes users and gives files to them"),
]
PROXY = Path(__file__).parents[3] / ".node/node_modules/.bin"
TRYING = ("--runtime", "local", "--tls", "none", "--login", "password", "--simulated", "1", "--admin", "zoe")
ETC = "etc/jupyterhub"


@pytest.fixture(autouse=True)
def _proxy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{PROXY}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def setup(root: Path, fgpu: Fgpu, *arguments: str, yes: bool = True) -> list[str]:
    """Run it, and return what it says."""
    status, out, err = fgpu("setup", "--root", str(root), *(["--yes"] if yes else []), *arguments)
    assert (status, err) == (0, ""), err
    return out.splitlines()


def plan(lines: list[str]) -> dict[str, str]:
    """Return what is done to what, as the plan says."""
    after = lines[lines.index("Plan:") + 1 :]
    after = after[: after.index("")]
    found = {}
    for line in after:
        verb, what = re.split(
            r"\s{1,}(?=/|user |image |run |[a-z-]+\.(?:service|timer))", line.strip(), maxsplit=1
        )
        found[what.partition("  (")[0]] = verb
    return found


def contents(root: Path) -> dict[str, tuple[str, int, int]]:
    """Return every file and link below a folder: its text, rights and group."""
    return {
        str(p.relative_to(root)): (
            os.readlink(p) if p.is_symlink() else p.read_text(errors="replace"),
            stat.S_IMODE(p.lstat().st_mode),
            p.lstat().st_gid,
        )
        for p in root.rglob("*")
        if p.is_symlink() or p.is_file()
    }


def test_setup_changes_nothing_before_yes(root: Path, fgpu: Fgpu) -> None:
    shown = plan(setup(root, fgpu, "--dry-run", *TRYING, yes=False))
    assert shown["/etc/jupyterhub/jupyterhub_config.py"] == "write"
    assert shown["user fgpu"] == "make"
    assert fgpu.failure("setup", "--root", str(root), *TRYING) == (
        2,
        "nobody can be asked here: say --yes, or --dry-run to see the plan",
    )
    assert not root.exists()


def test_secrets_are_readable_by_root_and_the_hub_user_only(root: Path, fgpu: Fgpu) -> None:
    said = setup(root, fgpu, *TRYING)
    (group,) = (
        int(line.split(":")[2])
        for line in (root / "etc/group").read_text().splitlines()
        if line.startswith("fgpu:")
    )
    rights = {name: found[1:] for name, found in contents(root).items() if name.startswith(ETC)}
    assert rights == {
        f"{ETC}/proxy.env": (0o600, 0),
        f"{ETC}/fgpu-setup.json": (0o600, 0),
        f"{ETC}/password": (0o640, group),
        f"{ETC}/admin-password": (0o640, group),
        f"{ETC}/jupyterhub_config.py": (0o640, group),
    }
    secrets = [
        (root / ETC / name).read_text().strip() for name in ("password", "admin-password", "proxy.env")
    ]
    assert all(len(secret) >= 16 for secret in secrets)
    units = "".join(p.read_text() for p in (root / "etc/systemd/system").glob("*.service"))
    assert not any(
        secret.removeprefix("CONFIGPROXY_AUTH_TOKEN=") in "\n".join(said) + units for secret in secrets
    )
    (account,) = ((root / "etc/passwd").read_text().splitlines())[-1:]
    assert re.fullmatch(r"fgpu:x:\d+:\d+:[^:]*:/var/lib/fgpu:/usr/sbin/nologin", account)


def test_second_setup_has_nothing_to_do(root: Path, fgpu: Fgpu) -> None:
    setup(root, fgpu, *TRYING)
    before = contents(root)
    said = setup(root, fgpu)
    assert (set(plan(said).values()), "Nothing to do." in said) == ({"as it is"}, True)
    assert contents(root) == before


def test_setup_keeps_files_that_the_administrator_changed(root: Path, fgpu: Fgpu) -> None:
    setup(root, fgpu, *TRYING)
    config = root / ETC / "jupyterhub_config.py"
    theirs = config.read_text().replace("configure(", "c.FGPU.max_fgpu = 1\nconfigure(", 1)
    config.write_text(theirs)
    said = setup(root, fgpu)
    assert plan(said)["/etc/jupyterhub/jupyterhub_config.py"] == "keep"
    assert config.read_text() == theirs
    said = setup(root, fgpu, "--unit", "4")
    (aside,) = config.parent.glob("jupyterhub_config.py.before-*")
    assert (aside.read_text(), aside.stat().st_mode & 0o777) == (theirs, 0o640)
    assert any(f"yours is kept as /{aside.relative_to(root)}" in line for line in said)
    assert 'fgpu_per_gpu="4"' in config.read_text()
    assert "zoe" in config.read_text(), "what is not said again stays as it was"


def test_setup_repairs_file_modes(root: Path, fgpu: Fgpu) -> None:
    setup(root, fgpu, *TRYING)
    before = contents(root)
    (root / ETC / "proxy.env").chmod(0o644)
    setup(root, fgpu)
    assert contents(root) == before


def test_removal_keeps_the_data_and_restores_previous_files(root: Path, fgpu: Fgpu) -> None:
    earlier, data = root / ETC / "jupyterhub_config.py", root / "var/lib/fgpu/fgpu.sqlite"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("# of before\n")
    data.parent.mkdir(parents=True)
    data.write_text("the queue")
    setup(root, fgpu, *TRYING)
    assert earlier.read_text() != "# of before\n"
    (root / "etc/systemd/system/jupyterhub.service").write_text("# changed\n")
    setup(root, fgpu, "--remove")
    # The files of accounts were made by the first account in this empty root.
    left = {
        n: t
        for n, (t, *_) in contents(root).items()
        if not re.match(r"etc/(\.pwd\.lock|passwd|group|g?shadow)", n)
    }
    (aside,) = (n for n in left if ".before-" in n)
    assert aside.startswith("etc/systemd/system/jupyterhub.service.before-")
    assert left == {
        f"{ETC}/jupyterhub_config.py": "# of before\n",
        "var/lib/fgpu/fgpu.sqlite": "the queue",
        aside: "# changed\n",
    }
    assert "fgpu" not in (root / "etc/passwd").read_text()
    assert (data.parent.stat().st_uid, data.parent.stat().st_mode & 0o777) == (0, 0o700)
    status, line = fgpu.failure("setup", "--root", str(root), "--remove", "--yes")
    assert (status, line) == (2, f"nothing is set up: there is no {root}/{ETC}/fgpu-setup.json")


def test_setup_keeps_docker_settings_and_adds_live_restore(tmp_path: Path) -> None:
    daemon = tmp_path / "etc/docker/daemon.json"
    daemon.parent.mkdir(parents=True)
    daemon.write_text('{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}')
    made = Setup(Machine(tmp_path), Record(), "now")
    answers = Answers(tls="caddy", host="hub.example").checked()
    made_of = Programs("/opt/fgpu/bin", "/usr/bin/configurable-http-proxy", "/usr/bin")
    steps = made.steps(answers, files(answers, made_of, {TOKEN: "CONFIGPROXY_AUTH_TOKEN=x\n"}), "")
    (step,) = (s for s in steps if s.what == DAEMON)
    assert step.do is not None
    step.do()
    assert json.loads(daemon.read_text()) == {
        "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}},
        "live-restore": True,
    }
    (back,) = (s for s in made.back(answers, None) if s.what == DAEMON)
    assert back.do is not None
    back.do()
    assert "live-restore" not in daemon.read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tls", "caddy"], "--host is missing: use the name by which browsers find the Hub"),
        (
            ["--tls", "caddy", "--host", "a.b\nExecStart=/bin/sh"],
            "--host is 'a.b\\nExecStart=/bin/sh': use the name",
        ),
        (
            [*TRYING, "--admin", 'x"}; import os #'],
            "--admin is 'x\"}; import os #': use a name of a-z, 0-9, _, . and",
        ),
        ([*TRYING, "--user", "root"], "--user is root: the Hub needs a user of its own, such as fgpu"),
        ([*TRYING, "--data", "/"], "--data is '/': use a whole path of letters, digits,"),
        ([*TRYING, "--data", "/etc"], "--data is '/etc': use a folder of its own, such as /var/lib/fgpu"),
        (
            [*TRYING, "--tls", "proxy"],
            "--tls is proxy: local sessions are one user's, so others must not reach them",
        ),
        (
            [*TRYING, "--port", "8001"],
            "--port and --ports come to 8001, 8001, 8081, 10880: use four different ones",
        ),
    ],
)
def test_wrong_answer_is_refused_in_one_line(arguments: list[str], line: str, root: Path, fgpu: Fgpu) -> None:
    status, said = fgpu.failure("setup", "--root", str(root), "--yes", *arguments)
    assert (status, said[: len(line)]) == (2, line)
    assert not root.exists()


def test_systemd_analyze_accepts_the_units(root: Path, fgpu: Fgpu) -> None:
    setup(root, fgpu, *TRYING)
    for unit in sorted((root / "etc/systemd/system").glob("*.service")):
        judged = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
        )
        assert (judged.returncode, judged.stderr) == (0, ""), unit.name
        said = subprocess.run(
            ["systemd-analyze", "security", "--no-pager", "--offline=true", unit],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        (level,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", said)
        assert float(level) <= 3.0, f"{unit.name}: {level}"


def test_record_of_another_version_is_refused(root: Path, fgpu: Fgpu) -> None:
    setup(root, fgpu, *TRYING)
    record = root / ETC / "fgpu-setup.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "version": 2}))
    status, line = fgpu.failure("setup", "--root", str(root), "--yes")
    assert (status, line) == (1, f"{record} is of another version of fgpuspawner; use that one's fgpu setup")
