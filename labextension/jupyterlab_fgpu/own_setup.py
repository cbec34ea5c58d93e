"""The session's own variables and start script: for its kernels and terminals, never for its server.

They come from the service with the server's token, so that they are in no file, and in no
environment or manifest of an engine. The server's own environment stays as it is.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from .service_client import ServiceClient, ServiceError

VARIABLE = "FGPU_SETUP"
"""Set for a session that has variables or a script."""
TRIES = 10
AGAIN_S = 2.0


class OwnSetup:
    """Gets them once, hands the variables to kernels and terminals, and runs the script."""

    def __init__(self, client: ServiceClient | None, session_id: int | None, log: Any, folder: str) -> None:
        self._client = client
        self._session_id = session_id
        self._log = log
        self._folder = folder
        self._reading: asyncio.Future[None] | None = None
        #: Empty until they were read.
        self.variables: dict[str, str] = {}
        #: Of the script, for the browser: "running", "done" or "failed", with its exit status; None
        #: without one, and once a failure was told.
        self.script: dict[str, Any] | None = None

    def begin(self) -> asyncio.Future[None]:
        """Begin to read them, once; the result is done when the variables are known or cannot be had."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        return self._reading

    async def _read(self) -> None:
        if self._client is None or self._session_id is None:
            return
        for left in range(TRIES, 0, -1):
            try:
                found = await self._client.setup(self._session_id)
                break
            except ServiceError as error:
                if left == 1:
                    self._log.error("fgpu: your variables and start script cannot be read: %s", error.message)
                    self.script = {"state": "failed", "status": None}
                    return
                await asyncio.sleep(AGAIN_S)
        self.variables = found["variables"]
        if found["script"]:
            self.script = {"state": "running", "status": None}
            # A reference, or the loop would forget it.
            self._running = asyncio.ensure_future(self._run(found["script"]))

    async def _run(self, script: str) -> None:
        began = time.monotonic()
        self._log.info("fgpu: your start script begins")
        # Not an argument, which other users of a machine may see, and not its input, which its
        # programs would read.
        file = os.memfd_create("start-script")
        try:
            os.write(file, script.encode() + b"\n")
            child = await asyncio.create_subprocess_exec(
                "bash",
                f"/proc/self/fd/{file}",
                cwd=self._folder,
                env={**os.environ, **self.variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                stderr=2,
                pass_fds=(file,),
                start_new_session=True,
            )
            status = await child.wait()
        except OSError as error:
            self._log.error("fgpu: your start script cannot run: %s", error.strerror)
            status = 127
        finally:
            os.close(file)
        self.script = {"state": "failed" if status else "done", "status": status}
        how = f"failed with status {status}" if status else "has ended"
        self._log.log(
            30 if status else 20, "fgpu: your start script %s after %d s", how, time.monotonic() - began
        )

    def give_to(self, server_app: Any) -> None:
        """Give the variables to kernels and terminals that start from now on.

        A kernel waits until they are known.
        """
        manager = server_app.kernel_manager
        start = manager.start_kernel

        async def start_with_variables(*args: Any, env: Any = None, **kwargs: Any) -> Any:
            await self.begin()
            given = {**(os.environ if env is None else env), **self.variables}
            return await start(*args, env=given, **kwargs)

        manager.start_kernel = start_with_variables
        try:
            from terminado.management import TermManagerBase  # noqa: PLC0415
        except ImportError:
            return
        make: Callable[..., dict[str, str]] = TermManagerBase.make_term_env

        def make_with_variables(manager: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
            return {**make(manager, *args, **kwargs), **self.variables}

        TermManagerBase.make_term_env = make_with_variables
