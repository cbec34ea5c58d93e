"""The command ``fgpu setup``: checks, shows a plan, asks, does it; or takes it back."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fgpu_scheduler import BadSettings, StoreUnavailable
from fgpuspawner.cli.check import NOT_YET
from fgpuspawner.cli.command import Report, add_command, loaded, read_only
from fgpuspawner.cli.setup.answers import LOGINS, RUNTIMES, TLS, Answers, ask, from_json
from fgpuspawner.cli.setup.checks import FAIL, WARN, Finding, look, of_the_configuration, program
from fgpuspawner.cli.setup.files import CONFIG, PASSWORDS, TOKEN, Programs, files
from fgpuspawner.cli.setup.machine import RECORD, Machine, Record, read_record
from fgpuspawner.cli.setup.writer import Setup, Step
from fgpuspawner.cli.usage import UsageError

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


def add_to(commands: Any) -> None:
    about = (
        "Set this machine up: configuration, systemd units, a user, firewall, backup, first image. Shows a plan first. "
        "Run it again to change something; options that are left out stay as they were."
    )
    what = "set up a Hub on this machine, or take it back"
    # It shows what it is about to do, and asks.
    parser = add_command(commands, run, "setup", what, about, speaks_json=False)
    parser.add_argument("--yes", action="store_true", help="ask nothing")
    parser.add_argument("--dry-run", action="store_true", help="show the plan, and change nothing")
    parser.add_argument("--remove", action="store_true", help="take it all back but the data")
    parser.add_argument(
        "--root", metavar="FOLDER", default="/", help="write below this folder, and start nothing"
    )
    parser.add_argument("--host", metavar="NAME", help="the Hub's name in browsers, such as hub.example")
    parser.add_argument(
        "--tls", choices=TLS, help="who encrypts; none: only this machine reaches it; default: proxy"
    )
    parser.add_argument("--cert", metavar="FILE", help="the certificate with its chain, for proxy and nginx")
    parser.add_argument("--key", metavar="FILE", help="its key")
    parser.add_argument(
        "--subdomains",
        action=argparse.BooleanOptionalAction,
        help="a domain for each user: needs a wildcard name and certificate",
    )
    parser.add_argument(
        "--login", choices=LOGINS, help="accounts of this machine, or one password for all; default: pam"
    )
    parser.add_argument(
        "--group", dest="groups", metavar="NAME", action="append", help="with pam: only its members"
    )
    parser.add_argument("--admin", dest="admins", metavar="NAME", action="append", help="an administrator")
    parser.add_argument("--runtime", choices=RUNTIMES, help="what sessions run in; default: docker")
    parser.add_argument("--unit", metavar="NUMBER", help="how many fGPU one GPU is; default: 2")
    parser.add_argument(
        "--simulated", metavar="NUMBER", help="so many simulated GPUs, for trying; default: 0"
    )
    parser.add_argument(
        "--image", dest="images", metavar="NAME", action="append", help="a first image; default: base"
    )
    parser.add_argument(
        "--labextension", metavar="WHEEL", default="", help="the JupyterLab extension for the images"
    )
    parser.add_argument("--user", metavar="NAME", help="the Hub's system user; default: fgpu")
    parser.add_argument("--data", metavar="FOLDER", help="the data; default: /var/lib/fgpu")
    parser.add_argument(
        "--port", type=int, metavar="NUMBER", help="the proxy's port; default: 443, or 8000 behind another"
    )
    parser.add_argument(
        "--ports", type=int, metavar="NUMBER", help="the first of three ports of the Hub's own"
    )


def run(given: argparse.Namespace) -> list[str]:
    """Show the plan and do it."""
    machine = Machine(Path(given.root).absolute())
    known = read_record(machine)
    setup = Setup(machine, known or Record(), time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    answers = _answers(given, known)
    if given.remove:
        if known is None:
            raise UsageError(f"nothing is set up: there is no {machine.at(RECORD)}")
        answers = from_json(known.answers)
        steps = setup.back(answers, _installation_without_sessions(machine))
        return _carry_out(given, setup, steps, [], done=[f"Removed. The data is in {answers.data}."])
    if known is None and not given.yes and not given.dry_run and sys.stdin.isatty():
        answers = ask(answers, input)
    answers = answers.checked()
    programs, known_secrets = _programs(), _secrets(machine)
    wanted = files(answers, programs, known_secrets)
    steps = setup.steps(answers, wanted, given.labextension)
    new = any(step.what == CONFIG and step.do for step in steps)
    found = look(machine, answers, programs, again=known is not None)
    if new and not any(f.level == FAIL for f in found):
        # Loading a configuration makes the engine's network.
        if given.dry_run and answers.runtime == "docker":
            found.append(
                Finding(WARN, "fgpu check: not run (--dry-run), as it would make the engine's network fgpu")
            )
        else:
            (text,) = (file.text for file in wanted if file.path == CONFIG)
            found += of_the_configuration(machine, answers, text, known_secrets)
    head = ["Checked:", *(f"  {f.level:<5} {f.words}" for f in found), *_words(answers)]
    if any(f.level == FAIL for f in found):
        return Report([*head, *_plan(steps), "", "Nothing was changed: mend what FAIL says first."], status=1)
    return _carry_out(given, setup, steps, head, done=_done(answers, machine), answers=answers)


def _carry_out(
    given: argparse.Namespace,
    setup: Setup,
    steps: list[Step],
    head: list[str],
    *,
    done: list[str],
    answers: Answers | None = None,
) -> list[str]:
    shown = [*head, *_plan(steps)]
    if given.dry_run:
        return [*shown, "", "Nothing was changed (--dry-run)."]
    to_do = [step for step in steps if step.do]
    if not to_do:
        return [*shown, "", "Nothing to do.", *done]
    if not given.yes and not sys.stdin.isatty():
        raise UsageError("nobody can be asked here: say --yes, or --dry-run to see the plan")
    # Before anything is done, as a step may take minutes, or fail.
    print("\n".join(shown), flush=True)
    if not given.yes and input("\nDo this? [y/N] ").strip().lower() not in ("y", "yes"):
        return ["Nothing was changed."]
    if answers is not None:
        setup.remember(answers)
    for step in to_do:
        assert step.do is not None
        step.do()
    return ["", *done]


def _answers(given: argparse.Namespace, known: Record | None) -> Answers:
    """Return what was said before, with what is said now over it."""
    answers = from_json(known.answers) if known else Answers()
    names = ("host", "tls", "cert", "key", "subdomains", "login", "groups", "admins", "runtime", "unit")
    more = ("simulated", "images", "user", "data", "port")
    said: dict[str, Any] = {n: v for n in (*names, *more) if (v := getattr(given, n)) is not None}
    for name in ("cert", "key"):
        if said.get(name):
            said[name] = os.path.abspath(said[name])
    if given.ports is not None:
        said["ports"] = tuple(range(given.ports, given.ports + 3))
    said |= {n: tuple(v) for n, v in said.items() if isinstance(v, list)}
    return replace(answers, **said)


def _programs() -> Programs:
    here = Path(sys.prefix, "bin")
    proxy = program("configurable-http-proxy", here)
    node = program("node", *([proxy.parent] if proxy else []), here)
    folders = dict.fromkeys(str(p.parent) for p in (proxy, node) if p)
    return Programs(str(here), str(proxy or ""), os.pathsep.join(folders))


def _secrets(machine: Machine) -> dict[str, str]:
    """Return the secrets that are there, and new ones for those that are not."""
    token = machine.read(TOKEN)
    if token is None or not token.startswith(f"{TOKEN_NAME}="):
        token = f"{TOKEN_NAME}={secrets.token_hex(32)}\n"
    made = {
        path: machine.read(path) or f"{secrets.token_urlsafe(size)}\n" for path, size in PASSWORDS.items()
    }
    return {TOKEN: token, **made}


def _installation_without_sessions(machine: Machine) -> str | None:
    """Return the installation's id, None where no Hub has run.

    Raises:
        BadSettings: there are sessions.
        StoreUnavailable: nobody knows whether there are.
    """
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
    """Return what an administrator has to know of the rights that are given."""
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
