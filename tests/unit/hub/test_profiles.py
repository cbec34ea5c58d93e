"""The profiles: each demand lacks by itself, what is not known is never met, and the words say what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fgpuspawner.engines.base import Capabilities, Held, Safeguard
from fgpuspawner.hub.profiles import DEMANDS, Facts, Profile, judged, reached, words
from fgpuspawner.settings import FGPU

BEST: dict[str, Any] = {
    "egress": "closed",
    "quotas": [{"user": "*", "max_sessions": 2, "max_lifetime_s": 3600}],
}
ABLE = Capabilities("containers", real_limits=True, apart=True, networks=True)
FACTS = Facts(
    settings=FGPU(**BEST),
    able=ABLE,
    bound="https://:443",
    public="https://hub.example",
    outer_proxy=False,
    own_domains=True,
    own_cookies=True,
    own_accounts=True,
    users_config_off=True,
    simulated=(),
    sudo_images=(),
    held={"box": "mig"},
    safeguards={guard: Held(True, f"line for {guard}") for guard in Safeguard},
)
"""Everything is met."""


def lacking(facts: Facts) -> dict[str, bool | None]:
    return {own.demand.what: own.met for own in judged(facts) if not own.met}


def with_settings(**settings: Any) -> Facts:
    return replace(FACTS, settings=FGPU(**{**BEST, **settings}))


def with_safeguard(guard: Safeguard, met: bool | None) -> Facts:
    return replace(FACTS, safeguards={**FACTS.safeguards, guard: Held(met, f"line for {guard}")})


def test_everything_met_is_a_class_and_lacks_nothing() -> None:
    assert lacking(FACTS) == {}
    assert words(judged(FACTS)) == ["security: class (docs/security.md)"]


DISK = "Sessions and homes that take too much of the disk are ended"
CHANGES: list[tuple[str, Profile | None, Facts]] = [
    ("GPUs are real, or there are none", None, replace(FACTS, simulated=["box"])),
    (
        "Sessions run as users of their own",
        None,
        replace(FACTS, able=Capabilities("processes")),
    ),
    ("What browsers send is encrypted", None, replace(FACTS, bound="http://:80", public="")),
    (
        "Nobody but the Hub commands the engine from the network",
        None,
        with_safeguard(Safeguard.COMMANDS, False),
    ),
    (
        "CPU and memory of a session are held to what it asked for",
        None,
        with_safeguard(Safeguard.LIMITS, False),
    ),
    ("Something holds sessions to their slices", None, replace(FACTS, held={"a": "mig", "b": "none"})),
    ("Everybody has an account of their own", Profile.LAB, replace(FACTS, own_accounts=False)),
    ("Each user's servers have a domain of their own", Profile.LAB, replace(FACTS, own_domains=False)),
    (
        "No page of a user's domain logs its visitor in as somebody else",
        Profile.LAB,
        replace(FACTS, own_cookies=False),
    ),
    ("What lies in a home sets up no server", Profile.LAB, replace(FACTS, users_config_off=False)),
    ("The machine's ports are closed to sessions", Profile.LAB, with_safeguard(Safeguard.PORTS, False)),
    (
        "Clouds' metadata is closed to sessions",
        Profile.LAB,
        with_settings(egress="open", blocked_networks=["10.0.0.0/8"]),
    ),
    (
        "Sessions have no privileges, and gain none",
        Profile.LAB,
        with_safeguard(Safeguard.UNPRIVILEGED, False),
    ),
    ("The engine refuses needless system calls", Profile.LAB, with_safeguard(Safeguard.FILTERED, False)),
    ("A session has so many processes at most", Profile.LAB, with_safeguard(Safeguard.PROCESSES, False)),
    (DISK, Profile.LAB, with_settings(session_disk_mib=0)),
    (DISK, Profile.LAB, with_settings(home_disk_mib=0)),
    (DISK, Profile.LAB, with_settings(disk_over="warn")),
    ("Nobody becomes root in a session", Profile.LAB, with_settings(sudo_groups=["staff"])),
    ("Nobody becomes root in a session", Profile.LAB, replace(FACTS, sudo_images=["python"])),
    (
        "Sessions cannot end their neighbours on a GPU, or change their own limits",
        Profile.LAB,
        replace(FACTS, held={"box": "mps"}),
    ),
    (
        "Root in a session is nobody on the machine",
        Profile.DEPARTMENT,
        with_safeguard(Safeguard.REMAPPED, False),
    ),
    (
        "A session's root file system is read-only",
        Profile.DEPARTMENT,
        with_safeguard(Safeguard.READ_ONLY, False),
    ),
    ("Sessions reach nothing but the Hub and the service", Profile.DEPARTMENT, with_settings(egress="open")),
    ("Nobody runs what somebody else has saved", Profile.DEPARTMENT, with_settings(owners_may_commit=True)),
    ("Nobody holds more than their part, or without end", Profile.DEPARTMENT, with_settings(quotas=[])),
    (
        "Hardware or driver hold GPU memory, not a library in the session",
        Profile.DEPARTMENT,
        replace(FACTS, held={"a": "mig", "b": "interposer"}),
    ),
]


@pytest.mark.parametrize(("what", "left", "facts"), CHANGES, ids=[what for what, _, _ in CHANGES])
def test_each_demand_that_is_not_met_flips_the_profile(what: str, left: Profile | None, facts: Facts) -> None:
    assert lacking(facts)[what] is False
    assert reached(judged(facts)) is left


def test_every_demand_is_flipped_above() -> None:
    assert {what for what, _, _ in CHANGES} == {demand.what for demand in DEMANDS}


@pytest.mark.parametrize("guard", Safeguard)
def test_what_an_engine_does_not_say_is_unknown_and_never_met(guard: Safeguard) -> None:
    (demand,) = [own for own in DEMANDS if own.judge is guard]
    silent = replace(FACTS, safeguards={g: h for g, h in FACTS.safeguards.items() if g is not guard})
    for facts in (with_safeguard(guard, None), silent):
        assert lacking(facts) == {demand.what: None}
        assert reached(judged(facts)) is not Profile.CLASS
    assert any(
        f"unknown: {demand.what}: line for {guard}" in line
        for line in words(judged(with_safeguard(guard, None)))
    )


def test_gpus_of_a_machine_that_is_not_known_are_unknown() -> None:
    assert set(lacking(replace(FACTS, held={"a": "mig", "away": None})).values()) == {None}
    assert False in lacking(replace(FACTS, held={"a": "none", "away": None})).values()


@pytest.mark.parametrize(
    ("bound", "public", "outer_proxy", "met"),
    [
        ("https://:443", "", False, True),
        (
            "http://:443",
            "https://hub.example",
            True,
            True,
        ),  # Somebody else's proxy encrypts: it is vouched for.
        ("http://:443", "https://hub.example", False, None),  # The Hub's own listens in plain words.
        ("http://:443", "", True, False),
        ("http://10.0.0.1:8000", "http://hub.example", True, False),
        ("http://127.0.0.1:8000", "", False, True),
        ("http://127.0.0.1:8000", "https://hub.example", False, True),
        ("http://127.0.0.1:8000", "http://hub.example", False, False),
    ],
)
def test_encrypted_is_what_nobody_else_can_read(
    bound: str, public: str, outer_proxy: bool, met: bool | None
) -> None:
    facts = replace(FACTS, bound=bound, public=public, outer_proxy=outer_proxy)
    assert lacking(facts).get("What browsers send is encrypted", True) is met


def test_a_wider_network_closes_the_clouds_metadata_too() -> None:
    wider = [*FGPU().blocked_networks[2:], "169.254.0.0/15", "168.63.0.0/16", "100.100.0.0/16", "fd00::/8"]
    assert lacking(with_settings(egress="open", blocked_networks=wider)).keys() == {
        "Sessions reach nothing but the Hub and the service"
    }


def test_a_limit_for_one_group_or_without_an_end_keeps_nobody_from_hoarding() -> None:
    for quotas in (
        [{"user": "*", "max_sessions": 2}],
        [{"user": "*", "max_lifetime_s": 60}],
        [{"user": "alice", "max_sessions": 2, "max_lifetime_s": 60}],
        [{"user": "*", "resource_group": "default", "max_sessions": 2, "max_lifetime_s": 60}],
    ):
        assert reached(judged(with_settings(quotas=quotas))) is Profile.DEPARTMENT
    assert lacking(with_settings(quotas=[{"user": "*", "max_fgpu": 2}], max_time_limit_s=3600)) == {}


def test_the_words_say_the_next_profiles_lines_alone() -> None:
    facts = replace(with_safeguard(Safeguard.READ_ONLY, False), own_domains=False)
    assert words(judged(facts)) == [
        "security: lab (docs/security.md); for department it lacks:",
        "  missing: Each user's servers have a domain of their own: "
        'c.JupyterHub.subdomain_host = "https://hub.example"',
    ]
