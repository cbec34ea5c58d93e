"""A real Hub process with its real proxy, for tests: started, asked through its API, killed, started again."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import requests

import quickstart
from fgpu_scheduler import Session, Store

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
PROXY = ROOT / ".node/node_modules/.bin/configurable-http-proxy"
ADMIN_PASSWORD = "test-admin-password-0123456789-abcdef"
MINI = f"c.Spawner.cmd = ['python', {str(Path(__file__).parent / 'miniserver.py')!r}]\n"
"""Lines after `configure` with which sessions run the miniserver."""

CONFIG = """
import os
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_port = {port} + 1
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_port}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.ConfigurableHTTPProxy.auth_token = "{token}"
c.JupyterHub.authenticator_class = "shared-password"
c.SharedPasswordAuthenticator.user_password = "test-password"
c.SharedPasswordAuthenticator.admin_password = "test-admin-password-0123456789-abcdef"
c.Authenticator.admin_users = {{"admin"}}
c.Authenticator.allow_all = True
c.Authenticator.any_allow_config = True
c.JupyterHub.services = [{{"name": "test", "api_token": "{token}"}}]
c.JupyterHub.load_roles = [
    {{"name": "test", "services": ["test"], "scopes": ["admin:users", "admin:servers", "tokens", "list:services",
     "access:servers", "proxy", "shutdown", "custom:fgpu:admin", "custom:fgpu:queue:read", "access:services"]}},
]
c.JupyterHub.log_level = "DEBUG"
{before}
configure(c, data_dir={data!r}, service_port={port} + 3, **{settings!r})
{after}
"""


WITHOUT_SERVICE = """
c.JupyterHub.services = [s for s in c.JupyterHub.services if s["name"] != "fgpu"]
c.JupyterHub.load_roles = [r for r in c.JupyterHub.load_roles if "fgpu" not in r.get("services", [])]
"""
"""Lines after `configure` that leave the managed service out."""

PATIENT = "c.JupyterHub.tornado_settings = {'slow_spawn_timeout': 10}\n"
"""Lines before `configure`: a refusal comes with the form, and not after a page that waits, also on a slow machine."""


GIVEN: list[tuple[int, int]] = []
"""The latest ports that this worker was given: each time the first, and how many."""


def free_ports(count: int) -> int:
    """Return the first of ``count`` neighbouring free ports.

    They are below 32768: the system gives higher ports to connections and could take one before it is used. Each
    worker has its own range of ports, as a free port is used some seconds later.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    part = 12_000 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        first = 20_000 + part * worker + secrets.randbelow(part - count)
        if any(first < given + many and given < first + count for given, many in GIVEN):
            continue  # Its Hub may be down for a moment.
        taken = []
        try:
            for port in range(first, first + count):
                s = socket.socket()
                taken.append(s)
                s.bind(("127.0.0.1", port))
        except OSError:
            continue
        finally:
            for s in taken:
                s.close()
        GIVEN.append((first, count))
        del GIVEN[:-100]
        return first


PATIENCE = 3
"""Timeouts are longer by this factor on a machine that runs other tests at the same time."""


def until(found: Callable[[], T], *, within_s: float = 60, what: str = "") -> T:
    """Return what ``found`` returns as soon as it is true; fail after `PATIENCE` times ``within_s``.

    What takes long is asked for less often: what asks is in the way of what is waited for.
    """
    began = time.monotonic()
    while True:
        value = found()
        if value:
            return value
        waited_s = time.monotonic() - began
        if waited_s > PATIENCE * within_s:
            raise AssertionError(f"not within {waited_s:.0f} s: {what or found}; last: {value!r}")
        time.sleep(min(0.05 + waited_s / 20, 0.5))


RUNNING: weakref.WeakSet[HubProcess] = weakref.WeakSet()
"""The Hubs of this process, for what they have logged when a test fails."""


