"""The command ``fgpu quota``: what is in force goes into a file and comes back, and mistakes are told where they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from commandline import Fgpu, filled, node, write_config
from fgpu_scheduler import Audit, QuotaEdits, Store

FILE = [
    {"user": "*", "max_fgpu": "1.5", "max_sessions": 3},
    {"hub_group": "ml101", "resource_group": "class", "max_fgpu": 6, "max_lifetime_s": 7200},
]
MACHINE = {"cpu": 4, "memory_mib": 8192, "gpus": {"simulated": 1}}
NODES = [{"name": "local", **MACHINE}, {"name": "b", "group": "class", **MACHINE}]
HEADING = (
    "user,hub_group,account,resource_group,max_fgpu,max_sessions,max_pending,max_lifetime_s,guaranteed_fgpu"
)


@pytest.fixture
def config(tmp_path: Path, url: str) -> str:
    filled(url, node(), node("b", group="class"))
    return write_config(tmp_path, db_url=url, quotas=FILE, nodes=NODES, groups={"default": {}, "class": {}})


def written(folder: Path, *lines: str, encoding: str = "utf-8") -> str:
    path = folder / "quotas.csv"
    path.write_bytes("\r\n".join([*lines, ""]).encode(encoding))
    return str(path)


def audit_of(url: str) -> Sequence[tuple[str, str, str]]:
    store = Store(url)
    store.connect()
    found = [(line.action, line.target, line.details) for line in Audit(store).lines(limit=100)]
    store.close()
    return found


def test_exported_quotas_import_without_changes(config: str, url: str, tmp_path: Path, fgpu: Fgpu) -> None:
    names = ["=SUM(A1)", "'tis", " @x".strip(), "o'neil", 'ж,"ü"', "a;=b", "-1", "'=both"]
    lines = [f'"{name.replace(chr(34), chr(34) * 2)}",,,,,2,,,' for name in names if not name.startswith("'")]
    # As they stand in a file that was not written here: an apostrophe of a name's own is doubled.
    lines += [f'"\'{name}",,,,,2,,,' for name in names if name.startswith("'")]
    status, out, _ = fgpu(
        "quota", "import", written(tmp_path, HEADING, *lines), "--apply", "--config", config
    )
    assert (status, out.splitlines()[-1]) == (0, "8 changes made")
    exported = fgpu("quota", "export", "--config", config)[1]
    assert "'=SUM(A1),,,,,2,,," in exported.splitlines()
    store = Store(url)
    store.connect()
    assert {edit.quota.name for edit in QuotaEdits(store).all()} == set(names)
    store.close()

    new = str(tmp_path / "again.csv")
    assert fgpu("quota", "export", "--output", new, "--config", config)[0] == 0
    before = audit_of(url)
    for how in ((), ("--apply",)):
        out = fgpu("quota", "import", new, *how, "--config", config)[1]
        assert out == "nothing to change: all of it is so already\n"
    assert audit_of(url) == before
    assert fgpu.failure("quota", "export", "--output", new, "--config", config)[0] == 1


def test_import_changes_quotas_only_with_apply(config: str, url: str, tmp_path: Path, fgpu: Fgpu) -> None:
    lines = ["alice,,,,2,,,,", "*,,,,1.5,3,,,", ",ml101,,class,,,,,", "*,,,,1,4,,,", ",,,class,12,,,,"]
    path = written(tmp_path, HEADING, *lines[:1], *lines[2:])
    words = ("quota", "import", path, "--config", config)
    out = fgpu(*words)[1]
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "line",
        "2",
        "3",
        "4",
        "5",
        "",
        "4 changes; --apply makes them",
    ]
    assert audit_of(url) == []
    found = json.loads(fgpu(*words, "--dry-run", "--json")[1])
    assert found["applied"] is False
    assert found["changes"][1] == {
        "line": 3,
        "for": {"hub_group": "ml101", "resource_group": "class"},
        "before": {"hub_group": "ml101", "resource_group": "class", "max_fgpu": "6", "max_lifetime_s": 7200},
        "after": None,
    }
    assert fgpu(*words, "--apply")[1].splitlines()[-1] == "4 changes made"
    assert sorted(audit_of(url)) == [
        ("quota.remove", "group 'ml101' in resource group 'class'", ""),
        ("quota.set", "each user", "1 fGPU, 4 sessions"),
        ("quota.set", "everybody together in resource group 'class'", "12 fGPU"),
        ("quota.set", "user 'alice'", "2 fGPU"),
    ]
    exported = fgpu("quota", "export", "--config", config)[1].splitlines()
    assert sorted(exported[1:]) == sorted(["alice,,,,2,,,,", "*,,,,1,4,,,", ",,,class,12,,,,"])


def test_import_reports_all_mistakes_and_changes_nothing(
    config: str, url: str, tmp_path: Path, fgpu: Fgpu
) -> None:
    lines = [
        "good,,,,1,,,,",
        'bad,,,,"0,5",,,,',
        "two,many,,,1,,,,",
        "more,,,,,x,,,",
        "short,,,,,,,5,",
        "where,,,lab,1,,,,",
        "good,,,,2,,,,",
        ",,,,1,,,,",
        "much,,,,9999999999,,,,",
    ]
    status, said = fgpu.failure(
        "quota", "import", written(tmp_path, HEADING, *lines), "--apply", "--config", config
    )
    assert status == 1
    told = said.partition("quotas.csv: ")[2].split("; line ")
    assert [one.removeprefix("line ").partition(": ")[0] for one in told] == [
        "3, column max_fgpu",
        "4",
        "5, column max_sessions",
        "6, column max_lifetime_s",
        "7, column resource_group",
        "8",
        "9",
        "10, column max_fgpu",
    ]
    assert "max_sessions must be a whole number from 0 to 36000000" in said
    assert "there is no resource group 'lab'; there are" in said
    assert "line 2 has a quota of user 'good', too; write them as one" in said
    assert said.endswith(". Nothing was changed")
    assert audit_of(url) == []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["user,max_fpgu", "a,1"],
            "line 1, column max_fpgu: there is no such column; use max_fgpu. Nothing was changed",
        ),
        (["user,user", "a,b"], "line 1, column user: it is there twice. Nothing was changed"),
        ([""], f"its first line must name columns: {HEADING.replace(',', ', ')}"),
        (["user,max_fgpu", "a,1,2"], "line 2: it has 3 cells, and the heading 2. Nothing was changed"),
        (["user,max_fgpu", '"a"b,1'], "line 2: ',' expected after '\"'; write a quote inside quotes twice"),
    ],
)
def test_malformed_file_is_refused_in_one_line(
    lines: list[str], said: str, config: str, tmp_path: Path, fgpu: Fgpu
) -> None:
    path = written(tmp_path, *lines)
    assert fgpu.failure("quota", "import", path, "--config", config) == (1, f"{path}: {said}")


def test_files_of_spreadsheets_are_read(config: str, tmp_path: Path, fgpu: Fgpu) -> None:
    path = written(tmp_path, "max_sessions;user;max_fgpu", "2;zoë;0.5", ";;", encoding="utf-8-sig")
    found = json.loads(fgpu("quota", "import", path, "--json", "--config", config)[1])
    assert [change["after"] for change in found["changes"]] == [
        {"user": "zoë", "max_fgpu": "0.5", "max_sessions": 2}
    ]
    path = written(tmp_path, "user,max_fgpu", "zoë,1", encoding="latin-1")
    said = fgpu.failure("quota", "import", path, "--config", config)[1]
    assert said == f"{path}: line 2: it is not UTF-8; save it as CSV UTF-8"
