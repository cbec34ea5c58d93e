"""Real servers that people's accounts are in, for tests: an OpenID Connect provider, slapd, and PAM with its own files.

Each takes its lines of jupyterhub_config.py from docs/log-in.md, with nothing changed but where the server is.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

import requests

from hubprocess import HubProcess, free_ports, until

PAGE = Path(__file__).parents[2] / "docs/log-in.md"
PASSWORD = "a right password"
GROUPS = ("members", "ml101", "gpu-admins")
NOBODY = "c.Authenticator.allow_all = False\nc.Authenticator.admin_users = set()\n"


def example(heading: str) -> str:
    """Return the lines of Python under a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}")[2].partition("\n## ")[0]
    (lines,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    return str(lines)


def replaced(text: str, **words: str) -> str:
    """Return the text with these words replaced; each must occur."""
    for old, new in words.items():
        assert old in text, f"{old} is not on the page"
        text = text.replace(old, new)
    return text


class SignOn(ABC):
    """Where accounts are. ``before`` are the Hub's lines before `configure`, ``env`` what its environment has."""

    before: str
    env: dict[str, str] = {}

    @abstractmethod
    def put(self, user: str, *groups: str) -> None:
        """Make the account if it is not there, and put it into exactly these groups."""

    @abstractmethod
    def log_in(self, hub: HubProcess, user: str, password: str = PASSWORD) -> requests.Session | None:
        """Log in as a browser does; None where that is refused."""

    @abstractmethod
    def close(self) -> None:
        """End the server."""


def by_form(hub: HubProcess, user: str, password: str) -> requests.Session | None:
    """Log in with the Hub's own form."""
    browser = requests.Session()
    shown = browser.get(f"{hub.url}/hub/login", timeout=60)
    assert shown.status_code == 200, shown.text
    sent = {"username": user, "password": password, "_xsrf": browser.cookies["_xsrf"]}
    answer = browser.post(f"{hub.url}/hub/login", data=sent, allow_redirects=False, timeout=60)
    assert answer.status_code in (302, 403), answer.text
    return browser if answer.status_code == 302 else None


class OpenID(SignOn):
    """An OpenID Connect provider in a process of its own."""

    def __init__(self, folder: Path) -> None:
        port = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.before = replaced(
            example("GitLab"),
            **{
                "https://sso.example/realms/lab/protocol/openid-connect/auth": f"{self.url}/oauth2/authorize",
                "https://sso.example/realms/lab/protocol/openid-connect/token": f"{self.url}/oauth2/token",
                "https://sso.example/realms/lab/protocol/openid-connect/userinfo": f"{self.url}/userinfo",
                # Its port is not known before the Hub's.
                '"https://hub.example/hub/oauth_callback"': "c.JupyterHub.bind_url + '/hub/oauth_callback'",
            },
        )
        self.env = {"OAUTH_CLIENT_SECRET": "secret", "JUPYTERHUB_CRYPT_KEY": "ab" * 32}
        with (folder / "provider.log").open("wb") as log:
            words = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port)]
            self._process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        until(self._answers, what="the provider answers")

    def _answers(self) -> bool:
        try:
            return requests.get(f"{self.url}/.well-known/openid-configuration", timeout=10).ok
        except requests.ConnectionError:
            return False

    def put(self, user: str, *groups: str) -> None:
        claims = {"preferred_username": user, "groups": groups}
        assert requests.put(f"{self.url}/users/{user}", json=claims, timeout=60).status_code == 204

    def forget_log_ins(self, user: str) -> None:
        """Make what the Hub has of an account's log-ins worthless, as where it is closed."""
        assert requests.post(f"{self.url}/users/{user}/revoke-tokens", timeout=60).status_code == 204

    def log_in(self, hub: HubProcess, user: str, password: str = PASSWORD) -> requests.Session | None:
        browser = requests.Session()
        asked = browser.get(f"{hub.url}/hub/oauth_login", allow_redirects=False, timeout=60)
        assert asked.headers["Location"].startswith(f"{self.url}/oauth2/authorize?"), asked.text
        # It asks for no password: this is who the provider says that it is.
        given = requests.post(
            asked.headers["Location"], data={"sub": user}, allow_redirects=False, timeout=60
        )
        answer = browser.get(given.headers["Location"], allow_redirects=False, timeout=60)
        assert answer.status_code in (302, 403), answer.text
        return browser if answer.status_code == 302 else None

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)


SLAPD = """
include /etc/ldap/schema/core.schema
include /etc/ldap/schema/cosine.schema
include /etc/ldap/schema/nis.schema
include /etc/ldap/schema/inetorgperson.schema
TLSCertificateFile {folder}/certificate.pem
TLSCertificateKeyFile {folder}/key.pem
database ldif
directory {folder}/entries
suffix "dc=lab,dc=example"
rootdn "cn=root,dc=lab,dc=example"
rootpw root
access to attrs=userPassword by anonymous auth by * none
access to * by users read
"""


