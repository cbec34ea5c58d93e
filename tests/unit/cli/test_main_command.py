"""The command ``fgpu``: its one line where something is wrong, and that all of it is documented."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commandline import failure, fgpu, filled, run, write_config
from fgpuspawner import __version__
from fgpuspawner.cli import main as cli
from fgpuspawner.cli.sessions import ASKED
from fgpuspawner.text.fields import FIELDS

ROOT = Path(__file__).parents[3]
OF_ALL = ("--help", "--json")


def test_each_field_of_the_form_has_an_option() -> None:
    assert {*ASKED, "gpu_model"} == set(FIELDS)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"fgpu {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: COMMAND; see fgpu --help"),
        (
            ["start"],
            "argument COMMAND: invalid choice: 'start' (choose from 'run', 'list', 'show', 'end', 'forecast', 'grow', "
            "'setup', 'status', 'check', 'report', 'firewall', 'node', 'backup', 'restore', 'images', "
            "'kube', 'replay', 'quota', 'members', 'audit', 'completion'); "
            "see fgpu --help",
        ),
        (["status", "--jsn"], "unrecognized arguments: --jsn; see fgpu --help"),
        (["status", "--db"], "argument --db: expected one argument; see fgpu status --help"),
        (
            ["status", "--db", "sqlite://", "--config", "x"],
            "argument --config: not allowed with argument --db; see fgpu status --help",
        ),
        (
            ["check", "--config", "none.py"],
            "there is no file none.py; --config names the Hub's configuration",
        ),
        (
            ["status", "--config", "none.py"],
            "there is no file none.py; --config names the Hub's configuration",
        ),
        (
            ["status", "postgresql://u:s3cret@db/x"],
            "unrecognized arguments: postgresql://***@db/x; see fgpu --help",
        ),
    ],
)
def test_wrong_use_ends_with_status_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = failure(capsys, *arguments)
    # The list of choices is worded differently by later versions of Python.
    assert (status, said.replace("setup, status", "'setup', 'status'")) == (2, line)


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.sqlite"
    assert failure(capsys, "status", "--db", f"sqlite:///{path}") == (
        1,
        f"sqlite:///{path} does not exist yet; the Hub makes it when it starts",
    )
    assert not path.exists()


def test_a_damaged_database_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.sqlite"
    path.write_text("this is not a database, whatever its name says" * 100)
    status, line = failure(capsys, "status", "--db", f"sqlite:///{path}")
    assert (status, line) == (1, f"sqlite:///{path}: file is not a database")


def test_an_unreachable_database_is_one_line_without_the_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql+psycopg://fgpu:s3cret@127.0.0.1:1/fgpu?password=s3cret"
    config = write_config(tmp_path, db_url=url)
    for arguments in (("status", "--db", url), ("status", "--config", config), ("check", "--config", config)):
        status, line = failure(capsys, *arguments)
        assert status == 1
        assert line.startswith("postgresql+psycopg://***@127.0.0.1:1/fgpu: ")
        assert "s3cret" not in line


def test_a_password_in_what_a_configuration_raises_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, after="raise ValueError('cannot use postgresql://fgpu:s3cret@db/x')")
    _, line = failure(capsys, "check", "--config", path)
    assert line == "jupyterhub_config.py:8: ValueError: cannot use postgresql://***@db/x"


def test_the_installed_command_ends_with_its_status_and_no_traceback(tmp_path: Path) -> None:
    ended = run("status", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr
        == "fgpu: there is no file jupyterhub_config.py; --config names the Hub's configuration\n"
    )


def test_a_reader_that_has_seen_enough_is_no_error(url: str, tmp_path: Path) -> None:
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


def commands() -> dict[str, argparse.ArgumentParser]:
    (chosen,) = (a for a in cli.make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(chosen.choices)


def own_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert "`fgpu --version`" in text
    assert set(re.findall(r"^### `fgpu (\w+)`$", text, flags=re.MULTILINE)) == set(commands())
    for name, parser in commands().items():
        own = text.partition(f"### `fgpu {name}`\n")[2].partition("\n## ")[0].partition("\n### ")[0]
        parsers = [parser, *own_commands(parser).values()]
        options = {
            o
            for p in parsers
            for a in p._actions
            for o in a.option_strings
            if o.startswith("--") and o not in OF_ALL
        }
        assert [sub for sub in own_commands(parser) if f"`{sub}" not in own] == [], name
        assert set(re.findall(r"`(--[a-z-]+)", own)) - {"--json"} == options, name
        assert f"fgpu {name}" in own


def every_command() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, and of each of its own commands, by their words."""
    found = {}
    for name, parser in commands().items():
        own = own_commands(parser)
        found |= {f"{name} {sub}": one for sub, one in own.items()} if own else {name: parser}
    return found


def test_every_command_speaks_json_but_two() -> None:
    silent = {name for name, parser in every_command().items() if "--json" not in parser.format_usage()}
    # The one is a dialogue, and the other becomes another program.
    assert silent == {"setup", "images build"}


def test_what_a_command_says_is_in_the_json_and_so_is_an_error(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(url)
    config = write_config(tmp_path, db_url=url)
    words = ("node", "local", "cordon", "--config", config)
    _, out, _ = fgpu(capsys, *words, "--json")
    assert json.loads(out) == {"lines": ["node local: takes no more sessions"]}
    cases = [
        ((*words, "--json"), 1, "bad_settings"),
        (("node", "--json"), 2, "usage"),
        (("list", "--json"), 2, "usage"),
        (("status", "--db", f"sqlite:///{tmp_path}/none.sqlite", "--json"), 1, "store_unavailable"),
    ]
    for arguments, expected, code in cases:
        status, out, err = fgpu(capsys, *arguments)
        error = json.loads(out)["error"]
        assert (status, error["code"], f"fgpu: {error['message']}\n") == (expected, code, err)


def test_what_is_loaded_for_one_command_is_what_all_together_have() -> None:
    for name, parser in commands().items():
        (chosen,) = (a for a in cli.make_parser([name])._actions if isinstance(a, argparse._SubParsersAction))
        assert list(chosen.choices) == list(cli.COMMANDS)
        assert chosen.choices[name].format_help() == parser.format_help()


def test_every_command_has_help() -> None:
    for parser in commands().values():
        for one in (parser, *own_commands(parser).values()):
            assert one.description
            for action in one._actions:
                assert action.help or isinstance(action, argparse._SubParsersAction)
