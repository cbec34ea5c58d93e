"""The network guard goes on after any failure, and says what it cannot close."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.docker import checks, firewall
from fgpuspawner.engines.docker import network_guard as guards
from fgpuspawner.engines.docker.address import Address
from fgpuspawner.engines.docker.daemon import Daemon
from fgpuspawner.engines.docker.firewall import (
    FirewallRules,
    state,
)
from fgpuspawner.engines.docker.fleet import Fleet
from fgpuspawner.engines.docker.network_guard import NetworkGuard
from fgpuspawner.settings import FGPU

RULES = FirewallRules(installation="abc123", services=(("172.18.0.1", 8001),))


def test_rules_that_cannot_be_listed_are_a_failure_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(firewall.FirewallFailed, match="Too many open files"):
        state("abc123")


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


def test_closed_egress_without_a_firewall_is_refused_and_open_one_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadSettings, match=r"c\.FGPU\.egress is 'closed', and the Hub cannot close it"):
        guards.guard(FGPU(egress="closed"), RULES)
    assert guards.guard(FGPU(egress="closed", firewall="managed-elsewhere"), RULES) is None
    warning = "Sessions can reach every port that this machine opens on all its addresses"
    assert warning not in caplog.text
    assert guards.guard(FGPU(), RULES) is None
    assert warning in caplog.text


def test_closed_egress_on_another_machine_needs_an_external_firewall() -> None:
    far = Address("tcp://192.0.2.9:2376", ("far",), {}, "192.0.2.9")
    fleet = Fleet([Daemon(far, installation="abc123")])

    def check(**given: str) -> None:
        NetworkGuard(FGPU(**given), fleet, installation="abc123")._check_other_machines()

    with pytest.raises(BadSettings, match=r"cannot close it on other machines \(node far\)"):
        check(egress="closed")
    check(egress="closed", firewall="managed-elsewhere")
    check()
