"""The first program of a session's container: it waits for its identity, then becomes its server.

The identity (the server's command line and environment, with its token for the Hub) is one line
of JSON on standard input, so it is in no environment, log or image of the engine; writing there
takes control of the engine. While it waits, it imports the server's modules, which is most of a
start's time.

A JupyterHub server of this Python environment is started in this very process, with its token in
memory only: neither in the environment that terminals and kernels inherit, nor in a file. Any
other program is executed with its token in its environment, as programs expect.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

VERSION = 1
LARGEST_BYTES = 1 << 20
WAITING = "fgpu-start waits for its session"
"""Printed when only the identity is missing: the Hub recognises a warm container by it."""

SERVER = "jupyterhub-singleuser"
TOKENS = ("JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN")
CHOOSE_SERVER = ("JUPYTERHUB_SINGLEUSER_APP", "JUPYTERHUB_SINGLEUSER_EXTENSION")
"""With one of these set, the server may be another than the one that this process starts."""

PRELOADED = (
    "jupyter_server.serverapp",
    "jupyterlab.labapp",
    "jupyter_lsp",
    "jupyter_server_terminals.app",
    "notebook_shim.nbserver",
    "jupyterlab_fgpu.app",
    # Not jupyterhub.services.auth and .singleuser: these read the environment when imported.
    "jupyterhub.handlers",
    "jupyterhub.log",
    # Modules that these import only when a server begins to serve.
    "IPython.core.interactiveshell",
    "httpcore",
    "jinja2.ext",
    "jupyter_lsp.virtual_documents_shadow",
    "jupyter_server.nbconvert.handlers",
    "jupyter_server.services.api.handlers",
    "jupyter_server.services.config.handlers",
    "jupyter_server.services.contents.handlers",
    "jupyter_server.services.events.handlers",
    "jupyter_server.services.kernels.handlers",
    "jupyter_server.services.kernelspecs.handlers",
    "unittest.mock",
)
XSRF = "jupyterhub._xsrf_utils"
PR_SET_DUMPABLE = 4


class BadIdentity(Exception):
    """There is no valid identity. The message never repeats what was received."""


@dataclass(frozen=True)
class Identity:
    """The session's command line and environment."""

    argv: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)


def main() -> None:
    """Wait, and become the server."""
    parser = argparse.ArgumentParser(prog="fgpu-start", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--within", type=float, metavar="SECONDS", help="give up after so long; else wait for ever"
    )
    parser.add_argument("--preload", action="store_true", help=f"import what {SERVER} needs meanwhile")
    given = parser.parse_args()
    deadline = None if given.within is None else time.monotonic() + given.within
    folder = os.getcwd()
    _keep_memory_private()
    if given.preload and is_ours(SERVER):
        preload()
    if deadline is None:
        print(WAITING, flush=True)
    try:
        identity = read_identity(receive(0, deadline))
    except BadIdentity as e:
        sys.exit(f"fgpu-start: {e}")
    _forget_standard_input()
    become(identity, folder=folder, preloaded=given.preload)


def receive(source: int, deadline: float | None) -> bytes:
    """Return the line that comes from a file descriptor, without its end.

    Raises:
        BadIdentity: it did not come in time, or is too long.
    """
    line = bytearray()
    poll = select.poll()
    poll.register(source, select.POLLIN | select.POLLHUP)
    while b"\n" not in line:
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poll.poll(left_ms):
            raise BadIdentity("the Hub did not say in time which session this is; start it again")
        piece = os.read(source, 65536)
        if not piece:
            raise BadIdentity("standard input ended before the Hub said which session this is")
        line += piece
        if len(line) > LARGEST_BYTES:
            raise BadIdentity(f"what the Hub said is longer than {LARGEST_BYTES} bytes")
    return bytes(line.partition(b"\n")[0])


def read_identity(line: bytes) -> Identity:
    """Return the identity in a line.

    Raises:
        BadIdentity: there is none.
    """
    try:
        said: Any = json.loads(line)
    except ValueError:
        raise BadIdentity("what the Hub said is not JSON") from None
    if not isinstance(said, dict) or said.get("version") != VERSION:
        raise BadIdentity(f"the Hub speaks another version than {VERSION}: build the image again")
    argv, environment = said.get("argv"), said.get("environment")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise BadIdentity("argv: a list of words is wanted")
    if not isinstance(environment, dict) or not all(isinstance(v, str) for v in environment.values()):
        raise BadIdentity("environment: an object of texts is wanted")
    return Identity(tuple(argv), environment)


