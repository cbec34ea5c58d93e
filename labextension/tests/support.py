"""What the tests share besides fixtures: a session's environment, a browser tab, a GPU driver."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from standin import TOKEN
from tornado.httpclient import HTTPClientError

from jupyterlab_fgpu.gpu_memory import MIB

SESSION_ENVIRONMENT = {
    "FGPU_SESSION_ID": "12",
    "FGPU_AMOUNT": "0.5",
    "FGPU_MEMORY_MIB": "2048",
    "FGPU_COMPUTE_PERCENT": "25",
    "FGPU_SIMULATED": "1",
    "NVIDIA_VISIBLE_DEVICES": "GPU-51a00000-0000-0000-0000-000000000001",
    "JUPYTERHUB_SERVER_NAME": "gpu-1",
    "JUPYTERHUB_API_TOKEN": TOKEN,
}


class Caller:
    """Calls the extension as a browser tab does and keeps all that it was sent."""

    def __init__(self, fetch: Any) -> None:
        self._fetch = fetch
        self.sent = ""

    async def call(
        self,
        *path: str,
        method: str = "GET",
        params: dict[str, str] | None = None,
        body: str = "{}",
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON body, errors included."""
        arguments: dict[str, Any] = {"method": method, "params": params}
        if method == "POST":
            arguments["body"] = body
        try:
            response = await self._fetch("fgpu", "api", *path, **arguments)
        except HTTPClientError as error:
            response = error.response
        text = response.body.decode()
        self.sent += text + str(dict(response.headers))
        return response.code, json.loads(text)

    async def status(self) -> dict[str, Any]:
        """Return the payload; it must be a 200."""
        code, body = await self.call("status")
        assert code == 200
        return body

    async def details(self) -> dict[str, Any]:
        """Return the payload as an open panel asks for it."""
        code, body = await self.call("status", params={"details": "1"})
        assert code == 200
        return body


class NVMLError(Exception):
    """What pynvml raises."""


def driver(
    *, total_mib: int = 8192, used_mib: int = 0, processes: dict[int, int | None] | None = None
) -> Any:
    """What pynvml looks like on a machine with one GPU."""
    listed = [
        SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB)
        for pid, mib in (processes or {}).items()
    ]
    memory = SimpleNamespace(total=total_mib * MIB, used=used_mib * MIB)
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: memory,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: listed,
    )
