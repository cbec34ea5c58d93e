"""A container registry, over its HTTP API (version 2): as much of it as adding a layer to an image takes."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import ipaddress
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from fgpuspawner.engines.base import CannotSave

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
LAYERS = {
    MANIFEST: "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.oci.image.manifest.v1+json": "application/vnd.oci.image.layer.v1.tar+gzip",
}
"""The kinds of manifests that a layer can be added to, with the layer's own kind."""
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
MOST_JSON = 8 * 2**20
MOST_WORDS = 200
PIECE_BYTES = 2**18
PATIENCE = aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=120)
"""A registry may take long to look at all that it was sent; a connection that says nothing for longer is dead."""
TOO_MANY = 429
NO_ANSWER = (aiohttp.ClientError, OSError, TimeoutError)
DOCKER_HUB = "docker.io"


@dataclass(frozen=True, slots=True)
class Name:
    """What a reference names: a repository of a registry's, and of that a tag or a digest."""

    host: str
    repository: str
    which: str = "latest"

    @classmethod
    def read(cls, reference: str) -> Name:
        """Return what a reference says. One without a host is of Docker Hub, as everywhere."""
        rest, _, digest = reference.partition("@")
        host, slash, path = rest.partition("/")
        if not slash or not (set(".:") & set(host) or host == "localhost"):
            host, path = DOCKER_HUB, rest if slash else f"library/{rest}"
        path, _, tag = path.partition(":")
        return cls(host, path, digest or tag or "latest")

    def at(self, which: str) -> Name:
        """Return another tag or digest of the same repository."""
        return Name(self.host, self.repository, which)

    def __str__(self) -> str:
        """Return it as a reference."""
        return f"{self.host}/{self.repository}{'@' if DIGEST.fullmatch(self.which) else ':'}{self.which}"


@dataclass(frozen=True, slots=True)
class Access:
    """How registries are reached. ``credentials`` is a file as `docker login` writes it, read anew each time."""

    credentials: str = ""
    ca_file: str = ""
    insecure: Collection[str] = ()

    def secret_of(self, host: str) -> str | None:
        """Return what goes into the header of a request that logs in; None where nothing is known for this registry.

        Raises:
            CannotSave: the file cannot be read.
        """
        if not self.credentials:
            return None
        setting = "c.KubernetesFGPUSpawner.registry_credentials"
        try:
            known = json.loads(Path(self.credentials).read_text())["auths"]
            found = next((known[name] for name in _names_of(host) if name in known), None)
            if found is None:
                return None
            if not found.get("auth"):
                return base64.b64encode(f"{found['username']}:{found['password']}".encode()).decode()
            base64.b64decode(found["auth"], validate=True)
            return str(found["auth"])
        except OSError as e:
            raise CannotSave(f"{setting}: the file cannot be read: {e.strerror}; ask an administrator") from e
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error):
            # Not a word of what is in it.
            raise CannotSave(
                f"{setting}: the file is not as `docker login` writes it; ask an administrator"
            ) from None

    def url_of(self, host: str) -> str:
        """Return where a registry's API is."""
        plain = host in self.insecure or _is_loopback(host)
        return f"{'http' if plain else 'https'}://{'registry-1.docker.io' if host == DOCKER_HUB else host}"

    def tls(self) -> ssl.SSLContext:
        """Return whom is trusted.

        Raises:
            CannotSave: the file cannot be read.
        """
        try:
            return ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as e:
            raise CannotSave(
                f"c.KubernetesFGPUSpawner.registry_ca_file: it cannot be read: {e.strerror or e}; ask an administrator"
            ) from e


def _names_of(host: str) -> list[str]:
    hub = ["https://index.docker.io/v1/", "index.docker.io", DOCKER_HUB] if host == DOCKER_HUB else []
    return [host, f"https://{host}", f"https://{host}/", f"http://{host}", f"https://{host}/v2/", *hub]


