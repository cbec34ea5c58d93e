"""The network guard goes on after any failure, and says what it cannot close."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from requests.exceptions import JSONDecodeError

from fgpu_scheduler import BadSettings
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.docker import checks, firewall
from fgpuspawner.engines.docker import network_guard as guards
from fgpuspawner.engines.docker import networks as network
from fgpuspawner.engines.docker.address import Address
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.firewall import (
    Firewall,
    Rules,
    state,
)
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.network_guard import NetworkGuard
from fgpuspawner.settings import FGPU

RULES = Rules(installation="abc123", services=(("172.18.0.1", 8001),))


async def test_firewall_is_kept_after_any_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = iter([OSError(24, "Too many open files"), UnicodeDecodeError("utf-8", b"", 0, 1, "x")])
    looked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fails(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        for way in ways:
            raise way
        loop.call_soon_threadsafe(looked.set)
        return subprocess.CompletedProcess([], 4, "", "somebody else holds the lock")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(firewall.FirewallFailed, match="Too many open files"):
        state("abc123")
    monkeypatch.setattr(firewall, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(guards, "guard", lambda *_: Firewall(RULES))
    background = Background(guards.log)
    NetworkGuard(FGPU(), Fleet([]), installation="abc123").open([], background)
    async with asyncio.timeout(60):
        await looked.wait()
    await background.close()


async def test_network_sweep_goes_on_after_any_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = iter([JSONDecodeError("Expecting value", "<html>", 0), KeyError("Name")])
    looked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def look(*_: object, **__: object) -> int:
        for way in ways:
            raise way
        loop.call_soon_threadsafe(looked.set)
        return 0

    monkeypatch.setattr(network.UserNetworks, "remove_unused", look)
    monkeypatch.setattr(network.UserNetworks, "check_pool", lambda _: None)
    for name in ("SWEEP_EVERY_S", "KEPT_FOR_S"):
        monkeypatch.setattr(guards, name, 0.001)
    daemon = Daemon(Address("", ("here",)), installation="abc123")
    daemon.answers = True
    background = Background(guards.log)
    settings = FGPU(firewall="managed-elsewhere")
    NetworkGuard(settings, Fleet([daemon]), installation="abc123").open([], background)
    async with asyncio.timeout(60):
        await looked.wait()
    await background.close()
    daemon.containers.executor.shutdown()


def test_hub_with_an_iptables_that_hangs_is_refused_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for program in ("iptables", "ip6tables"):
        (tmp_path / program).write_text("#!/bin/sh\nexec sleep 600\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(firewall, "COMMAND_TIMEOUT_S", 0.1)
    with pytest.raises(BadSettings, match=r"cannot be read: .*timed out"):
        guards.guard(FGPU(), RULES)
    assert checks.ports_closed(FGPU()) is None


def test_closed_egress_without_a_firewall_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall, "can_apply", lambda: False)
    with pytest.raises(BadSettings, match=r"c\.FGPU\.egress is 'closed', and the Hub cannot close it"):
        guards.guard(FGPU(egress="closed"), RULES)
    assert guards.guard(FGPU(egress="closed", firewall="managed-elsewhere"), RULES) is None
    assert guards.guard(FGPU(), RULES) is None


def test_closed_egress_on_another_machine_needs_an_external_firewall() -> None:
    far = Address("tcp://192.0.2.9:2376", ("far",), {}, "192.0.2.9")
    fleet = Fleet([Daemon(far, installation="abc123")])

    def check(**given: str) -> None:
        NetworkGuard(FGPU(**given), fleet, installation="abc123")._check_other_machines()

    with pytest.raises(BadSettings, match=r"cannot close it on other machines \(node far\)"):
        check(egress="closed")
    check(egress="closed", firewall="managed-elsewhere")
    check()
