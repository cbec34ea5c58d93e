"""The command ``fgpu import``: what other systems say becomes settings, and nothing is lost in silence."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from traitlets.config import Config

from commandline import failure, fgpu
from fgpuspawner.settings import FGPU

PAGE = (Path(__file__).parents[3] / "docs/coming-from.md").read_text(encoding="utf-8")
POLICY = {"name": "default", "total_resource_slots": {"cuda.shares": "1.5"}, "max_concurrent_sessions": 3}


def example(heading: str) -> tuple[str, str]:
    """Return the file that a part of the page shows, and what it says becomes of it."""
    part = PAGE.partition(f"\n### {heading}\n")[2]
    (given,) = re.findall(r"```yaml\n(.*?)```", part.partition("```python")[0], re.DOTALL)
    return given, part.partition("```python\n")[2].partition("```")[0]


def checked(lines: str) -> FGPU:
    """Return the settings that lines of a configuration make, after the checks of a Hub that starts."""
    c = Config()
    exec(compile(lines, "<made>", "exec"), {"c": c})
    settings = FGPU.from_config(c)
    settings.quotas_given()
    settings.rules()
    settings._check_form([*settings.resource_groups(), "gpu"])
    return settings


def made(
    folder: Path, capsys: pytest.CaptureFixture[str], system: str, data: Any, *options: str
) -> dict[str, Any]:
    path = folder / "given.json"
    path.write_text(json.dumps(data))
    status, out, _ = fgpu(capsys, "import", system, str(path), *options)
    assert status == 0
    checked(out)
    found: dict[str, Any] = json.loads(fgpu(capsys, "import", system, str(path), *options, "--json")[1])
    for line in found["not_translated"]:
        assert f"#   {line}" in out.splitlines()
    return found


@pytest.mark.parametrize(
    ("system", "heading", "name"),
    [
        ("kubespawner", "Take profiles over", "values.yaml"),
        ("backend-ai", "Take policies over", "policies.yaml"),
    ],
)
def test_the_examples_of_the_page_become_what_it_shows(
    system: str, heading: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, shown = example(heading)
    path = tmp_path / name
    path.write_text(given)
    assert fgpu(capsys, "import", system, str(path)) == (0, shown, "")
    settings = checked(shown)
    assert settings.presets


def test_every_name_in_a_file_is_translated_or_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each key of both examples, and of a file full of strange ones, is found in what was made or in the list."""
    strange = {
        "keypair_resource_policies": [
            {**POLICY, "odd_limit": 7, "total_resource_slots": {"rocm.device": "1"}}
        ],
        "odd_table": [1, 2],
        "groups": [{"name": "g", "odd_key": 1, "total_resource_slots": {"tpu.device": 1}}],
        "resource_presets": [
            {"name": "p", "resource_slots": {"ipu.device": 2, "cpu": 1}, "odd_preset": True}
        ],
    }
    told = "\n".join(made(tmp_path, capsys, "backend-ai", strange)["not_translated"])
    for name in (
        "odd_limit",
        "rocm.device",
        "odd_table",
        "odd_key",
        "tpu.device",
        "ipu.device",
        "odd_preset",
    ):
        assert name in told, told
    profile = {
        "display_name": "P",
        "odd_key": 1,
        "kubespawner_override": {"odd_trait": {"a": 1}, "cpu_limit": 1},
    }
    values = {"odd": {}, "singleuser": {"oddSingle": 1, "profileList": [profile]}, "cull": {"oddCull": 1}}
    told = "\n".join(made(tmp_path, capsys, "kubespawner", values)["not_translated"])
    for name in ("odd_key", "odd_trait", "odd", "singleuser.oddSingle", "cull.oddCull"):
        assert re.search(rf"^{re.escape(name)}\b", told, re.MULTILINE), told


