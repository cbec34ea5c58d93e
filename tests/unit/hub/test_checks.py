"""Checks of a Hub's configuration: settings that do not suit queued sessions, and the security demands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.app import JupyterHub
from traitlets.config import Config

from fgpu_scheduler import BadSettings
from fgpuspawner.config import configure
from fgpuspawner.engines.base import Capabilities, Held, Safeguard
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.hub.checks import DEMANDS, Facts, check_hub, security_lines, use_start_timeout
from fgpuspawner.settings import FGPU, configured

CULLER = ["python3", "-m", "jupyterhub_idle_culler", "--url=http://localhost:8081/hub/api", "--timeout=3600"]
CULLED = (
    "service 'cull-idle' ends idle sessions without a warning; take it out of c.JupyterHub.services and set "
    'c.FGPU.reclaim = {"*": {"idle_after_s": 3600}}'
)
NOT_QUEUED = "c.{} does not go with queued sessions; take it out: {}"


def check(folder: Path, settings: dict[str, dict[str, Any]], **more: Any) -> None:
    """Configure a Hub after these settings, and make the checks of its start."""
    c = Config(settings)
    configure(c, runtime="kubernetes", data_dir=str(folder / "data"), **more)
    c.JupyterHub.log_level = "CRITICAL"
    app = JupyterHub(config=c)
    app.hub = None
    app.proxy = app.proxy_class(parent=app, app=app)
    check_hub(app, FGPU.from_config(c).checked())


@pytest.mark.parametrize(
    ("section", "name", "value", "line"),
    [
        (
            "JupyterHub",
            "allow_named_servers",
            False,
            "c.JupyterHub.allow_named_servers is False, and c.FGPU.max_sessions is 8: others than the first are named "
            "servers; set c.JupyterHub.allow_named_servers = True, or c.FGPU.max_sessions = 1",
        ),
        (
            "JupyterHub",
            "internal_ssl",
            True,
            "c.JupyterHub.internal_ssl is True, and sessions are reached by HTTP",
        ),
        ("JupyterHub", "services", [{"name": "cull-idle", "command": CULLER}], CULLED),
        ("JupyterHub", "services", [{"name": "cull-idle", "command": " ".join(CULLER)}], CULLED),
        ("JupyterHub", "services", [{"name": "cull-idle", "command": ["jupyterhub-idle-culler"]}], CULLED),
        *(
            (
                section,
                "consecutive_failure_limit",
                5,
                NOT_QUEUED.format(f"{section}.consecutive_failure_limit", "one image that fails"),
            )
            for section in ("Spawner", "KubeSpawner", "KubernetesFGPUSpawner")
        ),
        *(
            ("KubeSpawner", name, value, NOT_QUEUED.format(f"KubeSpawner.{name}", instead))
            for name, value, instead in (
                ("profile_list", [{"display_name": "One"}], ""),
                ("modify_pod_hook", print, ""),
                ("after_pod_created_hook", print, ""),
                ("enable_user_namespaces", True, ""),
                ("services_enabled", True, ""),
            )
        ),
        *(
            ("KubernetesFGPUSpawner", name, "x", NOT_QUEUED.format(f"KubernetesFGPUSpawner.{name}", ""))
            for name in ("private_registry", "registry_credentials", "kai_queue")
        ),
        (
            "KubeSpawner",
            "scheduler_name",
            "hub-user-scheduler",
            "c.KubeSpawner.scheduler_name is 'hub-user-scheduler', which is for servers without a place; set "
            'c.KubernetesFGPUSpawner.scheduler_name = ""',
        ),
    ],
)
def test_setting_that_does_not_suit_queued_sessions_is_refused(
    tmp_path: Path, section: str, name: str, value: Any, line: str
) -> None:
    with pytest.raises(BadSettings) as refused:
        check(tmp_path, {section: {name: value}})
    assert str(refused.value).startswith(line)


def test_overridden_refused_settings_are_accepted(tmp_path: Path) -> None:
    own = {"consecutive_failure_limit": 0, "scheduler_name": "gpu-scheduler"}
    given = {"consecutive_failure_limit": 5, "scheduler_name": "hub-user-scheduler"}
    hub = {"allow_named_servers": False}
    check(tmp_path, {"JupyterHub": hub, "KubeSpawner": given, "KubernetesFGPUSpawner": own}, max_sessions=1)


@pytest.mark.parametrize("hub", [{}, {"subdomain_host": "https://hub.example"}], ids=["one", "each its own"])
def test_one_origin_for_all_users_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hub: dict[str, str]
) -> None:
    check(tmp_path, {"JupyterHub": {"bind_url": "https://hub.example:443", **hub}})
    assert ("All users' servers share the Hub's origin" in caplog.text) is not bool(hub)


def test_start_timeout_covers_the_queue(tmp_path: Path) -> None:
    c = Config({"KubeSpawner": {"start_timeout": 300}})
    configure(c, runtime="kubernetes", data_dir=str(tmp_path), queue_timeout_s=3600, launch_timeout_s=300)
    use_start_timeout(SimpleNamespace(config=c, spawner_class=KubernetesFGPUSpawner), FGPU.from_config(c))
    assert configured(KubernetesFGPUSpawner, c)["start_timeout"] == 3600 + 300 + 60


# --- Security demands ---

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
