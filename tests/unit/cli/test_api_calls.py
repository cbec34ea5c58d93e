"""Calls of the API: certificates that are trusted, what is in no address, and what a forecast says."""

from __future__ import annotations

import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from commandline import Fgpu
from fgpuspawner.cli.api import ApiClient, CallFailed
from fgpuspawner.cli.hub_traits import wrong_certificate


class Service(BaseHTTPRequestHandler):
    """A service that has no sessions."""

    def do_GET(self) -> None:
        body = b'{"sessions": []}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed one, with its key, as docs/administrator.md makes it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hub.example")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path = tmp_path / "hub.pem"
    path.write_bytes(secret + made.public_bytes(Encoding.PEM))
    return path


@pytest.fixture
def hub(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Hub with this certificate, which the environment names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("FGPU_HUB_URL", url)
        monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret")
        yield url
        server.shutdown()


def test_a_certificate_is_trusted_if_this_machine_trusts_it(
    hub: str, certificate: Path, monkeypatch: pytest.MonkeyPatch, fgpu: Fgpu
) -> None:
    status, out, _ = fgpu("list", "--json")
    assert status == 1
    assert json.loads(out)["error"] == {
        "code": "hub_untrusted",
        "field": None,
        "message": f"{hub}: its certificate is not trusted here: self-signed certificate; add its authority to this "
        "machine's certificates, or name a file with it in SSL_CERT_FILE",
    }
    # OpenSSL's own name for the file of the authorities that a machine trusts.
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert fgpu("list") == (0, "no sessions\n", "")
    monkeypatch.setenv("FGPU_HUB_URL", other := hub.replace("127.0.0.1", "localhost"))
    assert fgpu.failure("list") == (
        1,
        f"{other}: its certificate is not trusted here: Hostname mismatch, certificate is not valid for 'localhost'",
    )


def test_session_is_renamed_and_a_missing_amount_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, fgpu: Fgpu
) -> None:
    sent: list[tuple[object, ...]] = []

    def change(_api: ApiClient, *call: object) -> dict[str, object]:
        sent.append(call)
        return {"session": {"display_name": "try 2"}}

    monkeypatch.setattr(ApiClient, "change", change)
    monkeypatch.setenv("FGPU_HUB_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret")
    assert fgpu("rename", "12", "try 2") == (0, "session 12 is now try 2\n", "")
    status, line = fgpu.failure("grow", "12")
    assert (status, line[:19]) == (2, "name the new amount")
    assert sent == [("PATCH", "sessions/12", {"name": "try 2"})]


@pytest.mark.parametrize("command", ["run", "forecast"])
def test_variables_and_scripts_are_in_no_address(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fgpu: Fgpu
) -> None:
    asked: list[dict[str, object]] = []

    def call(_api: ApiClient, _method: str, path: str, **query: object) -> dict[str, object]:
        if path == "me":
            return {"user": "alice"}
        asked.append(query)
        raise CallFailed("stop", "that is all")

    monkeypatch.setattr(ApiClient, "service_call", call)
    monkeypatch.setenv("FGPU_HUB_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret")
    (tmp_path / "lines").write_text("WANDB_API_KEY=s3cret")
    own = ("--variables", f"@{tmp_path}/lines", "--script", "echo s3cret")
    assert fgpu.failure(command, "--fgpu", "1", *own) == (1, "that is all")
    (query,) = asked
    assert query.pop("count", "1") == "1"
    assert query == {"fgpu": "1"}
    status, line = fgpu.failure(command, "--variables", f"@{tmp_path}/none")
    assert (status, line) == (
        2,
        f"Invalid value for '--variables': '{tmp_path}/none' cannot be read: No such file or directory; "
        f"see fgpu {command} --help",
    )


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"basis": "no estimate yet", "expected_start_at_s": None}, "position 2, no estimate yet"),
        (
            {"basis": "time limits", "expected_start_at_s": 1_790_000_000},
            "position 2, expected start 2026-09-21 14:13:20Z, from time limits",
        ),
    ],
)
def test_forecast_says_the_position_and_when_it_starts(
    found: dict[str, object], line: str, monkeypatch: pytest.MonkeyPatch, fgpu: Fgpu
) -> None:
    said = {"refusals": [], "starts_now": False, "text": "all GPUs are busy", "largest_now": "0.5"}
    monkeypatch.setattr(ApiClient, "service_call", lambda *_, **__: said | {"position": 2} | found)
    monkeypatch.setenv("FGPU_HUB_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret")
    status, out, _ = fgpu("forecast", "--fgpu", "1")
    assert (status, out.splitlines()) == (0, ["all GPUs are busy", line, "0.5 fGPU would start now"])


def test_encrypted_key_is_checked_with_the_proxys_passphrase(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = str(certificate), certificate.with_name("key.pem")
    assert wrong_certificate(cert, cert) == ""
    locked = BestAvailableEncryption(b"secret")
    plain = load_pem_private_key(certificate.read_bytes(), None)
    key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    assert wrong_certificate(cert, str(key)).startswith(f"{cert} with {key}: ")
    monkeypatch.setenv("CONFIGPROXY_SSL_KEY_PASSPHRASE", "secret")
    assert wrong_certificate(cert, str(key)) == ""
    assert wrong_certificate(cert, f"{key}/inside") == f"{key}/inside: Not a directory"
