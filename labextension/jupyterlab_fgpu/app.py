"""The server extension: its handlers, which share one reading."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from jupyter_core.paths import ENV_JUPYTER_PATH, SYSTEM_JUPYTER_PATH
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.gateway.gateway_client import GatewayClient
from jupyter_server.kernelspecs.handlers import KernelSpecResourceHandler
from jupyter_server.kernelspecs.handlers import default_handlers as kernel_files
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.ioloop import IOLoop
from traitlets import Bool, Float
from traitlets.config import LoggingConfigurable

from .details import DetailsReader, kernels_of
from .environment import NoService, read_service, read_slice
from .folders import link_folders
from .gpu_memory import GpuMemory
from .kernel_socket import KernelSocket
from .kernelspecs import KernelSpecs, first_kernel, named_kernels
from .own_setup import VARIABLE, OwnSetup
from .proof import Proof
from .service_client import Refused, ServiceError
from .status import SharedRead, StatusReader

NVML_TIMEOUT_S = 2.0
MOST_DIGITS = 9
ACTIONS = ("stop", "keep", "extend", "park", "wake", "never-park", "may-park", "rename", "resize")


class FGPUStatus(LoggingConfigurable):
    """The extension's settings, and the state that all tabs of this server share."""

    cache_s = Float(
        3.0,
        min=2.0,
        max=60.0,
        config=True,
        help="""Seconds for which one reading serves all tabs.

        Example: `c.FGPUStatus.cache_s = 5`
        """,
    )
    timeout_s = Float(
        4.0,
        min=0.1,
        max=60.0,
        config=True,
        help="""Seconds to wait for each call to the fGPU service before its last answer is shown.

        Example: `c.FGPUStatus.timeout_s = 10`
        """,
    )

    users_files_may_run = Bool(
        False,
        config=True,
        help="""Let extensions run files that the session's user can write as code of the server.

        Such code can use the session's token for the Hub. `trusted_extensions` of image.toml sets it.
        """,
    )

    def __init__(self, *, token: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        service = read_service(os.environ, token)
        if isinstance(service, NoService):
            self.log.info("jupyterlab_fgpu: %s", service.reason)
        slice_ = read_slice(os.environ)
        self.reader = StatusReader(
            service=service,
            slice_=slice_,
            gpu_memory=GpuMemory(
                session_id=None if slice_ is None else slice_.session_id, timeout_s=NVML_TIMEOUT_S
            ),
            timeout_s=self.timeout_s,
        )
        self.shared = SharedRead(self.reader.read, max_age_s=self.cache_s)
        self.details = DetailsReader(self.reader.client, lambda: kernels_of(self.parent))
        self.kernel_socket: KernelSocket | None = None
        self.own_setup: OwnSetup | None = None
        # The start counts as use: its user is about to do something.
        self.input_at_s = int(time.time())
        self.proof = Proof()
        self.shared_details = SharedRead(self._read_details, max_age_s=self.cache_s)

    async def _read_details(self) -> dict[str, Any]:
        reading = await self.shared.get()
        return await self.details.details(reading.session, reading.used)

    async def payload(self) -> dict[str, Any]:
        """Return the status for the browser and the kernels; unreadable parts do not raise."""
        payload = self.reader.payload(await self.shared.get())
        return {**payload, "script": None if self.own_setup is None else self.own_setup.script}

    async def explanation(self, tried_mib: int | None) -> dict[str, Any]:
        """Return the cause of an out-of-memory error that has just happened."""
        # A new reading: the program took memory until just now.
        reading = await self.shared.fresh()
        self.shared_details.forget()
        return await self.details.explanation(reading.session, reading.used, tried_mib)


class _Handler(APIHandler):
    auth_resource = "fgpu"
    # Open tabs poll: counting that as activity would keep idle servers alive.
    _track_activity = False

    def initialize(self, status: FGPUStatus) -> None:
        self.status = status

    def reply(self, body: dict[str, Any]) -> None:
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(body))