def is_ours(program: str) -> bool:
    """Return whether a program is of this Python environment, perhaps through a link."""
    found = shutil.which(program)
    own = os.path.join(os.path.dirname(sys.executable), os.path.basename(program))
    return found is not None and os.path.realpath(found) == os.path.realpath(own)


def preload() -> None:
    """Import the server's modules that do not depend on the environment to come."""
    for name in PRELOADED:
        # A module that an image lacks is not needed by its server.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def become(identity: Identity, *, folder: str, preloaded: bool) -> NoReturn:
    """Run the session's server, in this process if possible."""
    environment = dict(identity.environment)
    program, *arguments = identity.argv
    in_process = (
        preloaded
        and os.path.basename(program) == SERVER
        and is_ours(program)
        and not any(environment.get(name) for name in CHOOSE_SERVER)
    )
    token = environment.get(TOKENS[0], "")
    if in_process:
        for name in TOKENS:
            environment.pop(name, None)
    os.environ.update(environment)
    time.tzset()
    try:
        # Again: a home may have been mounted there since.
        os.chdir(folder)
    except OSError as e:
        sys.exit(f"fgpu-start: the working folder {folder} cannot be used: {e.strerror}")
    if not in_process:
        try:
            os.execvp(program, identity.argv)
        except OSError as e:
            sys.exit(f"fgpu-start: {program} cannot be run: {e.strerror}")
    # c.Spawner.notebook_dir may be relative to the folder.
    root = os.path.expanduser(os.environ.get("JUPYTERHUB_ROOT_DIR", ""))
    root = os.environ["JUPYTERHUB_ROOT_DIR"] = os.path.abspath(root)
    # The server may import code from its working folder, which the session's programs must not be
    # able to write.
    os.chdir("/")
    _start_programs_in(folder)
    _open_terminals_in(root)
    if XSRF in sys.modules and any(name.startswith("JUPYTERHUB_XSRF_") for name in environment):
        importlib.reload(sys.modules[XSRF])
    sys.argv = [program, *arguments]
    _serve(token)
    sys.exit(0)


def _start_programs_in(folder: str) -> None:
    """Make this server's programs start in a folder, unless the server names another."""
    start = subprocess.Popen.__init__

    def start_there(self: Any, *args: Any, cwd: Any = None, **kwargs: Any) -> None:
        start(self, *args, cwd=folder if cwd is None else cwd, **kwargs)

    subprocess.Popen.__init__ = start_there  # type: ignore[method-assign]


def _open_terminals_in(root: str) -> None:
    """Make terminals open in the requested folder below this one, not below /."""
    from jupyter_server_terminals.api_handlers import TerminalRootHandler  # noqa: PLC0415
    from jupyter_server_terminals.terminalmanager import TerminalManager  # noqa: PLC0415

    read, make = TerminalRootHandler.get_json_body, TerminalManager.new_terminal

    def read_there(self: Any) -> Any:
        asked = read(self) or {}
        folder = os.path.join(root, asked.get("cwd") or "")
        return {**asked, "cwd": folder if os.path.isdir(folder) else root}

    def make_there(self: Any, **options: Any) -> Any:
        return make(self, **{"cwd": root, **options})

    TerminalRootHandler.get_json_body = read_there
    TerminalManager.new_terminal = make_there


def _serve(token: str) -> None:
    # Only now: these read the environment when they are imported.
    from jupyterhub.singleuser import extension  # noqa: PLC0415
    from traitlets import default  # noqa: PLC0415

    class HubOAuth(extension.HubOAuth):  # type: ignore[misc, name-defined]
        """Returns the token, which is in no environment."""

        @default("api_token")
        def _token_of_the_session(self) -> str:
            return token

    class JupyterHubIdentityProvider(extension.JupyterHubIdentityProvider):  # type: ignore[misc, name-defined]
        """Has no token of its own: Jupyter Server would write it into the home folder."""

        token = ""

    extension.HubOAuth = HubOAuth
    extension.JupyterHubIdentityProvider = JupyterHubIdentityProvider
    extension.main()


def _keep_memory_private() -> None:
    """Protect this process's memory from the session's programs, which have the same user."""
    import ctypes  # noqa: PLC0415

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _forget_standard_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main()