class HubProcess:
    """One Hub on ports and in a folder of its own. ``before`` and ``after`` are lines around `configure`.

    With ``outer_proxy`` its proxy is no child of the Hub, as `make run` has it, and outlives it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        before: str = "",
        after: str = "",
        env: dict[str, str] | None = None,
        outer_proxy: bool = False,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.port = free_ports(4)
        self.token = secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "hub.log"
        self.env = env or {}
        self.before = before + ("c.ConfigurableHTTPProxy.should_start = False\n" if outer_proxy else "")
        self.after = after
        self.outer_proxy = outer_proxy
        self.proxy: subprocess.Popen[bytes] | None = None
        # Where its containers are: this machine's own engine, and those of others.
        self.docker_hosts: tuple[str, ...] = ("",)
        # As by default, but where it can be removed with the Hub.
        self.accounts = Path(f"/dev/shm/fgpu-test-{secrets.token_hex(6)}")
        own = {"simulated_gpus": "1", "resume_grace_s": 10, "accounting_dir": str(self.accounts)}
        self.settings = {**own, **settings}
        self.process: quickstart.Started | None = None
        self._store: Store | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def write_config(self) -> Path:
        """Write the Hub's configuration and return its path."""
        path = self.folder / "jupyterhub_config.py"
        path.write_text(
            CONFIG.format(
                port=self.port,
                proxy_port=self.port + 2,
                proxy=str(PROXY),
                token=self.token,
                data=str(self.data),
                before=self.before,
                after=self.after,
                settings=self.settings,
            )
        )
        return path

    def start(self, *, wait: bool = True) -> HubProcess:
        """Start the Hub; with ``wait``, until it answers."""
        config = self.write_config()
        if self.outer_proxy and self.proxy is None:
            self.start_proxy()
        env = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTERHUB")} | self.env
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        self.process = quickstart.starter().start(
            "jupyterhub", "-f", str(config), folder=config.parent, env=env, log=self.log
        )
        RUNNING.add(self)
        if wait:
            until(self._answers, within_s=120, what="the Hub answers")
        return self

    def start_proxy(self) -> None:
        """Start a proxy beside the Hub, or another where there was one, and wait until it answers."""
        words = [str(PROXY), "--ip", "127.0.0.1", "--port", str(self.port)]
        words += ["--api-ip", "127.0.0.1", "--api-port", str(self.port + 2), "--log-level", "warn"]
        words += ["--error-path", str(ROOT / "fgpuspawner" / "proxy_pages")]
        with (self.folder / "proxy.log").open("ab") as output:
            self.proxy = subprocess.Popen(
                words,
                cwd=self.folder,
                env={**os.environ, "CONFIGPROXY_AUTH_TOKEN": self.token},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        until(lambda: self.routes() is not None, what="the proxy answers")

    def routes(self) -> dict[str, Any] | None:
        """Return what the proxy routes where, by path; None while it does not answer."""
        url = f"http://127.0.0.1:{self.port + 2}/api/routes"
        try:
            answer = requests.get(url, headers={"Authorization": f"token {self.token}"}, timeout=10)
        except (requests.ConnectionError, requests.Timeout):
            return None
        return {path: route["target"] for path, route in answer.json().items()}

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the Hub ended with {self.process.returncode}:\n{self.log_text()[-4000:]}")
        try:
            return requests.get(f"{self.url}/hub/api/", timeout=10).status_code == 200
        except (requests.ConnectionError, requests.Timeout):
            return False

    def kill(self) -> None:
        """SIGKILL the Hub, as a crash would; its proxy and sessions stay."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def terminate(self) -> None:
        """SIGTERM the Hub and wait until it has ended."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)

    def close(self) -> None:
        """End the Hub and everything that ever descended from it."""
        RUNNING.discard(self)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        if self.proxy is not None:
            self.proxy.kill()
            self.proxy.wait(30)
        if self._store is not None:
            self._store.close()
        mine = [p for p in psutil.process_iter() if self._is_mine(p)]
        for process in mine:
            # Some have ended already, with the Hub.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        until(
            lambda: not any(map(_runs, mine)), within_s=30, what="all that descended from the Hub has ended"
        )
        shutil.rmtree(self.accounts, ignore_errors=True)

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            if process.pid == os.getpid():
                return False
            return str(self.folder) in " ".join(process.cmdline()) or str(self.folder) in (
                process.environ().get("FGPU_LIMITS_FILE", "")
                + process.environ().get("FGPU_SETTINGS", "")
                + process.cwd()
            )
        except (psutil.Error, OSError):
            return False

    def log_text(self) -> str:
        """Return what the Hub has logged."""
        return self.log.read_text(errors="replace")

    # -- the Hub's API --------------------------------------------------------------------------------

    def api(self, method: str, path: str, *, token: str | None = None, **kwargs: Any) -> requests.Response:
        """Ask the Hub's API, as the test's own service unless a token is given."""
        headers = {"Authorization": f"token {token or self.token}"}
        return requests.request(method, f"{self.url}/hub/api/{path}", headers=headers, timeout=60, **kwargs)

    def add_user(self, name: str) -> str:
        """Make sure that the user exists, and return a token of theirs."""
        assert self.api("POST", f"users/{name}").status_code in (201, 409)
        return str(self.api("POST", f"users/{name}/tokens").json()["token"])

    def browser(self, user: str, *, leads_to: str = "/hub/token") -> requests.Session:
        """Return a browser in which a user, or the administrator ``admin``, has logged in."""
        browser = requests.Session()
        assert browser.get(f"{self.url}/hub/login", timeout=120).ok
        password = ADMIN_PASSWORD if user == "admin" else "test-password"
        form = {"username": user, "password": password, "_xsrf": browser.cookies.get("_xsrf", path="/hub/")}
        answer = browser.post(f"{self.url}/hub/login?next={leads_to}", data=form, timeout=120)
        assert answer.ok, answer.text
        return browser

    def _server(self, user: str, server: str) -> str:
        return f"users/{user}/servers/{server}" if server else f"users/{user}/server"

    def spawn(
        self, user: str, server: str = "", *, options: dict[str, Any] | None = None, token: str | None = None
    ) -> requests.Response:
        """Ask for a server, with these options or with the Hub's last ones."""
        kwargs = {} if options is None else {"json": {"user_options": options}}
        return self.api("POST", self._server(user, server), token=token, **kwargs)

    def refused(
        self, user: str, server: str = "", *, options: dict[str, Any] | None = None
    ) -> requests.Response:
        """Ask for a server that is refused, and return the Hub's refusal.

        A slow Hub first answers that the start is under way (202, or 201 after a failed one), or that it still cleans
        up. Then it is asked again.
        """
        (answer,) = until(
            lambda: (
                [a]
                if (a := self.spawn(user, server, options=options)).status_code >= 400
                and "is pending" not in a.text
                else []
            ),
            what=f"{user}/{server} is refused",
        )
        return answer

    def stop(self, user: str, server: str = "") -> requests.Response:
        """Ask for a server's end."""
        return self.api("DELETE", self._server(user, server))

    def end_all(self) -> None:
        """End every session, and wait until the Hub has let go of their servers."""

        def is_free() -> bool:
            for key in self.states():
                self.stop(*key.split("/", 1))
            servers = [
                server for user in self.api("GET", "users").json() for server in user["servers"].values()
            ]
            return not self.states() and not any(s["pending"] or s["ready"] for s in servers)

        until(is_free, within_s=90, what="all sessions have ended")

    def servers(self, user: str) -> dict[str, Any]:
        """Return the Hub's model of the user's servers."""
        answer = self.api("GET", f"users/{user}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["servers"])

    def ready(self, user: str, server: str = "") -> bool:
        """Return whether the Hub says that this server is ready."""
        return bool(self.servers(user).get(server, {}).get("ready"))

    # -- the scheduler's database ---------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The scheduler's database, as another process sees it."""
        if self._store is None:
            self._store = Store(self.settings.get("db_url") or f"sqlite:///{self.data / 'fgpu.sqlite'}")
            until(self._store_is_there, what="the Hub has made its database")
        return self._store

    def has_store(self) -> bool:
        """Return whether a Hub has made the database in its folder: one that is refused leaves it empty."""
        database = self.data / "fgpu.sqlite"
        return database.exists() and database.stat().st_size > 0

    def _store_is_there(self) -> bool:
        from fgpu_scheduler import StoreUnavailable

        assert self._store is not None
        try:
            self._store.connect_readonly()
        except StoreUnavailable:
            return False
        return True

    def sessions(self) -> dict[str, Session]:
        """Return the live sessions by ``user/server``. Each server has at most one but for those ending."""
        found: dict[str, Session] = {}
        for session in self.store.snapshot(int(time.time())).sessions:
            key = f"{session.request.user}/{session.request.server_name}"
            if key not in found or found[key].state == "TERMINATING":
                found[key] = session
        return found

    def states(self) -> dict[str, str]:
        """Return the state of each live session by ``user/server``."""
        return {key: session.state.value for key, session in self.sessions().items()}

    def reach(self, states: dict[str, str], *, within_s: float = 90) -> None:
        """Wait until the live sessions are exactly these."""
        seen: dict[str, str] = {}

        def same() -> bool:
            seen.clear()
            seen.update(self.states())
            return seen == states

        try:
            until(same, within_s=within_s)
        except AssertionError:
            raise AssertionError(f"{seen} != {states}; the Hub says:\n{self.log_text()[-6000:]}") from None


def _runs(process: psutil.Process) -> bool:
    """Return whether the process runs. A process counts as ended before the system's first process has reaped it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running(folder: Path, **kwargs: Any) -> Iterator[HubProcess]:
    """A Hub for the time of a test."""
    hub = HubProcess(folder, **kwargs)
    try:
        yield hub.start()
    finally:
        hub.close()


def module_world(kind: Callable[[Path], Any], folder: str) -> Any:
    """Return a module's fixture: one world of this kind, with a Hub that is closed after the module's last test."""

    @pytest.fixture(scope="module")
    def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        found = None
        try:
            found = kind(tmp_path_factory.mktemp(folder))
            yield found
        finally:
            if found is not None:
                found.hub.close()

    return world


SLOW_LAUNCH = """
import asyncio, time
from fgpuspawner.concurrency.waiting import to_the_end
from fgpuspawner.engines.local.engine import LocalEngine

def until_allowed():
    while not os.path.exists("go"):
        time.sleep(0.05)

start = LocalEngine.start
async def slow(self, spec):
    # Like an engine that takes its time, and cannot be interrupted.
    if spec.session.id == 1 and spec.session.attempt == 1:
        await to_the_end(asyncio.get_running_loop().run_in_executor(None, until_allowed))
    return await start(self, spec)
LocalEngine.start = slow
"""
"""The first session's launch waits for the file ``go`` in the Hub's folder."""
