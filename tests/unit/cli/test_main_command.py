"""The command ``fgpu``: its one line where something is wrong, and that all of it is documented."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from commandline import Fgpu, filled, run, write_config
from fgpuspawner.cli import main as cli
from fgpuspawner.cli.sessions import FIELDS as OPTIONS
from fgpuspawner.text.fields import FIELDS

ROOT = Path(__file__).parents[3]


def test_each_field_of_the_form_has_an_option() -> None:
    assert {*OPTIONS, "gpu_model"} == set(FIELDS)


def test_help_lists_users_commands_first(fgpu: Fgpu) -> None:
    _, out, _ = fgpu("--help")
    users, _, administrators = out.partition("For administrators:")
    assert all(f"\n  {name} " in users for name in ("run", "list", "show", "park", "wake", "end", "forecast"))
    assert "\n    fgpu run --image pytorch --fgpu 0.5 --wait\n" in users
    assert "FGPU_HUB_URL" in users
    assert all(f"\n  {name} " in administrators for name in ("setup", "check", "audit"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Missing command; see fgpu --help"),
        (["start"], "No such command 'start'; see fgpu --help"),
        (["status", "--jsn"], "No such option '--jsn'. Did you mean '--json'?; see fgpu status --help"),
        (["status", "--db"], "Option '--db' requires an argument; see fgpu --help"),
        (
            ["status", "--db", "x", "--config", "x"],
            "--config and --db exclude each other, give one; see fgpu status",
        ),
        (["quota"], "Missing command; see fgpu quota --help"),
        (
            ["show", "twelve"],
            "Invalid value for 'SESSION': 'twelve' is not the number of a session; fgpu list has",
        ),
        (
            ["check", "--config", "none.py"],
            "there is no file none.py; --config names the Hub's configuration",
        ),
        (
            ["status", "postgresql://u:s3cret@db/x"],
            "Got unexpected extra argument (postgresql://***@db/x); see fgpu",
        ),
    ],
)
def test_wrong_use_ends_with_status_2(arguments: list[str], line: str, fgpu: Fgpu) -> None:
    status, said = fgpu.failure(*arguments)
    assert (status, said[: len(line)]) == (2, line)


def test_missing_database_is_not_created(tmp_path: Path, fgpu: Fgpu) -> None:
    path = tmp_path / "none.sqlite"
    assert fgpu.failure("status", "--db", f"sqlite:///{path}") == (
        1,
        f"sqlite:///{path} does not exist yet; the Hub makes it when it starts",
    )
    assert not path.exists()


def test_a_damaged_database_is_one_line(tmp_path: Path, fgpu: Fgpu) -> None:
    path = tmp_path / "damaged.sqlite"
    path.write_text("this is not a database, whatever its name says" * 100)
    status, line = fgpu.failure("status", "--db", f"sqlite:///{path}")
    assert (status, line) == (1, f"sqlite:///{path}: file is not a database")


def test_an_unreachable_database_is_one_line_without_the_password(tmp_path: Path, fgpu: Fgpu) -> None:
    url = "postgresql+psycopg://fgpu:s3cret@127.0.0.1:1/fgpu?password=s3cret"
    config = write_config(tmp_path, db_url=url)
    for arguments in (("status", "--db", url), ("status", "--config", config), ("check", "--config", config)):
        status, line = fgpu.failure(*arguments)
        assert status == 1
        assert line.startswith("postgresql+psycopg://***@127.0.0.1:1/fgpu: ")
        assert "s3cret" not in line


def test_password_in_an_error_of_the_configuration_is_hidden(tmp_path: Path, fgpu: Fgpu) -> None:
    path = write_config(tmp_path, after="raise ValueError('cannot use postgresql://fgpu:s3cret@db/x')")
    _, line = fgpu.failure("check", "--config", path)
    assert line == "jupyterhub_config.py:8: ValueError: cannot use postgresql://***@db/x"


def test_the_installed_command_ends_with_its_status_and_no_traceback(tmp_path: Path) -> None:
    ended = run("status", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr
        == "fgpu: there is no file jupyterhub_config.py; --config names the Hub's configuration\n"
    )


def test_closed_pipe_is_no_error(url: str, tmp_path: Path) -> None:
    filled(url)
    program = Path(sys.executable).parent / "fgpu"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [str(program), "status", "--db", url],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


def commands() -> dict[str, click.Command]:
    found = {name: cli.cli.get_command(click.Context(cli.cli), name) for name in cli.COMMANDS}
    return {name: one for name, one in found.items() if one is not None}


def own_commands(parser: click.Command) -> dict[str, click.Command]:
    return parser.commands if isinstance(parser, click.Group) else {}


def options_of(parser: click.Command) -> set[str]:
    found = [name for param in parser.params for name in (*param.opts, *param.secondary_opts)]
    return {name for name in found if name.startswith("--")}


def test_every_command_is_in_the_documentation_and_every_option_in_the_help() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert "`fgpu --version`" in text
    assert set(re.findall(r"^### `fgpu (\w+)`$", text, flags=re.MULTILINE)) == set(commands())
    for name, parser in commands().items():
        own = text.partition(f"### `fgpu {name}`\n")[2].partition("\n## ")[0].partition("\n### ")[0]
        parsers = [parser, *own_commands(parser).values()]
        options = [param for p in parsers for param in p.params if isinstance(param, click.Option)]
        assert [option.name for option in options if not option.help] == [], name
        # A command of two words needs no mention beyond its group's section.
        assert [
            sub for sub in own_commands(parser) if f"`{sub}" not in own and f"{name} {sub}" not in own
        ] == []
        known = {o for p in parsers for o in options_of(p)}
        assert set(re.findall(r"`(--[a-z-]+)", own)) <= known, name
        assert f"fgpu {name}" in own


def every_command() -> dict[str, click.Command]:
    """Return the parser of each command, and of each of its own commands, by their words."""
    found = {}
    for name, parser in commands().items():
        own = own_commands(parser)
        found |= {f"{name} {sub}": one for sub, one in own.items()} if own else {name: parser}
    return found


def test_every_command_speaks_json_but_two() -> None:
    silent = {name for name, parser in every_command().items() if "--json" not in options_of(parser)}
    # The one is a dialogue, and the other becomes another program.
    assert silent == {"setup", "images build"}


def test_json_has_the_lines_and_errors(url: str, tmp_path: Path, fgpu: Fgpu) -> None:
    filled(url)
    config = write_config(tmp_path, db_url=url)
    words = ("node", "local", "cordon", "--config", config)
    _, out, _ = fgpu(*words, "--json")
    assert json.loads(out) == {"lines": ["node local: takes no new sessions"]}
    cases = [
        ((*words, "--json"), 1, "bad_settings"),
        (("node", "--json"), 2, "usage"),
        (("list", "--json"), 2, "usage"),
        (("status", "--db", f"sqlite:///{tmp_path}/none.sqlite", "--json"), 1, "store_unavailable"),
    ]
    for arguments, expected, code in cases:
        status, out, err = fgpu(*arguments)
        error = json.loads(out)["error"]
        assert (status, error["code"], f"fgpu: {error['message']}\n") == (expected, code, err)


def test_every_command_has_help() -> None:
    assert {name: one.name for name, one in commands().items()} == {name: name for name in cli.COMMANDS}
    for parser in commands().values():
        for one in (parser, *own_commands(parser).values()):
            assert one.help
            assert all(param.help for param in one.params if isinstance(param, click.Option))