class StatusHandler(_Handler):
    """`GET fgpu/api/status`: the payload that jupyterlab_fgpu.status describes.

    With `?details=1` it also has `details` (jupyterlab_fgpu.details).
    """

    @web.authenticated
    @authorized
    async def get(self) -> None:
        payload = await self.status.payload()
        if self.get_query_argument("details", "") == "1":
            payload["details"] = await self.status.shared_details.get()
        self.reply(payload)


class ExplainHandler(_Handler):
    """`GET fgpu/api/explain?tried_mib=512`: the cause of an out-of-memory error, and what helps."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        text = self.get_query_argument("tried_mib", "")
        if text and not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
            raise web.HTTPError(400, f"tried_mib is {text[:20]!r}; it must be a whole number of MiB")
        self.reply(await self.status.explanation(int(text) if text else None))


class InputHandler(_Handler):
    """`fgpu/api/input`: the time of the last use of keyboard or pointer. POST sets it to now.

    An open tab sends many other requests without its user.
    """

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.reply({"input_at_s": self.status.input_at_s})

    @web.authenticated
    @authorized
    async def post(self) -> None:
        self.status.input_at_s = int(time.time())
        await self.get()


class ScriptHandler(_Handler):
    """`POST fgpu/api/script`: the user was told of the failed start script, so no browser tells it again."""

    @web.authenticated
    @authorized
    async def post(self) -> None:
        own = self.status.own_setup
        if own is not None and own.script is not None and own.script["state"] == "failed":
            own.script = None
        self.reply({})


class SessionHandler(_Handler):
    """`POST fgpu/api/sessions/{id}/ACTION`: pass a user's request about a session to the service.

    `stop` ends or cancels it, `keep` keeps an idle session that is about to be ended, `extend`
    extends its time limit, `park` gives its GPU to others, `wake` asks for it again. `rename` takes
    a `name`, and `resize` the amount as the service does, in JSON; its answer comes within some
    seconds, once the session has the amount or keeps its old one. The answer is the session, or the
    service's own status and error object.
    """

    _track_activity = True

    @web.authenticated
    @authorized
    async def post(self, session_id: str, action: str) -> None:
        try:
            sent = self.get_json_body() if action in ("resize", "rename") else {}
            if not isinstance(sent, dict):
                raise Refused("bad_argument", 'Send an object, such as {"fgpu": "0.5"}.', status=400)
            session = await self.status.reader.act(action, int(session_id), sent)
        except ServiceError as error:
            self.set_status(error.status)
            body = {"code": error.code, "field": error.field, "message": error.message}
            self.reply({"error": body})
            return
        finally:
            self.status.shared.forget()
        self.set_status(202 if action == "stop" else 200)
        self.reply({"session": session})


class ProofHandler(_Handler):
    """`fgpu/api/proof`: the last result of fgpu-verify (jupyterlab_fgpu.proof). POST runs it."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.reply(self.status.proof.last_run())

    @web.authenticated
    @authorized
    async def post(self) -> None:
        self.reply(self.status.proof.begin())


class KernelFileHandler(KernelSpecResourceHandler):  # type: ignore[misc]
    """A kernel's logo, which programs may have written: opened as a page it runs no script."""

    def set_default_headers(self) -> None:
        super().set_default_headers()
        self.set_header("Content-Security-Policy", "sandbox; frame-ancestors 'none'")


def offer_kernels(server_app: Any) -> None:
    """Open notebooks on the first kernel that the catalogue names for the image."""
    first = first_kernel(server_app.kernel_spec_manager)
    if first is not None:
        server_app.kernel_manager.default_kernel_name = first
    elif missing := named_kernels():
        server_app.log.warning("jupyterlab_fgpu: this image has none of its kernels %s", ", ".join(missing))


