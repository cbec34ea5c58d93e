"""The command ``fgpu setup``: checks, shows a plan, asks, does it; or takes it back."""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from fgpu_scheduler import BadSettings, StoreUnavailable
from fgpuspawner.cli.check import NOT_YET
from fgpuspawner.cli.command import FILE, Report, UsageError, command, read_only
from fgpuspawner.cli.hub_config import loaded
from fgpuspawner.cli.setup.answers import LOGINS, RUNTIMES, TLS, Answers, ask, from_json
from fgpuspawner.cli.setup.checks import FAIL, WARN, CheckLine, look, of_the_configuration, program
from fgpuspawner.cli.setup.files import CONFIG, PASSWORDS, TOKEN, Programs, files
from fgpuspawner.cli.setup.machine import RECORD, Machine, Record, read_record
from fgpuspawner.cli.setup.writer import Setup, Step

TOKEN_NAME = "CONFIGPROXY_AUTH_TOKEN"
ROOT_BY_THE_ENGINE = (
    "The Hub's unit may use the Docker engine, as it has to start containers. A program that takes over the Hub can "
    "become root on this machine by it. No session has this access, and no other user."
)
NOT_ROOT = (
    "The Hub is not root: fgpu-firewall.service applies its rules at every boot, and fgpu-disk.service counts the "
    "disk's files for it. It cannot count what homes take, so c.FGPU.home_disk_mib is not in force: give homes a disk "
    "of their own."
)
READS_PASSWORDS = (
    "The Hub's unit may read /etc/shadow, as it checks the passwords of this machine's accounts. --login password "
    "needs no such right."
)


