"""What Docker engines see to, by what they and the settings of containers say."""

from __future__ import annotations

from typing import Any

import pytest

from fgpuspawner.engines.base import Safeguard
from fgpuspawner.engines.docker.checks import LINES, judge
from fgpuspawner.engines.docker.spawner import FGPUSpawner

S = Safeguard
DEFAULTS = {name: trait.default() for name, trait in FGPUSpawner.class_traits(config=True).items()}
LIMITS = {"MemoryLimit": True, "CpuCfsQuota": True, "PidsLimit": True}
PLAIN = {"SecurityOptions": ["name=seccomp,profile=default"], "at": "http+docker://localhost", **LIMITS}
REMAPPED = {**PLAIN, "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin", "name=userns"]}
ROOTLESS = {**PLAIN, "SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}


def met(infos: list[Any], *, ports: bool | None = True, **own: Any) -> dict[Safeguard, bool | None]:
    """Return what is not met, or not known, beside the read-only root, which is off by default."""
    found = judge(infos, {**DEFAULTS, "read_only_root": True, **own}, ports=ports)
    assert {guard: held.line for guard, held in found.items()} == LINES
    return {guard: held.met for guard, held in found.items() if held.met is not True}


def test_every_safeguard_has_a_line() -> None:
    assert LINES.keys() == set(Safeguard)


def test_the_defaults_lack_a_read_only_root_and_an_engine_with_user_namespaces() -> None:
    assert met([PLAIN], read_only_root=False) == {S.REMAPPED: False, S.READ_ONLY: False}
    assert met([REMAPPED]) == {}
    assert met([ROOTLESS]) == {}


def test_every_engine_counts_and_one_that_is_silent_is_unknown() -> None:
    assert met([REMAPPED, PLAIN]) == {S.REMAPPED: False}
    assert met([REMAPPED, None]) == dict.fromkeys((S.FILTERED, S.LIMITS, S.PROCESSES, S.COMMANDS, S.REMAPPED))
    assert met([PLAIN, None])[S.REMAPPED] is False, "one that lacks it is enough to know"


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ([], False),
        (["name=seccomp,profile=unconfined"], False),
        (["name=seccomp,profile=/etc/ours.json"], None),
    ],
)
def test_a_filter_of_system_calls_is_the_engines_own(options: list[str], known: bool | None) -> None:
    assert met([{**REMAPPED, "SecurityOptions": [*options, "name=userns"]}]) == {S.FILTERED: known}


@pytest.mark.parametrize(
    "more",
    [
        {"Warnings": ["WARNING: API is accessible on http://0.0.0.0:2375 without encryption."]},
        {"at": "http://10.0.0.1:2375"},
    ],
)
def test_engine_open_to_the_network_is_found(more: dict[str, Any]) -> None:
    assert met([{**REMAPPED, **more}]) == {S.COMMANDS: False}


@pytest.mark.parametrize(
    ("own", "lacks"),
    [
        ({"cap_drop": ["NET_RAW"]}, {S.UNPRIVILEGED: False}),
        ({"security_opt": []}, {S.UNPRIVILEGED: False}),
        ({"security_opt": ["no-new-privileges:false"]}, {S.UNPRIVILEGED: False}),
        ({"container_user": "0:0"}, {S.UNPRIVILEGED: False}),
        ({"security_opt": ["no-new-privileges", "seccomp=unconfined"]}, {S.FILTERED: False}),
        ({"security_opt": ["no-new-privileges", "seccomp={}"]}, {S.FILTERED: None}),
        ({"pids_limit": 0}, {S.PROCESSES: False}),
        ({"pids_limit": -1}, {S.PROCESSES: False}),
        ({"extra_host_config": {"privileged": True}}, {S.UNPRIVILEGED: False}),
        ({"extra_host_config": {"cap_add": ["SYS_ADMIN"]}}, {S.UNPRIVILEGED: False}),
        ({"extra_host_config": {"cap_drop": []}}, {S.UNPRIVILEGED: False}),
        (
            {"extra_host_config": {"security_opt": ["seccomp=unconfined"]}},
            {S.UNPRIVILEGED: False, S.FILTERED: False},
        ),
        ({"extra_host_config": {"pids_limit": -1}}, {S.PROCESSES: False}),
        ({"extra_host_config": {"read_only": False}}, {S.READ_ONLY: False}),
        ({"extra_host_config": {"userns_mode": "host"}}, {S.UNPRIVILEGED: False, S.REMAPPED: False}),
        ({"extra_host_config": {"shm_size": 1 << 20}}, {}),
    ],
)
def test_container_settings_count(own: dict[str, Any], lacks: dict[Safeguard, bool | None]) -> None:
    assert met([REMAPPED], **own) == lacks


@pytest.mark.parametrize(
    "own",
    [
        {"extra_host_config": lambda s: {}},
        {"extra_create_kwargs": lambda s: {}},
        {"extra_create_kwargs": {"host_config": {}}},
    ],
)
def test_settings_from_a_function_are_unknown(own: dict[str, Any]) -> None:
    asked = (S.UNPRIVILEGED, S.FILTERED, S.PROCESSES, S.REMAPPED, S.READ_ONLY)
    assert met([REMAPPED], **own) == dict.fromkeys(asked)
    assert met([PLAIN], **own)[S.REMAPPED] is False


def test_engine_without_control_groups_enforces_no_limits() -> None:
    # What a rootless one says on a machine with control groups of version 1.
    without = {**ROOTLESS, **dict.fromkeys(LIMITS, False)}
    assert met([without]) == {S.LIMITS: False, S.PROCESSES: False}
    assert met([{**ROOTLESS, "CpuCfsQuota": False}]) == {S.LIMITS: False}


def test_ports_closed_follows_the_firewall_setting() -> None:
    for ports in (False, None):
        assert met([REMAPPED], ports=ports) == {S.PORTS: ports}
