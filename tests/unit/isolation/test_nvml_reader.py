"""NVML in its own process: a missing answer is unknown, and blocks nothing else."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from fgpuspawner.isolation import nvml_reader
from fgpuspawner.isolation.nvml_reader import NvmlReader, NvmlUnknown

GPU = "GPU-1f"


HANGS = "import sys, time\nsys.stdin.readline()\ntime.sleep(1000)\n"
DIES = "import os, sys\nsys.stdin.readline()\nos.abort()\n"
CHATTERS = "import sys\nfor line in sys.stdin: print('not json', flush=True)\n"
LIES = "import sys\nfor line in sys.stdin: print('{\"devices\": {}}', flush=True)\n"
REFUSES = 'import sys\nfor line in sys.stdin: print(\'{"error": "GPU is lost"}\', flush=True)\n'


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (HANGS, "no answer within"),
        (DIES, "its process ended without"),
        (CHATTERS, "Expecting value"),
        (LIES, "makes no sense"),
        (REFUSES, "GPU is lost"),
    ],
)
async def test_misbehaving_library_is_unknown_and_does_not_block(
    program: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only of the one that hangs it is waited for: the others have to start first.
    monkeypatch.setattr(nvml_reader, "child_command", lambda *a: [sys.executable, "-c", program])
    reader = NvmlReader("libnvidia-ml.so.1", within_s=1.0 if program == HANGS else 60.0)
    try:
        for _ in range(2):
            begun = time.monotonic()
            looking = asyncio.ensure_future(asyncio.to_thread(reader.device_uses, [GPU], {}))
            # The event loop is not blocked.
            await asyncio.sleep(0)
            with pytest.raises(NvmlUnknown, match=words):
                await looking
            assert time.monotonic() - begun < 50
    finally:
        reader.close()


SAYS_THAT_IT_HANGS = (
    "import sys, time\nsys.stdin.readline()\nopen(sys.argv[1], 'w').close()\ntime.sleep(1000)\n"
)


def until_there(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, "the child was never asked"
        time.sleep(0.01)


async def test_closing_a_reader_does_not_wait_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    monkeypatch.setattr(
        nvml_reader, "child_command", lambda *a: [sys.executable, "-c", SAYS_THAT_IT_HANGS, str(asked)]
    )
    reader = NvmlReader("libnvidia-ml.so.1", within_s=1000.0)
    looking = asyncio.ensure_future(asyncio.to_thread(reader.device_uses, [GPU], {}))
    async with asyncio.timeout(60):
        await asyncio.to_thread(until_there, asked)
        await asyncio.to_thread(reader.close)
        with pytest.raises(NvmlUnknown):
            await looking


def test_a_library_that_is_not_there_is_unknown_not_empty() -> None:
    reader = NvmlReader("/no/such/libnvidia-ml.so.1")
    try:
        with pytest.raises(NvmlUnknown, match="cannot be loaded"):
            reader.device_uses([GPU], {})
    finally:
        reader.close()
