"""``fgpu check``: what a good configuration gives, and the one line for one that cannot work."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commandline import Fgpu, filled, run, write_config
from fgpu_scheduler import lock_file
from fgpuspawner.cli import check, hub_traits
from fgpuspawner.engines.docker import checks
from fgpuspawner.engines.docker.address import Address
from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.isolation.native import Native
from hubprocess import free_ports

ROOT = Path(__file__).parents[3]
is_taken = hub_traits.is_taken


@pytest.fixture(autouse=True)
def _other_hubs_of_this_machine_take_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_traits, "is_taken", lambda host, port: False)


def test_check_describes_a_good_configuration(
    tmp_path: Path, fgpu: Fgpu, native_parts: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "has_here", lambda: (4, 8192))
    nodes = [{"name": "box", "cpu": 4, "memory_mib": 8192, "gpus": {"simulated": 1}}]
    path = write_config(tmp_path, nodes=nodes, fgpu_per_gpu=5)
    status, out, err = fgpu("check", "--config", path)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    room, time, limits = lines.pop(7), lines.pop(7), lines.pop(7)
    assert re.fullmatch("  (clock: |WARNING: the clock of this machine is not synchronised: ).*", time)
    assert re.fullmatch(rf"  disk: \d+ MiB left for {re.escape(str(tmp_path))}/data", room)
    assert (
        limits
        == "  disk: sessions are the Hub's own user, and can fill its disk: limits of the disk are not held"
    )
    assert lines[:8] == [
        f"OK: {path}",
        "  sessions: local processes, all of one system user (LocalFGPUSpawner)",
        "  node box (group default): 4 CPU, 8192 MiB, 1 GPU",
        "    0: Simulated GPU 8192 MiB, 8192 MiB = 5 fGPU, GPU-simulated-box-0 (simulated)",
        "    isolation: interposer: libfgpu holds memory and compute; its GPUs are simulated",
        "  images: 1 (python), 8 not enabled",
        f"  database: sqlite:///{tmp_path}/data/fgpu.sqlite, made ready when the Hub starts",
        "  security: docs/security.md has the settings; and this is missing or unknown:",
    ]
    unknown = "unknown for local processes, all of one system user"
    assert (
        lines[8]
        == f"    unknown for lab: CPU and memory of a session are held to what it asked for: {unknown}"
    )
    assert all(" for " in line for line in lines[8:])
    assert not (tmp_path / "data" / "fgpu.sqlite").exists()


@pytest.mark.parametrize(
    ("has", "warned"),
    [
        ((3, 8192), "only 3 cores"),
        ((4, 8191), "only 8191 MiB of memory"),
        ((2, 512), "only 2 cores and 512 MiB of memory"),
    ],
)
def test_check_warns_of_more_cpu_or_memory_than_the_machine_has(
    tmp_path: Path, fgpu: Fgpu, monkeypatch: pytest.MonkeyPatch, has: tuple[int, int], warned: str
) -> None:
    monkeypatch.setattr(check, "has_here", lambda: has)
    path = write_config(
        tmp_path, nodes=[{"name": "box", "cpu": 4, "memory_mib": 8192, "gpus": {"simulated": 1}}]
    )
    _, out, _ = fgpu("check", "--config", path)
    assert f"    WARNING: this machine has {warned}\n" in out


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0x2001, "clock: synchronised"),
        (0x40, "WARNING: the clock of this machine is not synchronised: "),
        (None, "clock: not known whether it is synchronised; ask on the machine: "),
    ],
)
def test_check_reports_an_unsynchronised_clock(
    monkeypatch: pytest.MonkeyPatch, status: int | None, said: str
) -> None:
    def adjtimex(asked: ctypes.Array[ctypes.c_char]) -> int:
        if status is None:
            return -1
        asked[40:44] = status.to_bytes(4, "little")
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(adjtimex=adjtimex))
    assert check._clock().startswith(said)


@pytest.mark.parametrize(
    ("time", "said"),
    [
        (lambda now: now.isoformat(), None),
        (lambda now: f"{now - timedelta(seconds=4):%Y-%m-%dT%H:%M:%S}.123456789Z", None),
        (lambda now: (now + timedelta(seconds=90)).isoformat(), r"is (90|89) s ahead of the Hub's: .*chrony"),
        (lambda now: (now - timedelta(minutes=5)).isoformat(), r"is 30\d s behind the Hub's: .*timedatectl"),
        (lambda now: "", "the time of the Docker engine of b is not known: it says ''"),
    ],
    ids=["the same", "nanoseconds", "ahead", "behind", "silent"],
)
def test_check_compares_clocks_of_remote_engines(time: Callable[[datetime], str], said: str | None) -> None:
    client = SimpleNamespace(info=lambda: {"SystemTime": time(datetime.now(UTC))})
    lines = checks.wrong_time(client, Address("tcp://b:2376", ("b",), host="b"))
    assert (lines == []) if said is None else re.search(said, *lines)


def test_check_warns_of_a_missing_proxy_token(
    tmp_path: Path, fgpu: Fgpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONFIGPROXY_AUTH_TOKEN", raising=False)
    path = Path(write_config(tmp_path, after="\nc.ConfigurableHTTPProxy.should_start = False\n"))
    status, out, _ = fgpu("check", "--config", str(path))
    assert status == 0
    words = "  WARNING: CONFIGPROXY_AUTH_TOKEN is not set here; the Hub needs it in its environment\n"
    assert words in out
    monkeypatch.setenv("CONFIGPROXY_AUTH_TOKEN", "secret")
    assert words not in fgpu("check", "--config", str(path))[1]
    monkeypatch.delenv("CONFIGPROXY_AUTH_TOKEN")
    # Where `fgpu setup` keeps it, for the Hub's unit.
    (tmp_path / "proxy.env").touch(mode=0)
    assert words not in fgpu("check", "--config", str(path))[1]


def test_check_warns_of_an_unknown_image_in_the_warm_pool(
    tmp_path: Path, fgpu: Fgpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = replace(LocalFGPUSpawner.capabilities, warm_pool=True)
    monkeypatch.setattr(LocalFGPUSpawner, "capabilities", able)
    _, out, _ = fgpu("check", "--config", write_config(tmp_path, warm_pool={"pyhton": 2}))
    assert (
        "  WARNING: c.FGPU.warm_pool: image 'pyhton' is not in the catalogue; none of it is kept ready\n"
        in out
    )


def test_check_warns_of_shared_images_without_subdomains(
    tmp_path: Path, fgpu: Fgpu, native_parts: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = replace(LocalFGPUSpawner.capabilities, saves_images=True)
    for saves, may, host, warned in (
        (able, True, "", True),
        (able, False, "", False),
        (able, True, "https://hub.example", False),
        (LocalFGPUSpawner.capabilities, True, "", False),
    ):
        monkeypatch.setattr(LocalFGPUSpawner, "capabilities", saves)
        path = write_config(tmp_path, owners_may_commit=may)
        Path(path).write_text(Path(path).read_text() + f"\nc.JupyterHub.subdomain_host = {host!r}\n")
        status, out, _ = fgpu("check", "--config", path)
        assert status == 0
        assert ("  DANGER: Users may share images" in out) is warned
        assert ("Set c.JupyterHub.subdomain_host" in out) is warned


def test_check_reports_isolation_none_without_libfgpu(
    tmp_path: Path, fgpu: Fgpu, native_parts: Native
) -> None:
    native_parts.library.unlink()
    status, out, err = fgpu("check", "--config", write_config(tmp_path))
    assert (status, err) == (0, "")
    assert "    isolation: none: NOTHING holds a session to its slice, as libfgpu is not built; " in out


def test_check_refuses_an_unavailable_isolation(tmp_path: Path, fgpu: Fgpu, native_parts: Native) -> None:
    status, out, err = fgpu("check", "--config", write_config(tmp_path, isolation="mig"))
    assert (status, out) == (1, "")
    assert err.startswith("fgpu: c.FGPU.isolation is 'mig', which node 'local' cannot have: ")
    assert not (tmp_path / "data" / "isolation.json").exists(), "nothing is written"


def test_check_accepts_a_database_that_no_hub_has_used(tmp_path: Path, fgpu: Fgpu) -> None:
    path = write_config(tmp_path)
    database = tmp_path / "data" / "fgpu.sqlite"
    database.parent.mkdir()
    database.touch()
    assert "fgpu.sqlite, made ready when the Hub starts\n" in fgpu("check", "--config", path)[1]
    filled(f"sqlite:///{database}")
    assert "fgpu.sqlite, answers\n" in fgpu("check", "--config", path)[1]


def test_check_of_the_shipped_example_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PORT", str(free_ports(4)))
    ended = run("check", "--config", str(ROOT / "jupyterhub_config.py"), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"OK: {ROOT}/jupyterhub_config.py\n")


@pytest.mark.parametrize(
    ("after", "settings", "line"),
    [
        ("c.FGPU.queue_timeout_s = 0", {}, "c.FGPU.queue_timeout_s is 0; it must be at least 1 s"),
        (
            "",
            {"service_port": 8001},
            "c.FGPU.service_port is 8001, which the proxy's API uses too; give one of them another port",
        ),
        ("import nowhere", {}, "jupyterhub_config.py:8: ModuleNotFoundError: No module named 'nowhere'"),
        ("raise SystemExit(3)", {}, "{path} ends the process with status 3"),
        (
            "c.JupyterHub.spawner_class = 'simple'",
            {},
            "{path} does not set up fgpuspawner: call fgpuspawner.config.configure(c) in it",
        ),
        (
            "c.JupyterHub.hub_port = 'x'",
            {},
            "{path}: The 'hub_port' trait of a JupyterHub instance expected an int, not the str 'x'.",
        ),
    ],
)
def test_check_refuses_a_wrong_configuration_in_one_line(
    after: str, settings: dict[str, Any], line: str, tmp_path: Path, fgpu: Fgpu
) -> None:
    path = write_config(tmp_path, after=after, **settings)
    assert fgpu.failure("check", "--config", path) == (1, line.format(path=path))


@pytest.mark.parametrize(
    ("after", "line"),
    [
        ("c.JupyterHub.admin_acess = True", "c.JupyterHub.admin_acess is not a setting; did you mean admin_access?"),
        (
            "c.PAMAuthenticator.allowed_group = {'lab'}",
            "c.PAMAuthenticator.allowed_group is not a setting; did you mean allowed_groups?",
        ),
        ("c.Spawner.dis_user_config = 1",
         "c.Spawner.dis_user_config is not a setting; did you mean disable_user_config?"),
        ("c.JupiterHub.port = 1", "c.JupiterHub: there is no such class; did you mean c.JupyterHub?"),
        ("c.Authenticator.allow_all = False",
         "no user may log in: set c.Authenticator.allow_all = True, or allowed_users; "
         "where your authenticator has its own rules, c.Authenticator.any_allow_config = True"),
        ("c.JupyterHub.bind_url = 'https://127.0.0.1:8000'", "c.JupyterHub.bind_url is https, and there is no "
         "certificate: set c.JupyterHub.ssl_cert and ssl_key; or if another web server encrypts, use bind_url = "
         "\"http://127.0.0.1:8000\" with c.JupyterHub.public_url"),
        ("c.JupyterHub.ssl_cert = c.JupyterHub.ssl_key = '/nowhere/hub.pem'",
         "c.JupyterHub.ssl_cert and ssl_key: /nowhere/hub.pem: No such file or directory"),
        ("c.JupyterHub.ssl_cert = __file__", "c.JupyterHub.ssl_cert and ssl_key: set both"),
        ("c.PAMAuthenticator.allowed_groups = 5", "c.PAMAuthenticator: The 'allowed_groups' trait of a PAMAuthenticator"),
        ("c.JupyterHub.ssl_cert = c.JupyterHub.ssl_key = __file__",
         "c.JupyterHub.ssl_cert and ssl_key: {path} with {path}: "),
    ],
)  # fmt: skip
def test_check_names_wrong_settings_of_jupyterhub(after: str, line: str, tmp_path: Path, fgpu: Fgpu) -> None:
    path = write_config(tmp_path, after=after)
    status, out, err = fgpu("check", "--config", path)
    assert (status, err) == (1, "")
    assert out.startswith(f"FAIL: {path}\n  FAIL: {line.format(path=path)}")
    assert out.count("FAIL: ") == 2
    assert json.loads(fgpu("check", "--json", "--config", path)[1])["level"] == "FAIL"


OWN_AUTHENTICATOR = """
from jupyterhub.auth import Authenticator
class Lab(Authenticator):
    {body}
