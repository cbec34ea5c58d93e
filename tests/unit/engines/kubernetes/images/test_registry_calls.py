"""What a registry is asked for, how it is logged in to, and what becomes of one that refuses, lies or breaks off."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fgpuspawner.engines.base import CannotSave
from fgpuspawner.engines.kubernetes.images import registry, saver
from fgpuspawner.engines.kubernetes.images.registry import (
    INDEXES,
    LAYERS,
    MANIFEST,
    Access,
    Name,
    Registries,
)

OCI = next(kind for kind in LAYERS if "oci" in kind)
PASSWORD = "pass-of-the-registry-42"


def digest(text: bytes) -> str:
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


class FakeRegistry:
    """As much of a registry as is asked, in memory: blobs and manifests by repository. It can be told to fail."""

    def __init__(
        self,
        *,
        token: bool = False,
        mounts: bool = True,
        deletes: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.uploads: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.scopes: list[str] = []
        self.fail: dict[str, int] = {}
        self.cut = False
        self._token, self._mounts, self._deletes = token, mounts, deletes

    async def __aenter__(self) -> FakeRegistry:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.host = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def add(self, repository: str, text: bytes) -> dict[str, Any]:
        """Take in a blob and describe it."""
        self.blobs[repository, digest(text)] = text
        return {"digest": digest(text), "size": len(text)}

    def add_image(self, repository: str, tag: str, kind: str = MANIFEST, **config: Any) -> str:
        """Take in an image of one layer and return its digest."""
        said = {
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": ["sha256:x"]},
        }
        own = {"mediaType": "config", **self.add(repository, json.dumps({**said, "config": config}).encode())}
        layer = {"mediaType": LAYERS.get(kind, ""), **self.add(repository, b"layer of " + tag.encode())}
        text = json.dumps({"mediaType": kind, "config": own, "layers": [layer]}).encode()
        return self.put(repository, tag, text, kind)

    def put(self, repository: str, tag: str, text: bytes, kind: str) -> str:
        """Take in a manifest and return its digest."""
        self.manifests[repository, tag] = self.manifests[repository, digest(text)] = text, kind
        return digest(text)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path_qs}")
        if request.path == "/token":
            self.scopes = request.query.getall("scope", [])
            secret = base64.b64encode(f"hub:{PASSWORD}".encode()).decode()
            if request.headers.get("Authorization") != f"Basic {secret}":
                return web.json_response({"errors": [{"message": "wrong password"}]}, status=401)
            return web.json_response({"token": "the-token"})
        if self._token and request.headers.get("Authorization") != "Bearer the-token":
            where = f'Bearer realm="http://{self.host}/token",service="test"'
            return web.Response(status=401, headers={"WWW-Authenticate": where})
        status = self.fail.get(request.method)
        if status is not None:
            return web.json_response(
                {"errors": [{"code": "DENIED", "message": "quota\nexceeded"}]}, status=status
            )
        path = request.path.removeprefix("/v2/")
        if "/manifests/" in path:
            return await self._manifest(request, *path.split("/manifests/"))
        return await self._blob(request, *path.split("/blobs/"))

    async def _manifest(self, request: web.Request, repository: str, which: str) -> web.Response:
        if request.method == "PUT":
            self.put(repository, which, await request.read(), request.content_type)
            return web.Response(status=201)
        found = self.manifests.get((repository, which))
        if found is None:
            return web.Response(status=404)
        if request.method == "DELETE":
            if self._deletes:
                del self.manifests[repository, which]
            return web.Response(status=202 if self._deletes else 405)
        headers = {"Docker-Content-Digest": digest(found[0]), "Content-Type": found[1]}
        return web.Response(body=found[0], headers=headers)

    async def _blob(self, request: web.Request, repository: str, rest: str) -> web.StreamResponse:
        where = {"Location": f"/v2/{repository}/blobs/uploads/one"}
        match request.method:
            case "POST":
                wanted = request.query.get("from", ""), request.query.get("mount", "")
                if self._mounts and wanted in self.blobs:
                    self.blobs[repository, wanted[1]] = self.blobs[wanted]
                    return web.Response(status=201)
                self.uploads["one"] = b""
                return web.Response(status=202, headers=where)
            case "PATCH":
                if self.cut:
                    assert request.transport is not None
                    request.transport.close()
                self.uploads["one"] += await request.read()
                return web.Response(status=202, headers=where)
            case "PUT":
                text = self.uploads.pop("one")
                if digest(text) != request.query["digest"]:
                    return web.json_response({"errors": [{"code": "DIGEST_INVALID"}]}, status=400)
                self.blobs[repository, digest(text)] = text
                return web.Response(status=201)
            case "DELETE":
                self.uploads.pop("one", None)
                return web.Response(status=204)
        found = self.blobs.get((repository, rest))
        return web.Response(status=404) if found is None else web.Response(body=found)


async def pieces(*content: bytes) -> AsyncIterator[bytes]:
    for piece in content:
        yield piece


def credentials(folder: Path, host: str, password: str = PASSWORD) -> str:
    """Write a file as `docker login` does."""
    auth = base64.b64encode(f"hub:{password}".encode()).decode()
    path = folder / "config.json"
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return str(path)


@pytest.mark.parametrize(
    ("reference", "host", "repository", "which"),
    [
        ("registry.example.org/fgpu/base:0.1", "registry.example.org", "fgpu/base", "0.1"),
        ("localhost/x", "localhost", "x", "latest"),
        ("host:5000/a/b@sha256:" + "0" * 64, "host:5000", "a/b", "sha256:" + "0" * 64),
        ("lab/torch:2", "docker.io", "lab/torch", "2"),
        ("debian", "docker.io", "library/debian", "latest"),
        ("debian:12", "docker.io", "library/debian", "12"),
        ("h.org/x:1@sha256:" + "0" * 64, "h.org", "x", "sha256:" + "0" * 64),
    ],
)
def test_references_are_read_as_everywhere(reference: str, host: str, repository: str, which: str) -> None:
    assert Name.read(reference) == Name(host, repository, which)


@pytest.mark.parametrize("given", ["", "fgpu/private", "host.org", "host.org/", "host.org/X", "host.org/a:1"])
def test_a_repository_has_a_host_and_no_tag(given: str) -> None:
    assert saver.target_of(given) is None
    assert saver.target_of("host.org:5000/fgpu/private") == Name("host.org:5000", "fgpu/private")


def test_only_what_is_here_or_is_said_to_be_goes_without_tls() -> None:
    access = Access(insecure=["10.0.0.5:5000"])
    found = [
        access.url_of(host) for host in ("h.org", "127.0.0.1:5", "localhost:5", "[::1]:5", "10.0.0.5:5000")
    ]
    assert [url.partition(":")[0] for url in found] == ["https", "http", "http", "http", "http"]
    assert access.url_of("10.0.0.5") == "https://10.0.0.5"
    assert access.url_of("127.0.0.1.evil.org").startswith("https:")


async def test_a_token_is_asked_for_with_the_password_and_nobody_else_gets_it(tmp_path: Path) -> None:
    async with FakeRegistry(token=True) as one, FakeRegistry() as other:
        access = Access(credentials(tmp_path, one.host))
        async with Registries(access, ["repository:a:pull,push", "repository:b:pull"]) as registries:
            await registries.upload(Name(one.host, "a"), pieces(b"abc"), lambda: digest(b"abc"))
            assert one.scopes == ["repository:a:pull,push", "repository:b:pull"]
            assert ("a", digest(b"abc")) in one.blobs
            assert registries._logins.keys() == {one.host}
            assert not await registries.has_blob(Name(other.host, "a"), digest(b"abc"))
            assert registries._logins.keys() == {one.host}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"auths": {"HOST": {"auth": "no base64"}}}', '{"auths": {"HOST": 5}}']
)
async def test_a_file_with_passwords_that_is_none_is_named_and_not_shown(tmp_path: Path, text: str) -> None:
    async with FakeRegistry(token=True) as one:
        path = tmp_path / "config.json"
        path.write_text(text.replace("HOST", one.host))
        async with Registries(Access(str(path)), []) as registries:
            with pytest.raises(CannotSave) as refused:
                await registries.manifest(Name(one.host, "a"))
    assert str(refused.value) == (
        "c.KubernetesFGPUSpawner.registry_credentials: the file is not as `docker login` writes it; ask an administrator"
    )


async def test_a_wrong_password_is_said_and_not_shown(tmp_path: Path) -> None:
    async with (
        FakeRegistry(token=True) as one,
        Registries(Access(credentials(tmp_path, one.host, "other-42")), []) as registries,
    ):
        with pytest.raises(CannotSave) as refused:
            await registries.manifest(Name(one.host, "a"))
    said = f"registry {one.host} refuses, HTTP 401: wrong password; ask an administrator"
    assert (str(refused.value), refused.value.may_pass) == (said, False)


@pytest.mark.parametrize(
    ("status", "passes"), [(403, False), (413, False), (429, True), (500, True), (503, True)]
)
async def test_a_registry_that_refuses_is_said_in_one_line(status: int, passes: bool) -> None:
    async with FakeRegistry() as one, Registries(Access(), []) as registries:
        one.fail = {"PATCH": status}
        with pytest.raises(CannotSave, match=f"HTTP {status}: quota exceeded") as refused:
            await registries.upload(Name(one.host, "a"), pieces(b"abc"), lambda: digest(b"abc"))
        assert refused.value.may_pass is passes
        assert "\n" not in str(refused.value)
        # What was begun is taken back.
        assert one.asked[-1].startswith("DELETE /v2/a/blobs/uploads/")
        assert not one.blobs


async def test_a_connection_that_is_cut_midway_leaves_nothing() -> None:
    async with FakeRegistry() as one, Registries(Access(), []) as registries:
        one.cut = True
        with pytest.raises(CannotSave, match=f"registry {one.host} broke off: ") as refused:
            await registries.upload(Name(one.host, "a"), pieces(*[b"x" * 2**16] * 400), lambda: "none")
        assert refused.value.may_pass
        assert not one.blobs


async def test_a_registry_that_is_not_there_or_speaks_no_tls_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeRegistry() as one, Registries(Access(), []) as registries:
        name = Name(one.host, "a")
        monkeypatch.setattr(Access, "url_of", lambda self, host: f"https://{host}")
        with pytest.raises(CannotSave, match=f"registry {one.host} does not speak TLS; ask an administrator"):
            await registries.manifest(name)
    monkeypatch.undo()
    async with Registries(Access(), []) as registries:
        with pytest.raises(CannotSave, match=f"registry {one.host} cannot be reached") as refused:
            await registries.manifest(name)
    assert refused.value.may_pass


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of nobody's but this machine's, with its key in one file."""
    key, own = tmp_path / "key", tmp_path / "crt"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(own)]
    subprocess.run(["openssl", *words, *more], check=True, capture_output=True)
    own.write_text(own.read_text() + key.read_text())
    return own


