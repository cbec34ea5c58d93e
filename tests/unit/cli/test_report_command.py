"""`fgpu report`: what is in the file, and that no secret is, wherever one is planted; and `fgpu check --json`."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
from pathlib import Path

import pytest

from commandline import Fgpu, filled, write_config
from fgpuspawner.cli.report import Hiding

PLANTED = {
    "service": "planted-service-token-Zq81",
    "client": "plantedClientSecretXyWz",
    "ldap": "planted bind password",
    "environment": "plantedwandb",
    "argument": "planted-argument-8d7f6a5b4c",
    "hub database": "plantedhubdb",
    "query": "plantedquery",
    "proxy": "plantedproxy",
    "cookie": "planted0cookie1secret2file",
    "password file": "plantedpw",
    "variable": "plantedvariable",
    "logged": "planted9f8e7d6c5b4a39281706",
    "named": "plantedshort",
}
AFTER = """
c.JupyterHub.services.append({{"name": "x", "api_token": {service!r}}})
c.GitLabOAuthenticator.client_secret = {client!r}
c.LDAPAuthenticator.lookup_dn_search_password = {ldap!r}
c.Spawner.environment = {{"WANDB": {environment!r}}}
c.Spawner.args = ["--Thing.token={argument}"]
c.ConfigurableHTTPProxy.auth_token = {proxy!r}
c.JupyterHub.hub_ip = "127.0.0.1"
c.JupyterHub.subdomain_host = ""
"""
LOG = """
[I 2026-11-23 23:32:08.590 JupyterHub log:192] 200 GET /hub/login?token={query} (alice@127.0.0.1) 12ms
[W 2026-11-23 23:32:08.590 JupyterHub auth:1] Failed login for mallory: password {named}
[I 2026-11-23 23:32:08.590 JupyterHub log:192] 200 GET /user/carol/api (carol@127.0.0.1) with {logged}
[E 2026-11-23 23:32:09.590 JupyterHub app:1] Authorization: token {service}; {client} {ldap} {environment} {argument}
[I 2026-11-23 23:32:09 fgpu] cookie={cookie} {password file} {proxy} {variable} postgresql://u:{hub database}@db/x
[E 2026-11-23 23:32:10.590 JupyterHub app:1] Session 12 (gone/gpu-2): RUNNING -> TERMINATING on GPU-1f0c2f3a-0b1c-4d5e
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installation with secrets in every place, that `make run` runs."""
    data = tmp_path / "data"
    data.mkdir()
    filled(f"sqlite:///{data / 'fgpu.sqlite'}")
    with sqlite3.connect(data / "jupyterhub.sqlite") as db:
        db.execute("CREATE TABLE users (name TEXT)")
        db.executemany("INSERT INTO users VALUES (?)", [("alice",), ("erin",)])
    db.close()
    (data / "jupyterhub_cookie_secret").write_text(PLANTED["cookie"] + "\n")
    (data / "admin-password").write_text(PLANTED["password file"])
    (data / "make-run.log").write_text(LOG.format(**PLANTED))
    monkeypatch.setenv("CONFIGPROXY_AUTH_TOKEN", PLANTED["variable"])
    return write_config(tmp_path, after=AFTER.format(**PLANTED))


def test_report_contains_no_planted_secret(config: str, tmp_path: Path, fgpu: Fgpu) -> None:
    file = tmp_path / "report.txt"
    status, _, err = fgpu("report", str(file), "--config", config)
    assert (status, err) == (0, "")
    text = file.read_text()
    assert {name for name, secret in PLANTED.items() if secret in text} == set()
    for user in ("alice", "bob", "carol", "dave", "zoe", "erin", "mallory", "gone"):
        assert user not in text
    # It is of use all the same.
    for part in (
        "fgpuspawner ",
        "jupyterhub 6",
        "OK: ",
        "c.FGPU.simulated_gpus = '2'",
        "group default: 2 PENDING",
    ):
        assert part in text
    assert "c.JupyterHub.services = set" in text
    assert "c.JupyterHub.named_server_limit_per_user = 100" in text
    assert "Session 12 (" in text
    assert "GPU-1f0c2f3a-0b1c-4d5e" in text
    assert text.count("JupyterHub app:1]") == 2
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    status, line = fgpu.failure("report", str(file), "--config", config)
    assert (status, "File exists" in line) == (1, True)


def test_report_with_users_has_their_names(config: str, tmp_path: Path, fgpu: Fgpu) -> None:
    file = tmp_path / "report.txt"
    assert fgpu("report", str(file), "--users", "--config", config)[0] == 0
    text = file.read_text()
    assert "(carol@127.0.0.1)" in text
    assert {name for name, secret in PLANTED.items() if secret in text} == set()


def test_report_leaves_out_logs_if_users_are_unknown(config: str, tmp_path: Path, fgpu: Fgpu) -> None:
    (tmp_path / "data" / "jupyterhub.sqlite").write_text("damaged" * 1000)
    file = tmp_path / "report.txt"
    assert fgpu("report", str(file), "--config", config)[0] == 0
    assert "left out: who the users are cannot be read" in file.read_text()
    assert "carol" not in file.read_text()


def test_report_of_a_wrong_configuration(tmp_path: Path, fgpu: Fgpu) -> None:
    config = write_config(
        tmp_path, after="raise ValueError('postgresql://fgpu:s3cret@db/x?password=hunter22')"
    )
    file = tmp_path / "report.txt"
    assert fgpu("report", str(file), "--config", config)[0] == 0
    text = file.read_text()
    assert "jupyterhub_config.py:8: ValueError" in text
    assert "s3cret" not in text
    assert "hunter22" not in text


def test_report_keeps_short_and_ordinary_words() -> None:
    hide = Hiding({"ab", "", "s3cr3tvalue"}, {"a.b"})
    assert (
        hide("absent: s3cr3tvalue of a.b, and of aXb, and xa.b")
        == "absent: [hidden] of user-1, and of aXb, and xa.b"
    )


def steady(line: str) -> str:
    return re.sub(r"\d+ MiB left", "some left", line)


def test_check_as_json_has_a_level(tmp_path: Path, fgpu: Fgpu) -> None:
    config = write_config(tmp_path)
    status, out, _ = fgpu("check", "--json", "--config", config)
    found = json.loads(out)
    plain = fgpu("check", "--config", config)[1].splitlines()
    # Other programs write to the disk at the same time.
    assert [steady(line["text"]) for line in found["lines"]] == [steady(line.strip()) for line in plain]
    warned = any("WARNING" in line for line in plain)
    assert (status, found["version"], found["level"]) == (0, 1, "WARN" if warned else "OK")

    config = write_config(tmp_path, max_fgpu="-1")
    status, out, err = fgpu("check", "--json", "--config", config)
    (line,) = json.loads(out)["lines"]
    assert (status, line["level"], err) == (1, "FAIL", "")
    assert fgpu.failure("check", "--config", config) == (1, line["text"])
