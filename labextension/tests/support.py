"""What the tests share besides fixtures: a session's environment, a browser tab, a GPU driver."""

from __future__ import annotations

import json
from typing import Any

import pytest
from standin import TOKEN
from tornado.httpclient import HTTPClientError

from jupyterlab_fgpu import smi

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


class Driver(smi.Nvml):
    """NVML on a machine with one GPU."""

    def __init__(self, total_mib: int, used_mib: int, processes: dict[int, int | None]) -> None:
        self.total, self.used = total_mib * smi.MIB, used_mib * smi.MIB
        self.processes = processes

    def close(self) -> None:
        pass

    def has(self, name: str) -> bool:
        return True

    def call(self, name: str, *arguments: Any) -> None:
        if name == "nvmlDeviceGetMemoryInfo_v2":
            memory = arguments[1]._obj
            memory.total, memory.used = self.total, self.used
        elif name == "nvmlDeviceGetComputeRunningProcesses_v3":
            _, count, listed = arguments
            count._obj.value = len(self.processes)
            for entry, (pid, mib) in zip(listed, self.processes.items()):
                entry.pid, entry.used = pid, smi.NOT_AVAILABLE if mib is None else mib * smi.MIB


def driver(
    *, total_mib: int = 8192, used_mib: int = 0, processes: dict[int, int | None] | None = None
) -> Driver:
    return Driver(total_mib, used_mib, processes or {})


def answers(monkeypatch: pytest.MonkeyPatch, nvml: smi.Nvml) -> None:
    """Let this driver answer the server under test."""
    monkeypatch.setattr(smi, "Nvml", lambda: nvml)