c.Authenticator.allow_all = False
c.JupyterHub.authenticator_class = Lab
"""


@pytest.mark.parametrize(
    ("after", "line"),
    [
        (OWN_AUTHENTICATOR.format(body="def check_allowed(self, name, found=None): return True"),
         "WARNING: perhaps no user may log in: set "),
        # As NativeAuthenticator does.
        (OWN_AUTHENTICATOR.format(body="def __init__(self, **more): super().__init__(**more); self.db.bind"),
         "WARNING: who may log in is not known: Lab needs a running Hub (AttributeError)"),
        ("c.Authenticator.allow_all = False\nc.JupyterHub.authenticator_class = 'null'", ""),
        ("c.JupyterHub.authenticator_class = 'gitlab'\nc.GitHubOAuthenticator.client_id = 'a'", ""),
        ("c.JupyterHub.Spawner.args = []", ""),
        ("c.JupyterHub.bind_url = 'https://127.0.0.1:8000'\nc.ConfigurableHTTPProxy.should_start = False\n"
         "c.JupyterHub.ssl_cert = c.JupyterHub.ssl_key = '/for/the/proxy/alone.pem'", ""),
    ],
)  # fmt: skip
def test_check_passes_an_authenticator_that_it_cannot_judge(
    after: str, line: str, tmp_path: Path, fgpu: Fgpu
) -> None:
    status, out, err = fgpu("check", "--config", write_config(tmp_path, after=after))
    assert (status, err) == (0, "")
    assert "FAIL" not in out
    assert line in out
    assert ("log in" in out) == bool(line)


def test_check_ignores_ports_that_the_hub_does_not_open(
    tmp_path: Path, fgpu: Fgpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(hub_traits, "is_taken", lambda host, port: tried.append(port))
    after = "c.JupyterHub.hub_bind_url = 'http://127.0.0.1:7001'"
    path = write_config(tmp_path, after=after, service_port=7002)
    assert fgpu("check", "--config", path)[0] == 0
    assert tried == [7002, 7001, 8000, 8001]
    # Left by a Hub that was killed: the next one ends it.
    (tmp_path / "data").mkdir()
    (tmp_path / "data/jupyterhub-proxy.pid").touch()
    assert fgpu("check", "--config", path)[0] == 0
    assert tried[4:] == [7002, 7001]


def test_check_finds_a_used_port_unless_the_hub_runs(
    tmp_path: Path, fgpu: Fgpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        monkeypatch.setattr(hub_traits, "is_taken", lambda host, of: of == port and is_taken(host, of))
        path = write_config(tmp_path, after=f"\nc.JupyterHub.hub_port = {port}\n")
        status, out, _ = fgpu("check", "--config", path)
        line = (
            f"c.JupyterHub.hub_port: port {port} is used by another program: end it, or choose another port"
        )
        assert (status, f"  FAIL: {line}\n" in out) == (1, True)
        (tmp_path / "data").mkdir()
        with contextlib.closing(lock_file(tmp_path / "data/hub.lock", "")):
            assert fgpu("check", "--config", path)[0] == 0


def test_check_names_the_possible_classes(tmp_path: Path, fgpu: Fgpu) -> None:
    path = write_config(tmp_path, after="c.JupyterHub.authenticator_class = 'pamm'")
    status, line = fgpu.failure("check", "--config", path)
    assert status == 1
    assert line.startswith(
        "c.JupyterHub.authenticator_class is 'pamm', which cannot be imported; use one of auth0, "
    )
    assert ", pam, shared-password" in line


def test_check_reports_that_docker_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    path = Path(write_config(tmp_path))
    path.write_text(path.read_text().replace("configure(c,", 'configure(c, runtime="docker",'))
    ended = run("check", "--config", str(path), cwd=tmp_path)
    words = "the Docker engine does not answer; is it running, and may the Hub use it? (No such file or directory)"
    assert (ended.returncode, ended.stderr) == (1, f"fgpu: {words}\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_check_by_root_judges_as_the_hub_user(
    tmp_path: Path, fgpu: Fgpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(check, "has_here", lambda: asked.append(os.geteuid()) or (4, 8192))
    # Others than root cannot enter the folders of tests.
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        path, data = write_config(Path(name)), Path(name, "data")
        assert fgpu("check", "--config", path)[0] == 0
        assert not data.exists()
        data.mkdir(mode=0o700)
        os.chown(data, 4711, 4711)
        assert fgpu("check", "--config", path)[0] == 0
        assert (asked, os.geteuid()) == ([0, 4711], 0)
        # The Hub's user need not reach the file that root names.
        shut = Path(name, "shut")
        shut.mkdir(mode=0o700)
        closed = shut / "jupyterhub_config.py"
        closed.write_text(Path(path).read_text() + "c.ConfigurableHTTPProxy.should_start = False\n")
        assert fgpu("check", "--config", str(closed))[0] == 0
        data.chmod(0o500)
        status, out, _ = fgpu("check", "--config", path)
        assert (
            status,
            f"  FAIL: c.FGPU.data_dir: {data} cannot be written to by the Hub's user\n" in out,
        ) == (1, True)


def test_check_names_the_line_of_a_syntax_error(tmp_path: Path, fgpu: Fgpu) -> None:
    path = tmp_path / "broken.py"
    path.write_text("c = get_config()\nc.FGPU.max_fgpu = (\n")
    status, line = fgpu.failure("check", "--config", str(path))
    assert (status, line) == (1, "broken.py:2: SyntaxError: '(' was never closed (broken.py, line 2)")
