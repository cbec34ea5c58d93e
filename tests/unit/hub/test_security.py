"""What `fgpu check` says of security: each demand lacks by itself, what is not known is never met, and words say it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fgpuspawner.engines.base import Capabilities, Held, Safeguard
from fgpuspawner.hub.checks import DEMANDS, Facts, security_lines

FACTS = Facts(
    able=Capabilities("containers", real_limits=True, apart=True, networks=True),
    bound="https://:443",
    public="https://hub.example",
    outer_proxy=False,
    own_accounts=True,
    isolation={"box": "mig"},
    safeguards={guard: Held(True, f"line for {guard}") for guard in Safeguard},
)
"""Everything is met."""


def lacking(facts: Facts) -> dict[str, bool | None]:
    return {demand.what: met for demand in DEMANDS if not (met := demand.held(facts).met)}


def with_safeguard(guard: Safeguard, met: bool | None) -> Facts:
    return replace(FACTS, safeguards={**FACTS.safeguards, guard: Held(met, f"line for {guard}")})


def test_everything_met_lacks_nothing() -> None:
    assert lacking(FACTS) == {}
    assert security_lines(FACTS) == [
        "security: docs/security.md has the settings; and nothing else is missing"
    ]


CHANGES: list[tuple[str, Facts]] = [
    ("What browsers send is encrypted", replace(FACTS, bound="http://:80", public="")),
    ("Something holds sessions to their slices", replace(FACTS, isolation={"a": "mig", "b": "none"})),
    ("Everybody has an account of their own", replace(FACTS, own_accounts=False)),
    (
        "Sessions cannot end their neighbours on a GPU, or change their own limits",
        replace(FACTS, isolation={"box": "mps"}),
    ),
    (
        "Hardware or driver hold GPU memory, not a library in the session",
        replace(FACTS, isolation={"a": "mig", "b": "interposer"}),
    ),
    *((own.what, with_safeguard(own.judge, False)) for own in DEMANDS if isinstance(own.judge, Safeguard)),
]


@pytest.mark.parametrize(("what", "facts"), CHANGES, ids=[what for what, _ in CHANGES])
def test_each_demand_that_is_not_met_is_missing(what: str, facts: Facts) -> None:
    assert lacking(facts)[what] is False


def test_every_demand_and_every_safeguard_is_in_one_of_the_cases() -> None:
    assert {what for what, _ in CHANGES} == {demand.what for demand in DEMANDS}
    assert {own.judge for own in DEMANDS if isinstance(own.judge, Safeguard)} == set(Safeguard)


@pytest.mark.parametrize("guard", Safeguard)
def test_unknown_safeguard_is_never_met(guard: Safeguard) -> None:
    (demand,) = [own for own in DEMANDS if own.judge is guard]
    silent = replace(FACTS, safeguards={g: h for g, h in FACTS.safeguards.items() if g is not guard})
    for facts in (with_safeguard(guard, None), silent):
        assert lacking(facts) == {demand.what: None}
    assert security_lines(with_safeguard(guard, None)) == [
        "security: docs/security.md has the settings; and this is missing or unknown:",
        f"  unknown for {demand.since}: {demand.what}: line for {guard}",
    ]


def test_isolation_of_an_unknown_machine_is_unknown() -> None:
    assert set(lacking(replace(FACTS, isolation={"a": "mig", "away": None})).values()) == {None}
    assert False in lacking(replace(FACTS, isolation={"a": "none", "away": None})).values()


@pytest.mark.parametrize(
    ("bound", "public", "outer_proxy", "met"),
    [
        ("https://:443", "", False, True),
        (
            "http://:443",
            "https://hub.example",
            True,
            True,
        ),  # Another proxy encrypts, by the administrator's word.
        ("http://:443", "https://hub.example", False, None),  # The Hub's own listens in plain words.
        ("http://:443", "", True, False),
        ("http://10.0.0.1:8000", "http://hub.example", True, False),
        ("http://127.0.0.1:8000", "", False, True),
        ("http://127.0.0.1:8000", "https://hub.example", False, True),
        ("http://127.0.0.1:8000", "http://hub.example", False, False),
    ],
)
def test_encryption_of_the_public_address(
    bound: str, public: str, outer_proxy: bool, met: bool | None
) -> None:
    facts = replace(FACTS, bound=bound, public=public, outer_proxy=outer_proxy)
    assert lacking(facts).get("What browsers send is encrypted", True) is met