def refuse_users_files(*folders: str) -> None:
    """Refuse to run files as code of this server if the session's programs can write them, for good.

    Extensions may look for Python files or templates in the home or in the folder of a notebook. Files below
    ``folders``, of which the server is made, are not asked about.
    """
    own = tuple(f"{folder.rstrip('/')}/" for folder in folders if folder)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "exec":
            return
        file = getattr(arguments[0], "co_filename", "")
        if not file.startswith("/") or file.startswith(own):
            return
        # A file that is gone may have been written by anyone.
        if os.access(file, os.W_OK) or not os.path.exists(file):
            raise PermissionError(f"{file} can be written in the session, so its server does not run it")

    sys.addaudithook(audit)


def keep_home_out(server_app: Any) -> None:
    """Keep files that the session's programs can write from running as code in the server."""
    named = "kernel_spec_manager_class" in server_app.config.ServerApp
    if not named and not GatewayClient.instance(parent=server_app).gateway_enabled:
        server_app.kernel_spec_manager_class = KernelSpecs
    # Templates are programs. By default nbconvert also looks for them in the working folder, ...
    server_app.config.TemplateExporter.extra_template_basedirs = []
    with contextlib.suppress(ImportError):
        from nbconvert.exporters import base, templateexporter  # noqa: PLC0415

        # ... in the home, and where JUPYTER_PATH leads, which may be where users install.
        exporter = templateexporter.TemplateExporter
        exporter.get_prefix_root_dirs = lambda _: [*ENV_JUPYTER_PATH, *SYSTEM_JUPYTER_PATH]
        exporter.template_data_paths.default_args = ([],)
        # A notebook's metadata may name any object of any module as its exporter.
        base.import_item = _import_nothing
    with contextlib.suppress(ImportError):
        from jupyterlab_server import config  # noqa: PLC0415

        # page_config.json may name the address of the page's scripts: the one at home is not read.
        of = config._get_config_manager
        config._get_config_manager = lambda level, higher=False: (
            of("sys_prefix", True) if level == "all" else of(level, higher)
        )
    if not server_app.config.FGPUStatus.get("users_files_may_run", False):
        refuse_users_files(*{sys.prefix, sys.base_prefix, *sys.path})


def _import_nothing(name: str) -> Any:
    raise ImportError(f"{name}: exporters are known by their short names here, such as html")


def hub_token(server_app: Any) -> str:
    """Return the token with which this server identifies itself to the Hub, or ""."""
    # JupyterHub's extension is the identity provider; its older servers have this themselves.
    for owner in (getattr(server_app, "identity_provider", None), server_app):
        token = getattr(getattr(owner, "hub_auth", None), "api_token", "")
        if token:
            return str(token)
    return ""


def load(server_app: Any) -> None:
    """Register the handlers below the server's base URL."""
    status = FGPUStatus(parent=server_app, token=hub_token(server_app))
    root = server_app.web_app.settings["base_url"]
    base = url_path_join(root, "fgpu", "api")
    handlers = {
        "status": StatusHandler,
        "explain": ExplainHandler,
        "input": InputHandler,
        "proof": ProofHandler,
        "script": ScriptHandler,
        # At most 18 digits: the service's database holds no longer id.
        f"sessions/([0-9]{{1,18}})/({'|'.join(ACTIONS)})": SessionHandler,
    }
    own = [(f"{base}/{path}", handler, {"status": status}) for path, handler in handlers.items()]
    files = [(url_path_join(root, path), KernelFileHandler) for path, _ in kernel_files]
    server_app.web_app.add_handlers(".*$", [*files, *own])
    offer_kernels(server_app)
    link_folders(Path.home(), server_app.log)
    if os.environ.get(VARIABLE):
        slice_ = read_slice(os.environ)
        status.own_setup = OwnSetup(
            status.reader.client,
            None if slice_ is None else slice_.session_id,
            server_app.log,
            server_app.root_dir,
        )
        status.own_setup.give_to(server_app)
        # The loop runs later.
        IOLoop.current().add_callback(status.own_setup.begin)
    try:
        # It lives as long as the server, and ends with its process.
        status.kernel_socket = KernelSocket(status.payload)
    except OSError as error:
        server_app.log.info("jupyterlab_fgpu: kernels are told no queue: %s", error)
    server_app.log.info("jupyterlab_fgpu is loaded")
