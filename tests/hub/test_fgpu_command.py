"""The command ``fgpu`` as its users have it: an address, a token, and a real Hub with its service."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import Audit, memory_words
from fgpuspawner.cli import main as cli
from hubprocess import MINI, HubProcess, running, until

FGPU = str(Path(sys.executable).parent / "fgpu")
SMALL = ("--cpu", "0.1", "--memory-mib", "256")
QUOTA = {"user": "*", "max_fgpu": 1.5}


@dataclass
class Person:
    """A user with a token and a home folder."""

    hub: HubProcess
    name: str
    token: str
    home: Path

    def environment(self, **more: str) -> dict[str, str]:
        own = {"HOME": str(self.home), "PATH": os.environ["PATH"], "FGPU_HUB_URL": self.hub.url}
        return {**own, "JUPYTERHUB_API_TOKEN": self.token, **more}

    def begin(self, *words: str, **more: str) -> subprocess.Popen[str]:
        """Start the command."""
        return subprocess.Popen(
            [FGPU, *words],
            env=self.environment(**more),
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # What a shell starts in its background ignores it, and so would this.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def fgpu(self, *words: str, status: int = 0, **more: str) -> tuple[str, str]:
        """Run the command in this process, and return what it says, and what it says is wrong."""
        out, err = io.StringIO(), io.StringIO()
        with (
            unittest.mock.patch.dict(os.environ, self.environment(**more), clear=True),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            ended = cli.main(words)
        assert self.token not in out.getvalue() + err.getvalue()
        assert ended == status, out.getvalue() + err.getvalue()
        return out.getvalue(), err.getvalue()

    def json(self, *words: str, status: int = 0) -> Any:
        return json.loads(self.fgpu(*words, "--json", status=status)[0])

    def is_answered(self) -> bool:
        """Return whether the service answers."""
        with unittest.mock.patch.dict(os.environ, self.environment(), clear=True):
            return cli.main(["list"]) == 0

    def end_all(self) -> None:
        for session in self.json("list")["sessions"]:
            if session["state"] != "TERMINATING":
                self.fgpu("end", str(session["id"]))
        until(lambda: not self.json("list")["sessions"], what="all sessions have ended")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """A Hub with one GPU of 2 fGPU; each user may hold 1.5."""
    with running(tmp_path_factory.mktemp("hub"), after=MINI, quotas=[QUOTA]) as hub:
        yield hub


@pytest.fixture
def people(hub: HubProcess, tmp_path: Path) -> Iterator[tuple[Person, Person]]:
    """Two users; their sessions end with the test."""
    found = []
    for name in ("alice", "bob"):
        home = tmp_path / name
        home.mkdir()
        found.append(Person(hub, name, hub.add_user(name), home))
    until(found[0].is_answered, what="the service answers")
    yield found[0], found[1]
    for person in found:
        person.end_all()


def test_a_session_is_started_listed_shown_and_ended(people: tuple[Person, Person]) -> None:
    alice, _ = people
    out, err = alice.fgpu("run", "--image", "python", "--fgpu", "0.5", *SMALL, "--wait")
    heading, row = out.splitlines()
    assert heading.split() == ["session", "name", "image", "amount", "since", "state"]
    number = row.split()[0]
    assert row.endswith("RUNNING")
    assert "Python 1" in row
    assert err.splitlines()[-1] == f"fgpu: session {number}: RUNNING"

    assert alice.fgpu("list")[0] == out
    shown = alice.fgpu("show", number)[0]
    assert "fgpu                    0.5\n" in shown
    told = alice.json("show", number)["session"]
    gpu = told["gpus"][0]
    held = f"memory {memory_words(gpu['memory_mib'])}, compute {gpu['compute_percent']} %, simulated true"
    uuid_and_model = f"uuid {gpu['uuid']}, model {gpu['model']}, fgpu 0.5"
    assert f"gpus                    {uuid_and_model}, {held}\n" in shown
    assert " GiB" in held
    assert not [raw for raw in ("{", "_mib", "_percent", "_s ") if raw in shown]
    assert (told["state"], told["fgpu"], told["mine"]) == ("RUNNING", "0.5", True)

    assert alice.fgpu("end", number)[0] in (
        f"session {number} is being ended\n",
        f"session {number} has ended\n",
    )
    until(lambda: alice.fgpu("list")[0] == "no sessions\n", what="it has ended")
    assert alice.json("show", number)["session"]["end_cause"] == "USER"
    assert number in alice.fgpu("list", "--ended")[0]
    out, err = alice.fgpu("end", number, "--json", status=1)
    assert json.loads(out)["error"]["code"] == "already_ended"
    assert err.count("\n") == 1


def test_a_log_is_read_by_its_owner_and_administrators_only(people: tuple[Person, Person]) -> None:
    alice, bob = people
    session = alice.json("run", "--fgpu", "0.3", *SMALL, "--name", "my training", "--wait")["sessions"][0]
    assert session["display_name"] == "my training"
    number = str(session["id"])
    assert alice.fgpu("rename", number, "try 2") == (f"session {number} is now try 2\n", "")
    assert bob.json("rename", number, "mine", status=1)["error"]["code"] == "no_such_session"
    lines = alice.fgpu("logs", number)[0]
    assert "miniserver for session" in lines
    assert alice.json("logs", number, "--lines", "1")["lines"] == [f"miniserver for session {number}"]
    assert bob.json("logs", number, status=1)["error"]["code"] == "no_such_session"
    hub = alice.hub
    for token in (alice.token, hub.token):
        # Only the service's own token, which knows who may read it.
        assert hub.api("GET", f"fgpu/log/{number}", token=token).status_code == 403
    admin = Person(hub, "admin", hub.add_user("admin"), alice.home)
    assert "miniserver for session" in admin.fgpu("logs", number)[0]
    audit = [line for line in Audit(hub.store).lines(limit=9) if line.action == "session.log"]
    assert [(line.actor, line.target) for line in audit] == [("admin", f"session {number} (try 2) of alice")]
    alice.fgpu("end", number)
    until(lambda: alice.fgpu("list")[0] == "no sessions\n", what="it has ended")
    assert "miniserver for session" in alice.fgpu("logs", number)[0]


def test_several_sessions_are_one_request(people: tuple[Person, Person]) -> None:
    alice, _ = people
    found = alice.json("run", "--fgpu", "0.5", *SMALL, "--sessions", "3", "--wait")["sessions"]
    assert [(s["server_name"], s["state"]) for s in found] == [
        ("", "RUNNING"),
        ("gpu-2", "RUNNING"),
        ("gpu-3", "RUNNING"),
    ]


def test_what_can_never_run_is_refused_with_the_apis_code_and_queues_nothing(
    people: tuple[Person, Person],
) -> None:
    alice, _ = people
    error = alice.json("run", "--fgpu", "2", *SMALL, status=1)["error"]
    (refusal,) = alice.json("forecast", "--fgpu", "2", *SMALL, status=1)["refusals"]
    assert error == {name: refusal[name] for name in ("code", "field", "message")}
    assert error["code"] == "above_quota"
    out, err = alice.fgpu("run", "--fgpu", "2", *SMALL, status=1)
    assert (out, err) == ("", f"fgpu: {error['message']}\n")
    assert alice.fgpu("forecast", "--fgpu", "2", *SMALL, status=1) == (out, err)
    error = alice.json("run", "--image", "nothing", status=1)["error"]
    assert (error["code"], error["field"]) == ("unknown_choice", "image")
    assert alice.json("list")["sessions"] == []


def test_a_waiting_request_says_why_and_when_it_runs_and_ctrl_c_leaves_it_its_place(
    people: tuple[Person, Person],
) -> None:
    alice, bob = people
    alice.fgpu("run", "--fgpu", "1.5", *SMALL, "--wait")
    assert "starts now" not in bob.fgpu("forecast", "--fgpu", "1", *SMALL)[0]
    waiting = bob.begin("run", "--fgpu", "1", *SMALL, "--wait")
    assert waiting.stderr is not None
    first = waiting.stderr.readline()
    assert "PENDING, position 1" in first
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=60)
    (session,) = bob.json("list")["sessions"]
    number = session["id"]
    assert (waiting.returncode, session["state"]) == (130, "PENDING")
    assert err == f"fgpu: no longer waiting; the request stays: fgpu end {number} ends it\n"
    assert out.splitlines()[1].startswith(str(number))

    # Another one waits, and sees its end: cancelled by its owner, on the pages or by this command.
    second = bob.begin("run", "--fgpu", "0.8", *SMALL, "--wait", "--json")
    assert second.stderr is not None
    assert "PENDING, position 2" in second.stderr.readline()
    (other,) = (s["id"] for s in bob.json("list")["sessions"] if s["id"] != number)
    bob.fgpu("end", str(other))
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 1
    assert [s["state"] for s in json.loads(out)["sessions"]] == ["CANCELLED"]

    alice.end_all()
    until(lambda: bob.json("show", str(number))["session"]["state"] == "RUNNING", what="the first runs")


def test_commands_side_by_side_start_one_session_each(people: tuple[Person, Person]) -> None:
    alice, _ = people
    side_by_side = [alice.begin("run", "--fgpu", "0.3", *SMALL, "--json") for _ in range(3)]
    found = [json.loads(process.communicate(timeout=300)[0])["sessions"] for process in side_by_side]
    assert sorted(s["server_name"] for one in found for s in one) == ["", "gpu-2", "gpu-3"]
    error = alice.json("run", "--server", "gpu-2", status=1)["error"]
    assert error["code"] == "session_exists"


def test_a_shell_is_told_the_sessions_images_and_groups_of_who_has_the_token(
    people: tuple[Person, Person],
) -> None:
    alice, bob = people
    number = alice.json("run", "--fgpu", "0.5", *SMALL)["sessions"][0]["id"]

    def offered(person: Person, line: str) -> list[str]:
        """Return what the command says to a bash, which asks as the lines of `fgpu completion bash` do."""
        last = str(len(line.split(" ")) - 1)
        env = person.environment(_FGPU_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=last)
        said = subprocess.run([FGPU], env=env, capture_output=True, text=True, timeout=60).stdout
        return [found.partition(",")[2] for found in said.split()]

    assert offered(alice, "fgpu end ") == [str(number)]
    assert offered(bob, "fgpu end ") == []
    assert offered(alice, "fgpu run --image py") == ["python"]
    assert offered(alice, "fgpu run --group ") == ["default"]


def test_waiting_goes_on_while_the_service_is_away(people: tuple[Person, Person]) -> None:
    alice, bob = people
    alice.fgpu("run", "--fgpu", "1.5", *SMALL, "--wait")
    waiting = bob.begin("run", "--fgpu", "1", *SMALL, "--wait")
    assert waiting.stderr is not None
    assert "PENDING" in waiting.stderr.readline()
    alice.hub.kill()
    assert "asking again" in waiting.stderr.readline()
    alice.hub.start()
    until(alice.is_answered, what="the service answers")
    alice.end_all()
    _, err = waiting.communicate(timeout=300)
    assert (waiting.returncode, err.splitlines()[-1].endswith("RUNNING")) == (0, True), err


def test_a_local_administrators_token_comes_from_the_hub_into_a_file_that_only_they_can_read(
    hub: HubProcess, people: tuple[Person, Person]
) -> None:
    alice, _ = people
    alice.fgpu("run", "--fgpu", "0.5", *SMALL)
    words = [
        sys.executable,
        "-m",
        "jupyterhub",
        "token",
        "admin",
        "-f",
        str(hub.folder / "jupyterhub_config.py"),
    ]
    made = subprocess.run(words, cwd=hub.folder, capture_output=True, text=True, timeout=120, check=True)
    file = alice.home / "token"
    file.write_text(made.stdout)
    file.chmod(0o644)
    admin = Person(hub, "admin", made.stdout.strip(), alice.home)
    _, err = admin.fgpu("list", "--token-file", str(file), status=2, JUPYTERHUB_API_TOKEN="")
    assert err == f"fgpu: others can read {file}, which has a token in it: chmod 600 {file}\n"
    file.chmod(0o600)
    out, _ = admin.fgpu("list", "--all", "--token-file", str(file), JUPYTERHUB_API_TOKEN="")
    assert "alice: Python 1" in out


def test_a_token_that_is_wrong_a_scope_that_is_missing_and_an_address_that_is_none_are_one_line(
    hub: HubProcess, people: tuple[Person, Person]
) -> None:
    alice, _ = people
    wrong = Person(hub, "alice", "0" * 32, alice.home)
    assert wrong.json("list", status=1)["error"]["code"] == "unauthenticated"
    few = hub.api(
        "POST",
        "users/alice/tokens",
        json={"scopes": ["access:services!service=fgpu", "custom:fgpu:queue:read"]},
    )
    reading = Person(hub, "alice", few.json()["token"], alice.home)
    assert reading.json("list")["sessions"] == []
    error = reading.json("run", "--fgpu", "0.5", *SMALL, status=1)["error"]
    assert error["code"] in ("forbidden", "not_found")
    for url, line in (
        ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer"),
        (f"{hub.url}/elsewhere", "not as a Hub does"),
        ("ftp://hub.example", "is no address of a Hub"),
        ("", "FGPU_HUB_URL is not set"),
    ):
        out, err = alice.fgpu("list", FGPU_HUB_URL=url, status=1 if url.startswith("http:") else 2)
        assert (out, err.count("\n"), line in err) == ("", 1, True), err
    assert (
        "there is no token in JUPYTERHUB_API_TOKEN"
        in alice.fgpu("list", status=2, JUPYTERHUB_API_TOKEN="")[1]
    )
    # As it is in a session.
    own = {"JUPYTERHUB_API_URL": f"{hub.url}/hub/api", "FGPU_SERVICE_URL": f"{hub.url}/services/fgpu/"}
    assert alice.fgpu("list", FGPU_HUB_URL="", **own)[0] == "no sessions\n"