async def test_a_certificate_is_looked_at(certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with FakeRegistry(tls=context) as one:
        name = Name(one.host, "a")
        one.add_image("a", "latest")
        with pytest.MonkeyPatch.context() as patch:
            # Of a registry that is elsewhere TLS is asked for.
            patch.setattr(registry, "_is_loopback", lambda host: False)
            async with Registries(Access(), []) as registries:
                with pytest.raises(CannotSave, match="has a certificate that is not trusted"):
                    await registries.manifest(name)
            async with Registries(Access(ca_file=str(certificate)), []) as registries:
                assert (await registries.manifest(name))[2] == MANIFEST


async def test_what_fails_while_it_is_read_is_raised_as_it_is() -> None:
    async def failing() -> AsyncIterator[bytes]:
        yield b"x"
        raise CannotSave("the session ended")

    async with FakeRegistry() as one, Registries(Access(), []) as registries:
        with pytest.raises(CannotSave, match="the session ended"):
            await registries.upload(Name(one.host, "a"), failing(), lambda: "none")
        assert not one.blobs


async def base_of(
    one: FakeRegistry, reference: str, running: str = "x@y", architecture: str = "amd64"
) -> Any:
    async with Registries(Access(), []) as registries:
        return await saver._base_of(registries, Name.read(f"{one.host}/{reference}"), running, architecture)


@pytest.mark.parametrize("kind", LAYERS)
async def test_a_layer_is_added_in_the_manifests_own_kind(kind: str) -> None:
    async with FakeRegistry() as one:
        one.add_image("lab/torch", "1", kind, Env=["A=1"])
        base = await base_of(one, "lab/torch:1")
    found = json.loads(saver.manifest_of(base, config=("c", 1), layer=("l", 2)))
    assert found["mediaType"] == kind
    assert found["layers"][-1] == {"mediaType": LAYERS[kind], "digest": "l", "size": 2}
    assert found["layers"][:-1] == base.layers


@pytest.mark.parametrize("index", INDEXES)
async def test_of_several_platforms_the_nodes_is_chosen(index: str) -> None:
    async with FakeRegistry() as one:
        arm, amd = (one.add_image("lab/torch", tag, OCI, Env=[tag]) for tag in ("arm64", "amd64"))
        platforms = [(arm, "arm64"), (amd, "amd64"), (amd, "unknown")]
        listed = [{"digest": d, "platform": {"os": "linux", "architecture": a}} for d, a in platforms]
        one.put("lab/torch", "all", json.dumps({"mediaType": index, "manifests": listed}).encode(), index)
        base = await base_of(one, "lab/torch:all", architecture="arm64")
        assert base.name.which == arm
        with pytest.raises(CannotSave, match="no image for s390x machines"):
            await base_of(one, "lab/torch:all", architecture="s390x")


async def test_an_image_that_its_registry_has_otherwise_is_refused() -> None:
    async with FakeRegistry() as one:
        one.add_image("lab/torch", "1")
        with pytest.raises(CannotSave, match="the session runs another image than"):
            await base_of(one, "lab/torch:1", running=digest(b"another"))
        one.manifests["lab/torch", digest(b"wanted")] = b"{}", MANIFEST
        with pytest.raises(CannotSave, match="gives something else than"):
            await base_of(one, f"lab/torch@{digest(b'wanted')}")
        for text, kind in (
            (b"[]", MANIFEST),
            (b"{}", MANIFEST),
            (b'{"layers": 5}', OCI),
            (b"{}", "text/html"),
        ):
            one.put("lab/torch", "2", text, kind)
            with pytest.raises(CannotSave):
                await base_of(one, "lab/torch:2")


async def test_a_layer_is_taken_over_where_it_is_and_copied_from_elsewhere() -> None:
    async with FakeRegistry() as one, FakeRegistry() as other, Registries(Access(), []) as registries:
        target = Name(one.host, "private")
        near, far = one.add("lab/torch", b"near"), other.add("lab/torch", b"far" * 10**6)
        await saver._have(registries, target, Name(one.host, "lab/torch"), near)
        assert not [asked for asked in one.asked if asked.startswith("PATCH")]
        await saver._have(registries, target, Name(other.host, "lab/torch"), far)
        assert one.blobs["private", far["digest"]] == b"far" * 10**6
        before = len(one.asked)
        await saver._have(registries, target, Name(other.host, "lab/torch"), far)
        assert [asked.partition(" ")[0] for asked in one.asked[before:]] == ["HEAD"]
        elsewhere = {"digest": digest(b"foreign"), "urls": ["https://elsewhere.example"]}
        await saver._have(registries, target, Name(other.host, "lab/torch"), elsewhere)
        assert len(one.asked) == before + 1


async def test_a_layer_that_is_not_taken_over_is_copied() -> None:
    async with FakeRegistry(mounts=False) as one, Registries(Access(), []) as registries:
        near = one.add("lab/torch", b"near")
        await saver._have(registries, Name(one.host, "private"), Name(one.host, "lab/torch"), near)
        assert one.blobs["private", near["digest"]] == b"near"


async def test_a_registry_that_gives_another_blob_is_not_believed() -> None:
    async with FakeRegistry() as one, FakeRegistry() as other, Registries(Access(), []) as registries:
        other.blobs["lab/torch", digest(b"wanted")] = b"another"
        with pytest.raises(CannotSave):
            await registries.blob(Name(other.host, "lab/torch"), digest(b"wanted"))
        layer = {"digest": digest(b"wanted")}
        with pytest.raises(CannotSave):
            await saver._have(registries, Name(one.host, "private"), Name(other.host, "lab/torch"), layer)
        assert not one.blobs


async def test_a_registry_that_deletes_nothing_says_so() -> None:
    for deletes in (True, False):
        async with FakeRegistry(deletes=deletes) as one, Registries(Access(), []) as registries:
            name = Name(one.host, "private", one.add_image("private", "1"))
            assert await registries.delete(name) is deletes
            # One that is gone is no trouble.
            assert await registries.delete(name) is deletes or not deletes


def test_the_configuration_is_the_images_and_has_only_labels_that_hold_for_it() -> None:
    base = {
        "architecture": "arm64",
        "os": "linux",
        "variant": "v8",
        "container_config": {"Env": ["old=1"]},
        "config": {"Env": ["A=1"], "Labels": {"fgpu.slug": "torch", "fgpu.handover": "1"}},
        "rootfs": {"type": "layers", "diff_ids": ["one"]},
        "history": [{"created_by": "x"}],
    }
    found = json.loads(saver.configuration(base, "two", labels={"fgpu.private": "1"}, made_at_s=0))
    assert found["config"] == {"Env": ["A=1"], "Labels": {"fgpu.handover": "1", "fgpu.private": "1"}}
    assert found["rootfs"]["diff_ids"] == ["one", "two"]
    assert (found["variant"], len(found["history"])) == ("v8", 2)
    assert "container_config" not in found


def test_the_pod_beside_a_sessions_has_neither_volumes_nor_secrets_nor_a_gpu() -> None:
    pod = {
        "metadata": {
            "name": "fgpu-x-1-1",
            "labels": {"component": "singleuser-server", "fgpu.installation": "x"},
        },
        "spec": {
            "nodeName": "gpu1",
            "volumes": [{"name": "home"}],
            "serviceAccountName": "hub",
            "securityContext": {"fsGroup": 1000},
            "tolerations": [{"key": "nvidia.com/gpu"}],
            "runtimeClassName": "kata",
            "containers": [
                {
                    "name": "notebook",
                    "image": "h.org/lab/torch:1",
                    "env": [{"name": "HOME", "value": "/home/x"}, {"name": "LD_PRELOAD", "value": "y"}],
                    "envFrom": [{"secretRef": {"name": "s"}}],
                    "volumeMounts": [{"name": "home", "mountPath": "/home/x"}],
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                    "securityContext": {"runAsUser": 1000},
                }
            ],
        },
        "status": {
            "containerStatuses": [{"name": "notebook", "imageID": "h.org/lab/torch@sha256:" + "1" * 64}]
        },
    }
    found = saver.helper_pod("fgpu-x-save-1", pod)
    (container,) = found["spec"]["containers"]
    assert container["image"] == "h.org/lab/torch@sha256:" + "1" * 64
    assert container["env"] == [
        {"name": "HOME", "value": "/home/x"},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
    ]
    assert found["metadata"]["labels"] == {"component": "singleuser-server", "fgpu.save": "true"}
    assert found["spec"]["runtimeClassName"] == "kata"
    assert container["securityContext"] == {"runAsUser": 1000}
    assert container["command"][0] == "/bin/sh"
    assert not {"envFrom", "volumeMounts"} & container.keys()
    assert found["spec"]["automountServiceAccountToken"] is False
    assert not {"volumes", "serviceAccountName"} & found["spec"].keys()
    assert "nvidia.com/gpu" not in json.dumps(container)


@pytest.mark.parametrize(
    ("context", "may"),
    [
        (None, True),
        ({}, True),
        ({"allowPrivilegeEscalation": True}, True),
        ({"allowPrivilegeEscalation": False}, False),
        ({"allowPrivilegeEscalation": False, "privileged": True}, True),
    ],
    ids=str,
)
def test_who_may_become_root_is_known_by_what_the_pod_says_and_else_everybody(
    context: dict[str, bool] | None, may: bool
) -> None:
    assert saver.may_become_root({"securityContext": context}) is may
