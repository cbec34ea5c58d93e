"""Commands, settings and targets that the documentation tells people to type can be typed."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from jupyterhub.app import JupyterHub
from jupyterhub.auth import Authenticator, PAMAuthenticator
from jupyterhub.proxy import ConfigurableHTTPProxy
from jupyterhub.spawner import Spawner
from kubespawner import KubeSpawner
from oauthenticator.generic import GenericOAuthenticator
from traitlets import HasTraits
from traitlets.config import Config, LazyConfigValue

from fgpuspawner.cli.main import cli
from fgpuspawner.engines.docker.spawner import FGPUSpawner
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.settings import FGPU

with warnings.catch_warnings():
    # It uses names of a library that have newer ones.
    warnings.simplefilter("ignore", DeprecationWarning)
    from ldapauthenticator import LDAPAuthenticator

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "images/README.md", *(ROOT / "docs").glob("*.md")])
OWNERS: dict[str, type[HasTraits]] = {
    owner.__name__: owner
    for owner in (
        FGPU,
        FGPUSpawner,
        LocalFGPUSpawner,
        KubernetesFGPUSpawner,
        KubeSpawner,
        JupyterHub,
        Spawner,
        Authenticator,
        PAMAuthenticator,
        GenericOAuthenticator,
        LDAPAuthenticator,
        ConfigurableHTTPProxy,
    )
}
NOBODY = HasTraits()
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
TYPED = re.compile(r"^ {4,}(?:sudo )?(?:\S*/)?(fgpu .*)$", re.MULTILINE)
"""A command in a block of its own."""
CONFIGURES = re.compile(r"^(c\.|configure\()", re.MULTILINE)
SETS = re.compile(r"c\.[A-Z]\w+\.[a-z]\w+ \+?= [^.]|configure\(c, \w")
SPAN = re.compile(r"`([^`\n]+)`")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fenced(page: Path) -> Iterator[tuple[str, str]]:
    """Return language and text of the blocks between fences."""
    for indent, language, text in FENCED.findall(text_of(page)):
        yield language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def typed(page: Path) -> Iterator[str]:
    """Return the commands `fgpu` of all blocks."""
    yield from TYPED.findall(FENCED.sub("", text_of(page)))
    for language, text in fenced(page):
        if language in ("sh", "console", ""):
            yield from TYPED.findall(re.sub("^", "    ", text, flags=re.MULTILINE))


def said(page: Path) -> Iterator[str]:
    """Return the spans of code in a page's sentences and tables."""
    yield from SPAN.findall(FENCED.sub("", text_of(page)))


def words_of(command: str) -> list[str]:
    """Return a command's arguments, up to where a shell would send them elsewhere."""
    words = shlex.split(command, comments=True)[1:]
    ends = [n for n, word in enumerate(words) if word in ("|", ">", "<", "&&")]
    return words[: ends[0]] if ends else words