def _is_loopback(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(slots=True)
class Registries:
    """Connections to registries; `aclose` ends them. What fails is `CannotSave`, with words for the session's owner."""

    access: Access
    scopes: Collection[str]
    """What is asked for where a registry gives out tokens: ``repository:NAME:pull,push``."""
    _http: aiohttp.ClientSession | None = None
    _logins: dict[str, str] = field(default_factory=dict, repr=False)

    async def __aenter__(self) -> Registries:
        """Connect when something is asked for."""
        connector = aiohttp.TCPConnector(ssl=self.access.tls())
        self._http = aiohttp.ClientSession(connector=connector, timeout=PATIENCE, auto_decompress=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let go of all connections."""
        assert self._http is not None
        await self._http.close()

    # -- what is asked --------------------------------------------------------------------------------

    async def manifest(self, name: Name) -> tuple[str, dict[str, Any], str]:
        """Return the digest, the content and the kind of a manifest."""
        accept = ", ".join((*LAYERS, *INDEXES))
        async with self._asked("GET", name, f"manifests/{name.which}", headers={"Accept": accept}) as answer:
            text = await _whole(answer, name)
            kind = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        digest = _digest(text)
        if DIGEST.fullmatch(name.which) and digest != name.which:
            raise CannotSave(f"registry {name.host} gives something else than {name}")
        found = _read(text, name)
        return digest, found, str(found.get("mediaType") or kind)

    async def blob(self, name: Name, digest: str) -> bytes:
        """Return a small blob, such as a configuration."""
        async with self._asked("GET", name, f"blobs/{digest}") as answer:
            text = await _whole(answer, name)
        if _digest(text) != digest:
            raise CannotSave(f"registry {name.host} gives something else than {digest}")
        return text

    async def has_blob(self, name: Name, digest: str) -> bool:
        """Return whether a repository has a blob."""
        async with self._asked("HEAD", name, f"blobs/{digest}", bears=(404,)) as answer:
            return answer.status != 404

    async def mount(self, name: Name, digest: str, source: Name) -> bool:
        """Take over a blob from another repository of the same registry; return whether it did."""
        query = {"mount": digest, "from": source.repository}
        async with self._asked("POST", name, "blobs/uploads/", params=query) as answer:
            if answer.status == 201:
                return True
            location = self._location(answer, name)
        await self._abandon(name, location)
        return False

    async def copy(self, name: Name, digest: str, source: Name) -> None:
        """Copy a blob from one registry to another, as it comes."""

        async def pieces() -> AsyncIterator[bytes]:
            async with self._asked("GET", source, f"blobs/{digest}") as answer:
                async for piece in answer.content.iter_chunked(PIECE_BYTES):
                    yield piece

        await self.upload(name, pieces(), lambda: digest)

    async def upload(self, name: Name, pieces: AsyncIterator[bytes], digest: Callable[[], str]) -> None:
        """Upload a blob; ``digest`` is asked for once all of it was sent. What ``pieces`` raises is raised."""
        async with self._asked("POST", name, "blobs/uploads/") as answer:
            location = self._location(answer, name)
        failed: list[Exception] = []

        async def guarded() -> AsyncIterator[bytes]:
            try:
                async for piece in pieces:
                    if piece:
                        yield piece
            except Exception as e:
                failed.append(e)
                raise

        kind = {"Content-Type": "application/octet-stream"}
        try:
            async with self._asked("PATCH", name, location, data=guarded(), headers=kind) as answer:
                location = self._location(answer, name)
            async with self._asked("PUT", name, location, params={"digest": digest()}, headers=kind):
                pass
        except BaseException:
            await self._abandon(name, location)
            if failed:
                raise failed[0] from None
            raise

    async def put(self, name: Name, manifest: bytes, kind: str) -> None:
        """Put a manifest under a tag."""
        headers = {"Content-Type": kind}
        async with self._asked("PUT", name, f"manifests/{name.which}", data=manifest, headers=headers):
            pass

    async def digest_of(self, name: Name) -> str | None:
        """Return the digest of what a tag leads to; None where it leads nowhere."""
        headers = {"Accept": ", ".join(LAYERS)}
        path = f"manifests/{name.which}"
        async with self._asked("HEAD", name, path, headers=headers, bears=(404,)) as answer:
            found = answer.headers.get("Docker-Content-Digest", "")
            return found if answer.status != 404 and DIGEST.fullmatch(found) else None

    async def delete(self, name: Name) -> bool:
        """Delete a manifest by its digest; return whether the registry deletes any at all."""
        async with self._asked("DELETE", name, f"manifests/{name.which}", bears=(404, 405)) as answer:
            return answer.status != 405

    # -- how it is asked ------------------------------------------------------------------------------

    def _location(self, answer: aiohttp.ClientResponse, name: Name) -> str:
        """Return where an upload goes on."""
        return urljoin(str(answer.url), answer.headers.get("Location", ""))

    async def _abandon(self, name: Name, location: str) -> None:
        """Have a registry forget what was sent; it does so by itself in time."""
        with contextlib.suppress(CannotSave):
            async with self._asked("DELETE", name, location):
                pass

    @contextlib.asynccontextmanager
    async def _asked(
        self,
        method: str,
        name: Name,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        data: Any = None,
        bears: Collection[int] = (),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Give the answer to a request. It logs in where it is asked to.

        Raises:
            CannotSave: the registry does not answer, or refuses, other than with a status of ``bears``.
        """
        assert self._http is not None
        base = f"{self.access.url_of(name.host)}/v2/"
        url = urljoin(f"{base}{name.repository}/", path)
        own = urlsplit(url)[:2] == urlsplit(base)[:2]
        try:
            for attempt in range(2):
                login = (
                    {"Authorization": self._logins[name.host]} if own and name.host in self._logins else {}
                )
                async with self._http.request(
                    method,
                    url,
                    headers={**(headers or {}), **login},
                    params=params,
                    data=data,
                    # What is uploaded goes where the registry has said, and nowhere else.
                    allow_redirects=method in ("GET", "HEAD"),
                ) as answer:
                    again = answer.status == 401 and own and not attempt and isinstance(data, bytes | None)
                    if again and await self._log_in(name.host, answer.headers.getall("WWW-Authenticate", [])):
                        continue
                    if answer.status >= 300 and answer.status not in bears:
                        raise await _refusal(answer, name.host)
                    yield answer
                    return
        except NO_ANSWER as e:
            raise CannotSave(f"registry {name.host} {_trouble(e)}", may_pass=True) from e

    async def _log_in(self, host: str, challenges: list[str]) -> bool:
        """Log in as a registry asks for it; return whether that is possible, and was not done before."""
        secret = self.access.secret_of(host)
        for challenge in challenges:
            kind, _, rest = challenge.partition(" ")
            said = dict(re.findall(r'(\w+)="([^"]*)"', rest))
            if kind.lower() == "basic" and secret is not None:
                login = f"Basic {secret}"
            elif kind.lower() == "bearer" and self._is_trusted(host, said.get("realm", "")):
                login = f"Bearer {await self._token(host, said, secret)}"
            else:
                continue
            if self._logins.get(host) != login:
                self._logins[host] = login
                return True
        return False

    def _is_trusted(self, host: str, realm: str) -> bool:
        """Return whether a password may be sent there: over TLS, or in plain text where the registry itself is."""
        found = urlsplit(realm)
        return found.scheme == "https" or (
            found.scheme == "http" and (found.netloc in self.access.insecure or _is_loopback(found.netloc))
        )

    async def _token(self, host: str, said: Mapping[str, str], secret: str | None) -> str:
        assert self._http is not None
        query = [("service", said.get("service", "")), *(("scope", scope) for scope in self.scopes)]
        login = {"Authorization": f"Basic {secret}"} if secret is not None else {}
        async with self._http.get(
            said["realm"], params=query, headers=login, allow_redirects=False
        ) as answer:
            if answer.status != 200:
                raise await _refusal(answer, host)
            found = _read(await _whole(answer, Name(host, "")), Name(host, ""))
        return str(found.get("token") or found.get("access_token") or "")


def _trouble(e: Exception) -> str:
    """Return what is wrong with a connection."""
    match e:
        case aiohttp.ClientConnectorCertificateError():
            return "has a certificate that is not trusted; ask an administrator (registry_ca_file)"
        case aiohttp.ClientSSLError():
            return "does not speak TLS; ask an administrator (insecure_registries)"
        case aiohttp.ClientConnectorError():
            return "cannot be reached"
        case TimeoutError():
            return "does not answer in time"
        case _:
            return f"broke off: {' '.join(str(e).split())[:MOST_WORDS] or type(e).__name__}"


async def _whole(answer: aiohttp.ClientResponse, name: Name) -> bytes:
    text = bytearray()
    async for piece in answer.content.iter_chunked(PIECE_BYTES):
        text += piece
        if len(text) > MOST_JSON:
            raise CannotSave(f"registry {name.host} gives more than {MOST_JSON >> 20} MiB for {name}")
    return bytes(text)


def _read(text: bytes, name: Name) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CannotSave(f"registry {name.host} gives what is no image for {name}")
    return found


async def _refusal(answer: aiohttp.ClientResponse, host: str) -> CannotSave:
    """Return what a registry says that refuses."""
    words = ""
    with contextlib.suppress(CannotSave, ValueError, KeyError, IndexError, TypeError, RecursionError):
        error = json.loads(await _whole(answer, Name(host, "")))["errors"][0]
        words = f": {error.get('message') or error.get('code')}"
    shown = "".join(c if c.isprintable() else " " for c in words)[:MOST_WORDS]
    passes = answer.status >= 500 or answer.status == TOO_MANY
    asked = "; ask an administrator" if answer.status in (401, 403) else ""
    return CannotSave(f"registry {host} refuses, HTTP {answer.status}{shown}{asked}", may_pass=passes)


def _digest(text: bytes) -> str:
    return f"sha256:{hashlib.sha256(text).hexdigest()}"