class Directory(SignOn):
    """Debian's slapd in a folder of its own, with TLS."""

    TOP = "dc=lab,dc=example"

    def __init__(self, folder: Path) -> None:
        self._groups: dict[str, set[str]] = {}
        (folder / "entries").mkdir()
        make_certificate(folder)
        (folder / "slapd.conf").write_text(SLAPD.format(folder=folder))
        self.port = free_ports(1)
        self.before = replaced(
            example("LDAP"),
            **{
                'server_address = "ldap.example"': f'server_address = "localhost"\n'
                f"c.LDAPAuthenticator.server_port = {self.port}",
                "/etc/ssl/certs/ca-certificates.crt": f"{folder}/certificate.pem",
            },
        )
        words = [
            self.program(),
            "-h",
            f"ldap://localhost:{self.port}",
            "-f",
            str(folder / "slapd.conf"),
            "-d",
            "0",
        ]
        with (folder / "slapd.log").open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        until(self._answers, what="slapd answers")
        self._change(
            f"dn: {self.TOP}\nobjectClass: dcObject\nobjectClass: organization\no: Lab",
            *(f"dn: ou={unit},{self.TOP}\nobjectClass: organizationalUnit" for unit in ("people", "groups")),
            # A group of this kind has a member.
            *(
                f"dn: {self._group(group)}\nobjectClass: groupOfNames\nmember: {self._person('nobody')}"
                for group in GROUPS
            ),
        )

    @staticmethod
    def program() -> str:
        """Return slapd's path, or "" where it, or its tools, are not installed."""
        found = shutil.which("slapd", path=f"{os.environ['PATH']}:/usr/sbin")
        return found if found and shutil.which("ldapmodify") else ""

    def _person(self, user: str) -> str:
        return f"uid={user},ou=people,{self.TOP}"

    def _group(self, group: str) -> str:
        return f"cn={group},ou=groups,{self.TOP}"

    def _answers(self) -> bool:
        assert self._process.poll() is None, "slapd has ended"
        with socket.socket() as s:
            return s.connect_ex(("localhost", self.port)) == 0

    def _change(self, *entries: str) -> None:
        """Add entries in LDIF, or change those that say so."""
        words = ["ldapmodify", "-a", "-x", "-H", f"ldap://localhost:{self.port}"]
        words += ["-D", f"cn=root,{self.TOP}", "-w", "root"]
        done = subprocess.run(words, input="\n\n".join(entries), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    def put(self, user: str, *groups: str) -> None:
        person = self._person(user)
        if user not in self._groups:
            self._change(
                f"dn: {person}\nobjectClass: inetOrgPerson\nsn: {user}\ncn: {user}\nuserPassword: {PASSWORD}"
            )
        before = self._groups.get(user, set())
        self._groups[user] = set(groups)
        for word, changed in (("add", set(groups) - before), ("delete", before - set(groups))):
            for group in sorted(changed):
                lines = f"changetype: modify\n{word}: member\nmember: {person}"
                self._change(f"dn: {self._group(group)}\n{lines}")

    def log_in(self, hub: HubProcess, user: str, password: str = PASSWORD) -> requests.Session | None:
        return by_form(hub, user, password)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)


def make_certificate(folder: Path) -> None:
    """Write a new certificate for localhost, and its key, into the folder."""
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    words += ["-addext", "subjectAltName=DNS:localhost"]
    words += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    subprocess.run(words, check=True, capture_output=True)


OWN_FILES = """
# The Hub sees files of its own in place of the machine's accounts, and nothing else does.
import ctypes, subprocess
NEW_NAMESPACE_OF_MOUNTS = 0x00020000
assert ctypes.CDLL(None).unshare(NEW_NAMESPACE_OF_MOUNTS) == 0
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
for name, file in {files!r}.items():
    subprocess.run(["mount", "--bind", file, name], check=True)
"""


class Machine(SignOn):
    """The accounts of a machine, with PAM: the Hub has its own /etc/passwd, /etc/group, /etc/shadow and service."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        hashed = subprocess.run(
            ["openssl", "passwd", "-6", "-stdin"], input=PASSWORD, capture_output=True, text=True, check=True
        )
        self._hash = hashed.stdout.strip()
        self._users: dict[str, tuple[str, ...]] = {}
        (folder / "login").write_text("auth required pam_unix.so\naccount required pam_unix.so\n")
        self._write()
        files = {f"/etc/{name}": str(folder / name) for name in ("passwd", "group", "shadow")}
        files["/etc/pam.d/login"] = str(folder / "login")
        self.before = OWN_FILES.format(files=files) + example("PAM")

    def put(self, user: str, *groups: str) -> None:
        self._users[user] = groups
        self._write()

    def _write(self) -> None:
        """Write the files in place: the Hub sees these very files."""
        people = {name: 5000 + n for n, name in enumerate(self._users)}
        passwd = Path("/etc/passwd").read_text() + "".join(
            f"{name}:x:{number}:{number}::/nonexistent:/bin/sh\n" for name, number in people.items()
        )
        groups = Path("/etc/group").read_text() + "".join(
            f"{name}:x:{6000 + n}:{','.join(u for u, own in self._users.items() if name in own)}\n"
            for n, name in enumerate(GROUPS)
        )
        shadow = "".join(f"{name}:{self._hash}:19000:0:99999:7:::\n" for name in people)
        for name, text in {"passwd": passwd, "group": groups, "shadow": shadow}.items():
            with (self._folder / name).open("w") as file:
                file.write(text)
        (self._folder / "shadow").chmod(0o600)

    def log_in(self, hub: HubProcess, user: str, password: str = PASSWORD) -> requests.Session | None:
        return by_form(hub, user, password)

    def close(self) -> None:
        """Nothing runs: its mounts end with the Hub."""