@command("setup", speaks_json=False)
@click.option("--yes", is_flag=True, help="ask nothing")
@click.option("--dry-run", is_flag=True, help="show the plan, and change nothing")
@click.option("--remove", is_flag=True, help="take it all back but the data")
@click.option("--root", metavar="FOLDER", default="/", help="write below this folder, and start nothing")
@click.option("--labextension", metavar="WHEEL", default="", help="the JupyterLab extension for the images")
@click.option("--host", metavar="NAME", help="the Hub's name in browsers, such as hub.example")
@click.option(
    "--tls", type=click.Choice(TLS), help="who encrypts; none: only this machine reaches it; default: proxy"
)
@click.option("--cert", metavar="FILE", type=FILE, help="the certificate with its chain, for proxy and nginx")
@click.option("--key", metavar="FILE", type=FILE, help="its key")
@click.option(
    "--subdomains/--no-subdomains",
    default=None,
    help="a domain for each user: needs a wildcard name and certificate",
)
@click.option(
    "--login",
    type=click.Choice(LOGINS),
    help="accounts of this machine, or one password for all; default: pam",
)
@click.option("--group", "groups", metavar="NAME", multiple=True, help="with pam: only its members")
@click.option("--admin", "admins", metavar="NAME", multiple=True, help="an administrator")
@click.option("--runtime", type=click.Choice(RUNTIMES), help="what sessions run in; default: docker")
@click.option("--unit", metavar="NUMBER", help="how many fGPU one GPU is; default: 2")
@click.option("--simulated", metavar="NUMBER", help="simulated GPUs, for trying; default: 0")
@click.option("--image", "images", metavar="NAME", multiple=True, help="a first image; default: base")
@click.option("--user", metavar="NAME", help="the Hub's system user; default: fgpu")
@click.option("--data", metavar="FOLDER", help="the data; default: /var/lib/fgpu")
@click.option(
    "--port", type=int, metavar="NUMBER", help="the proxy's port; default: 443, or 8000 behind another"
)
@click.option("--ports", type=int, metavar="NUMBER", help="the first of three ports of the Hub's own")
def setup_command(
    yes: bool, dry_run: bool, remove: bool, root: str, labextension: str, **said: Any
) -> list[str]:
    """Set this machine up: configuration, systemd units, a user, firewall, backup, first image.

    It shows a plan first. Run it again to change something; options that are left out stay as they were.
    """
    machine = Machine(Path(root).absolute())
    known = read_record(machine)
    setup = Setup(machine, known or Record(), time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    answers = _answers(said, known)
    if remove:
        if known is None:
            raise UsageError(f"nothing is set up: there is no {machine.at(RECORD)}")
        answers = from_json(known.answers)
        steps = setup.back(answers, _installation_without_sessions(machine))
        done = [f"Removed. The data is in {answers.data}."]
        return _carry_out(setup, steps, [], done=done, yes=yes, dry_run=dry_run)
    if known is None and not yes and not dry_run and sys.stdin.isatty():
        answers = ask(answers)
    answers = answers.checked()
    programs, known_secrets = _programs(), _secrets(machine)
    wanted = files(answers, programs, known_secrets)
    steps = setup.steps(answers, wanted, labextension)
    new = any(step.what == CONFIG and step.do for step in steps)
    found = look(machine, answers, programs, again=known is not None)
    if new and not any(f.level == FAIL for f in found):
        # Loading a configuration makes the engine's network.
        if dry_run and answers.runtime == "docker":
            words = "fgpu check: not run (--dry-run), as it would make the engine's network fgpu"
            found.append(CheckLine(WARN, words))
        else:
            (text,) = (file.text for file in wanted if file.path == CONFIG)
            found += of_the_configuration(machine, answers, text, known_secrets)
    head = ["Checked:", *(f"  {f.level:<5} {f.words}" for f in found), *_words(answers)]
    if any(f.level == FAIL for f in found):
        return Report([*head, *_plan(steps), "", "Nothing was changed: mend what FAIL says first."], status=1)
    done = _done(answers, machine)
    return _carry_out(setup, steps, head, done=done, yes=yes, dry_run=dry_run, answers=answers)


def _carry_out(
    setup: Setup,
    steps: list[Step],
    head: list[str],
    *,
    done: list[str],
    yes: bool,
    dry_run: bool,
    answers: Answers | None = None,
) -> list[str]:
    shown = [*head, *_plan(steps)]
    if dry_run:
        return [*shown, "", "Nothing was changed (--dry-run)."]
    to_do = [step for step in steps if step.do]
    if not to_do:
        return [*shown, "", "Nothing to do.", *done]
    if not yes and not sys.stdin.isatty():
        raise UsageError("nobody can be asked here: say --yes, or --dry-run to see the plan")
    # Before anything is done, as a step may take minutes, or fail.
    print("\n".join(shown), flush=True)
    if not yes and input("\nDo this? [y/N] ").strip().lower() not in ("y", "yes"):
        return ["Nothing was changed."]
    if answers is not None:
        setup.remember(answers)
    for step in to_do:
        assert step.do is not None
        step.do()
    return ["", *done]


def _answers(options: dict[str, Any], known: Record | None) -> Answers:
    answers = from_json(known.answers) if known else Answers()
    said = {name: value for name, value in options.items() if value not in (None, ())}
    for name in ("cert", "key"):
        if said.get(name):
            said[name] = os.path.abspath(said[name])
    if "ports" in said:
        said["ports"] = tuple(range(said["ports"], said["ports"] + 3))
    return replace(answers, **said)


def _programs() -> Programs:
    here = Path(sys.prefix, "bin")
    proxy = program("configurable-http-proxy", here)
    node = program("node", *([proxy.parent] if proxy else []), here)
    folders = dict.fromkeys(str(p.parent) for p in (proxy, node) if p)
    return Programs(str(here), str(proxy or ""), os.pathsep.join(folders))


def _secrets(machine: Machine) -> dict[str, str]:
    token = machine.read(TOKEN)
    if token is None or not token.startswith(f"{TOKEN_NAME}="):
        token = f"{TOKEN_NAME}={secrets.token_hex(32)}\n"
    made = {
        path: machine.read(path) or f"{secrets.token_urlsafe(size)}\n" for path, size in PASSWORDS.items()
    }
    return {TOKEN: token, **made}


def _installation_without_sessions(machine: Machine) -> str | None:
    config = machine.at(CONFIG)
    if not machine.is_real or not config.exists():
        return None
    try:
        with read_only(loaded(str(config))[1].database_url()) as store:
            live, installation = store.snapshot(int(time.time())).sessions, store.installation_id
    except StoreUnavailable as e:
        if not str(e).endswith(NOT_YET):
            raise
        return None
    if live:
        raise BadSettings(f"sessions run or wait: {len(live)}; end them first, on the administrators' pages")
    return installation


def _words(answers: Answers) -> list[str]:
    said = [ROOT_BY_THE_ENGINE, NOT_ROOT] * (answers.runtime == "docker") + [READS_PASSWORDS] * (
        answers.login == "pam"
    )
    if answers.login == "pam" and not answers.groups:
        said.append("Everybody with an account on this machine may log in; --group NAME says who may.")
    if not answers.admins:
        said.append("Nobody is an administrator; --admin NAME says who is.")
    return ["Know:", *(f"  {line}" for line in said)] if said else []


def _plan(steps: list[Step]) -> list[str]:
    return ["Plan:", *(f"  {s.verb:<9} {s.what}{f'  ({s.why})' if s.why else ''}" for s in steps)]


def _done(answers: Answers, machine: Machine) -> list[str]:
    lines = [f"The Hub is at {answers.url}."] if machine.is_real else [f"The files are below {machine.root}."]
    if answers.login == "password":
        lines.append(f"The passwords are in {' and '.join(PASSWORDS)}.")
    if answers.tls == "proxy":
        port = answers.public_port
        lines.append(f"Open port {port} in the machine's own firewall, if it has one: ufw allow {port}/tcp")
    if answers.tls in ("caddy", "nginx"):
        lines.append(f"Include the file for {answers.tls} into its configuration, as its first line says.")
    return lines