def test_users_get_what_their_keypairs_say_and_everybody_what_the_default_says_where_nobody_has_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def quotas(other: str, **more: Any) -> list[dict[str, Any]]:
        policies = [
            POLICY,
            {"name": "other", "total_resource_slots": json.dumps({"cuda.shares": other}), **more},
        ]
        pairs = [("alice", "default"), ("bob", "other"), ("bob", "default"), ("carol", "other")]
        data = {
            "keypair_resource_policies": policies,
            "keypairs": [
                {"user_id": f"{user}@x.org", "resource_policy": policy, "secret_key": "s3cret"}
                for user, policy in pairs
            ],
            "users": [
                {"email": f"{user}@x.org", "username": user, "password": "s3cret"} for user, _ in pairs
            ],
        }
        found = made(tmp_path, capsys, "backend-ai", data, "--fgpu-per-share", "1")
        assert "s3cret" not in json.dumps(found)
        return list(found["quotas"])

    everybody = {"user": "*", "max_fgpu": "1.5", "max_sessions": 3}
    assert quotas("1", max_concurrent_sessions=1) == [
        everybody,
        {"user": "carol", "max_fgpu": "1", "max_sessions": 1},
    ]
    # With "*" carol would have less than she has now.
    assert quotas("4", max_concurrent_sessions=1) == [
        {"user": "alice", "max_fgpu": "1.5", "max_sessions": 3},
        {"user": "bob", "max_fgpu": "4", "max_sessions": 3},
        {"user": "carol", "max_fgpu": "4", "max_sessions": 1},
    ]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"total_resource_slots": {"cuda.device": "2"}}, {"max_fgpu": "4"}),
        ({"total_resource_slots": {"cuda.device": "2", "cuda.shares": "1"}}, {"max_fgpu": "2"}),
        ({"total_resource_slots": {"cpu": "2"}, "default_for_unspecified": "LIMITED"}, {"max_fgpu": "0"}),
        (
            {"total_resource_slots": {"cuda.shares": "Infinity"}, "max_session_lifetime": 3600},
            {"max_lifetime_s": 3600},
        ),
        (
            {"total_resource_slots": {}, "max_pending_session_count": 2, "max_session_lifetime": 0},
            {"max_pending": 2},
        ),
    ],
)
def test_a_policy_of_the_default_is_everybodys(
    policy: dict[str, Any], expected: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"keypair_resource_policies": [{"name": "default", **policy}]}
    found = made(tmp_path, capsys, "backend-ai", data)
    assert found["quotas"] == [{"user": "*", **expected}]


def test_files_for_quotas_and_members_are_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policies.yaml"
    path.write_text(example("Take policies over")[0])
    quotas, members = tmp_path / "quotas.csv", tmp_path / "members.csv"
    words = ("import", "backend-ai", str(path), "--quotas", str(quotas), "--members", str(members))
    assert fgpu(capsys, *words)[0] == 0
    with quotas.open(newline="") as file:
        assert [row["max_fgpu"] for row in csv.DictReader(file)] == ["4", "12", "16"]
    assert members.read_text().splitlines() == ["hub_group,user", "ml101,alice"]
    assert failure(capsys, *words)[0] == 1


def test_profiles_become_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = {
        "choices": {
            str(n): {"display_name": f"{n} CPU", "kubespawner_override": {"cpu_limit": n}, "default": n == 3}
            for n in range(1, 21)
        }
    }
    profiles = {
        "a": {
            "display_name": "Same",
            "kubespawner_override": {"mem_guarantee": "512Mi", "cpu_guarantee": "500m"},
        },
        "b": {
            "display_name": "Same",
            "kubespawner_override": {"extra_resource_guarantees": {"nvidia.com/gpu": 2}},
        },
        "c": {"display_name": "Many", "profile_options": {"size": size}},
        "d": {
            "display_name": "MIG",
            "kubespawner_override": {"extra_resource_limits": {"nvidia.com/mig-1g.5gb": 1}},
        },
        "e": {
            "display_name": "Code",
            "kubespawner_override": {"image": "<function f at 0x7f>", "mem_limit": 2**30},
        },
    }
    found = made(tmp_path, capsys, "kubespawner", profiles, "--fgpu-per-gpu", "4")
    assert found["presets"] == [
        {"name": "Same", "cpu": "0.5", "memory_mib": 512},
        {"name": "Same (2)", "fgpu": "8"},
        {"name": "Many: 3 CPU", "cpu": "3"},
        {"name": "Code", "memory_mib": 1024},
    ]
    told = "\n".join(found["not_translated"])
    assert "nvidia.com/mig-1g.5gb (of 'MIG'): give the preset gpu_memory_mib" in told
    assert "image (of 'Code'): it is computed by a program" in told
    assert "profile_options (of 'Many'): more than 12 ways to choose" in told


def test_a_program_is_not_run_and_what_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "jupyterhub_config.py"
    program.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    status, said = failure(capsys, "import", "kubespawner", str(program))
    assert (status, "is a program, which is not run here" in said) == (2, True)
    # The line that it names is the page's.
    assert said.partition("Write its profiles first: ")[2] in PAGE
    bad = tmp_path / "bad.yaml"
    for text, expected in (
        ("a: [", "it cannot be read as JSON or YAML"),
        ("!!python/object/apply:os.system ['true']", "it cannot be read as JSON or YAML"),
        ("- 1", "it must be a list of profiles"),
        ("{}", "there is nothing in it that kubespawner has"),
    ):
        bad.write_text(text)
        assert expected in failure(capsys, "import", "kubespawner", str(bad))[1]
    assert not (tmp_path / "ran").exists()
    bad.write_text(yaml.safe_dump({"groups": ["x"]}))
    assert "groups must be a list of objects" in failure(capsys, "import", "backend-ai", str(bad))[1]
    assert failure(capsys, "import", "backend-ai", str(bad), "--fgpu-per-gpu", "no")[0] == 2