def wrong(words: list[str], *, whole: bool = True) -> str:
    """Return what the command says is wrong with these words; that some are missing, of a ``whole`` command only."""
    context = click.Context(cli, info_name="fgpu")
    parser: click.Command = cli
    try:
        while True:
            context = parser.make_context(parser.name, list(words), parent=context)
            if not isinstance(parser, click.Group):
                break
            words = [*context._protected_args, *context.args]
            if not words:
                return "Missing command" if whole else ""
            _, found, words = parser.resolve_command(context, words)
            assert found is not None
            parser = found
    except click.exceptions.Exit:
        return ""
    except click.UsageError as e:
        return "" if isinstance(e, click.MissingParameter) and not whole else e.format_message()
    recipe = text_of(ROOT / "images/build.sh")
    return ", ".join(
        f"images build has no {word}"
        for word in (context.params.get("arguments") or ())
        if word.startswith("--") and word not in recipe
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_a_page_are_valid(page: Path) -> None:
    found = {command: wrong(words_of(command)) for command in typed(page)}
    found |= {
        span: wrong(words_of(span), whole=False) for span in said(page) if re.match(r"fgpu [a-z-]", span)
    }
    assert {command: error for command, error in found.items() if error} == {}


def test_every_call_of_the_api_is_in_its_description() -> None:
    known = json.loads(text_of(ROOT / "docs/openapi.json"))
    (server,) = known["servers"]
    own = f"https://hub.example{server['url']}"
    offered = {
        (method.upper(), re.sub(r"\{\w+\}", "12", path))
        for path, of in known["paths"].items()
        for method in of
    }
    calls = []
    for block in (text for page in PAGES for language, text in fenced(page) if language == "sh"):
        for line in re.findall(r"^curl .*", block.replace("\\\n", ""), flags=re.MULTILINE):
            words = shlex.split(line)
            json.loads(words[words.index("-d") + 1] if "-d" in words else "{}")
            method = words[words.index("-X") + 1] if "-X" in words else "GET"
            if words[-1].startswith(own):
                calls.append((method, words[-1].removeprefix(own).partition("?")[0]))
    assert len(calls) > 5
    assert set(calls) - offered == set()


def refused(config: Config) -> list[str]:
    """Return what of a configuration no class takes."""
    found = []
    for owner, values in config.items():
        if owner not in OWNERS:
            found.append(f"c.{owner}: nothing is called so")
            continue
        traits = OWNERS[owner].class_traits(config=True)
        for name, value in values.items():
            if name not in traits:
                found.append(f"c.{owner}.{name}: there is no such setting")
                continue
            lazy = isinstance(value, LazyConfigValue)
            try:
                traits[name]._validate(NOBODY, value.get_value(traits[name].default()) if lazy else value)
            except Exception as e:
                found.append(f"c.{owner}.{name}: {e}")
    return found


def configured(text: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Run lines of a jupyterhub_config.py, and return what they set; `configure` only notes what it is given."""
    c = Config()

    def configure(_c: Config, *, runtime: str = "local", **settings: Any) -> None:
        assert runtime in ("local", "docker", "kubernetes", "yours")
        c.FGPU.update(settings)

    monkeypatch.setattr("fgpuspawner.config.configure", configure)
    monkeypatch.setenv("OAUTH_CLIENT_SECRET", "secret")
    exec(compile(text, "<page>", "exec"), {"c": c, "get_config": lambda: c, "configure": configure})
    return c


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_on_a_page_are_valid(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [text for language, text in fenced(page) if language == "python" and CONFIGURES.search(text)]
    # Behind a comma may be words of what the program says.
    blocks += [re.split(", (?:and|on) ", span)[0] for span in said(page) if SETS.match(span)]
    found = {text: refused(configured(text, monkeypatch)) for text in blocks}
    assert {text: errors for text, errors in found.items() if errors} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_existing_settings_only(page: Path) -> None:
    named = set(re.findall(r"\bc\.([A-Z]\w+)\.([a-z]\w+)", text_of(page)))
    assert {
        f"{o}.{n}" for o, n in named if o not in OWNERS or n not in OWNERS[o].class_traits(config=True)
    } == set()


def test_every_file_that_a_page_shows_can_be_read() -> None:
    read: dict[str, Any] = {"toml": tomllib.loads, "yaml": yaml.safe_load, "python": ast.parse}
    shown = Counter(
        language
        for page in PAGES
        for language, text in fenced(page)
        if language in read and (read[language](text) or True)
    )
    assert min(shown.values()) > 0
    assert shown.keys() == read.keys()


def test_every_target_of_make_and_every_unit_of_systemd_is_there() -> None:
    text = "\n".join(map(text_of, PAGES))
    targets = set(re.findall(r"^([a-z][\w-]*):", text_of(ROOT / "Makefile"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^ {4})make ([a-z][\w-]*)", text, flags=re.MULTILINE)) - targets == set()
    ours = (ROOT / "fgpuspawner/deploy").glob("*.*")
    units = {file.stem for file in ours if file.suffix in (".service", ".timer")} | {"docker", "postgresql"}
    assert set(re.findall(r"systemctl \w+ ([a-z][\w-]*)", text)) - units == set()


def operations() -> list[tuple[str, str]]:
    """Return the table of docs/operations.md: a task, and how to do it."""
    table = text_of(ROOT / "docs/operations.md").partition("\n## What to do\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [(task, how) for task, how in rows[1:]]


def test_every_operation_has_its_command_page_or_setting() -> None:
    found = operations()
    assert len(found) >= 25
    for task, how in found:
        assert SPAN.search(how) or "](" in how or "*" in how, task
