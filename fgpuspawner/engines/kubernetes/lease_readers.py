"""What NVML says of a node's GPUs, asked in the lease pods that hold them, and which pod a process belongs to.

A lease pod with ``hostPID`` sees its node's processes, and NVML names them. The Hub starts nvml_child.py there through
the API (``pods/exec``, over TLS and with the Hub's own token), and keeps that one process. Nothing in the pod listens,
and it has no token: other pods have nothing to call.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.engines.kubernetes.api import Api, Refused
from fgpuspawner.engines.kubernetes.dialects.base import Manifest, name_of
from fgpuspawner.isolation import nvml_child
from fgpuspawner.isolation.nvml_reader import (
    ANSWER_WITHIN_S,
    LONGEST_LINE_BYTES,
    NVML,
    NvmlReader,
    NvmlUnknown,
)

START = (
    'python=/opt/fgpu/bin/python; [ -x "$python" ] || python=python3; exec "$python" -I -S -c "$0" "$1" "$2"'
)
LOAD = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv.pop())), 'nvml_child', 'exec'))"
"""The program comes over the same channel, so a lease pod of an older Hub runs this Hub's."""
PROGRAM = Path(nvml_child.__file__).read_bytes()
POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
Channel = aiohttp.ClientWebSocketResponse[Any]


class LeasePodsReader(NvmlReader):
    """Asks NVML in one node's lease pods. ``pods`` returns them by the UUID of their GPU.

    Calls come from threads; the work is done in the Hub's event loop. ``api`` is the reader's own, because each client
    has a limited number of connections, and these stay open.
    """

    def __init__(
        self,
        node_id: str,
        *,
        api: Api,
        path: str,
        pods: Callable[[], Mapping[str, Manifest]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(f"the leases of node {node_id}")
        self._api = api
        self._path = path
        self._pods = pods
        self._loop = loop
        #: By the pods' uids.
        self._channels: dict[str, Channel] = {}
        self._asking_now = asyncio.Lock()

    def ask_here(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer for each device, "error" for one that could not be asked. Blocks."""
        return self._wait(self.ask(question))

    def pods_of(self, pids: Sequence[int]) -> dict[int, str]:
        """Return the uid of the pod of each process that runs in one. Blocks; raises NvmlUnknown."""
        found = self._wait(self._ask_any({"do": "cgroups", "pids": list(pids)}))["cgroups"]
        pods = {int(pid): POD.search(str(text)) for pid, text in found.items()}
        # The outermost name is the kubelet's; a session can make no cgroup.
        return {pid: match[1].replace("_", "-") for pid, match in pods.items() if match}

    def close(self) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._closed(), self._loop)

    async def _closed(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()
        await self._api.close()

    def _wait(self, call: Any) -> dict[str, Any]:
        asked = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return dict(asked.result(ANSWER_WITHIN_S + 1))
        except TimeoutError as e:
            asked.cancel()
            raise NvmlUnknown(f"{self.library} do not answer") from e

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Do as `ask_here`, in the Hub's event loop."""
        async with self._asking_now:
            uuids = list(question["uuids"])
            answers = await asyncio.gather(*(self._device(uuid, question) for uuid in uuids))
        return {"devices": dict(zip(uuids, answers, strict=True))}

    async def _device(self, uuid: str, question: Mapping[str, Any]) -> Any:
        try:
            pod = self._pods().get(uuid)
            if pod is None:
                raise NvmlUnknown(f"no lease pod holds GPU {uuid}")
            return (await self._ask_pod(pod, {**question, "uuids": [uuid]}))["devices"][uuid]
        except (NvmlUnknown, KeyError, TypeError) as e:
            return {"error": str(e)[:500]}

    async def _ask_any(self, question: Mapping[str, Any]) -> dict[str, Any]:
        async with self._asking_now:
            for pod in self._pods().values():
                return await self._ask_pod(pod, question)
        raise NvmlUnknown(f"{self.library} are not there")

    async def _ask_pod(self, pod: Manifest, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return one pod's answer; after a failure the next question starts another process there."""
        name, uid = name_of(pod), str(pod["metadata"]["uid"])
        if not pod["spec"].get("hostPID"):
            # In its own PID namespace NVML lists no process of a session, which would read as unused.
            raise NvmlUnknown(
                f"the lease pod {name} was made without measure_gpus; delete it once it is free"
            )
        # A channel with an answer that was not waited for is not used again.
        channel = self._channels.pop(uid, None)
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                channel = channel or await self._opened(name)
                answer = json.loads(await _answer(channel, json.dumps(question).encode()))
                self._channels[uid] = channel
        except (OSError, ValueError, EngineSilent, Refused, aiohttp.ClientError) as e:
            raise NvmlUnknown(f"the lease pod {name}: {e or 'it does not answer'}"[:500]) from e
        finally:
            if channel is not None and uid not in self._channels:
                await channel.close()
        if not isinstance(answer, dict) or "error" in answer:
            raise NvmlUnknown(f"the lease pod {name}: {answer}"[:500])
        return answer

    async def _opened(self, name: str) -> Channel:
        words = ["/bin/sh", "-c", START, LOAD, NVML, str(len(PROGRAM))]
        channel = await self._api.channel(f"{self._path}/{name}", "lease", words, stdin=True)
        await channel.send_bytes(b"\0" + PROGRAM)
        return channel


async def _answer(channel: Channel, question: bytes) -> bytes:
    """Send a question and return the next line of output; raises OSError with what the program said if it ended."""
    await channel.send_bytes(b"\0" + question + b"\n")
    line, said = b"", b""
    while not line.endswith(b"\n"):
        message = await channel.receive()
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise OSError(
                f"its process ended: {said.decode(errors='replace')}" if said else "the connection ended"
            )
        stream, piece = message.data[:1], message.data[1:]
        line, said = (line + piece, said) if stream == b"\1" else (line, (said + piece)[-500:])
        if len(line) > LONGEST_LINE_BYTES:
            raise OSError("an answer without an end")
    return line
