"""Sessions in pods that become images of a registry: what is in them, what is sent, what a registry does that fails."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from dockerhub import entry
from hubs import NAMESPACE, SMALL, Cluster, on

from fgpu_scheduler import ImageQuota, ImageState, PrivateImage, PrivateImages, Store
from hubprocess import HubProcess, free_ports, until

BASE = "docker.io/fgpuspawner/base:0.1"
USER, PASSWORD = "hub", "pass-of-the-registry-0123456789"
HASHED = "$2b$04$1Un7Uyq0C3/aHvW7lV7hFOSWCI9DKBjiALRJAzy1jONnCwmw4uBuS"
"""What the registry keeps of it."""
SITE = "/opt/env/lib/python3.11/site-packages"
SECRET = "secret-of-the-lab-0123456789"
ASKED = {"fgpu": "0.5", **SMALL}
CHANGE = f"""
import os, pathlib, shutil
site = pathlib.Path("{SITE}")
(site / "my_pkg.py").write_text("answer = 42")
(site / "my_pkg-1.0.dist-info").mkdir()
(site / "my_pkg-1.0.dist-info" / "METADATA").write_text("Name: my-pkg")
os.symlink("my_pkg.py", site / "link.py")
os.link(site / "my_pkg.py", site / "other.py")
(site / "my_pkg.py").chmod(0o640)
shutil.rmtree(site / "pip")
os.remove("/opt/env/bin/pip3")
for name in ("sh", "sleep", "sudo"):
    path = pathlib.Path("/opt/env/bin", name)
    path.write_text("#!/bin/sh\\nexit 9\\n")
    path.chmod(0o755)
(site / "wide\\udcff").write_bytes(b"w" * 300_000)
with open(site / "sparse", "wb") as file:
    file.truncate(3 << 20)
pathlib.Path.home().joinpath("notes").write_text("only-in-the-home-9876543210")
pathlib.Path("/tmp/left").write_text("left")
pathlib.Path("/var/tmp/left").write_text("left")
print("done")
"""
LOOK = f"""
import json, os, pathlib, stat
site = pathlib.Path("{SITE}")
home = pathlib.Path.home()
print(json.dumps([
    (site / "my_pkg.py").read_text(),
    oct(os.stat(site / "my_pkg.py").st_mode),
    [os.stat(site / "my_pkg.py").st_uid, os.stat(site / "my_pkg.py").st_gid],
    os.readlink(site / "link.py"),
    os.stat(site / "my_pkg.py").st_ino == os.stat(site / "other.py").st_ino,
    os.path.exists(site / "pip"),
    os.path.exists("/opt/env/bin/pip3"),
    len((site / "wide\\udcff").read_bytes()),
    os.path.getsize(site / "sparse"),
    [os.path.exists(path) for path in (home / "notes", "/tmp/left", "/var/tmp/left")],
]))
"""


class Registry:
    """Debian's docker-registry with a password, at the node's address; the node is told that it has no TLS."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.host = f"{cluster.address}:{free_ports(1)}"
        self.repository = f"{self.host}/fgpu/private"
        self._log, self._folder = folder / "log", folder
        passwords = folder / "passwords"
        passwords.write_text(f"{USER}:{HASHED}\n")
        known = {"auths": {self.host: {"auth": base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()}}}
        self.credentials = folder / "config.json"
        self.credentials.write_text(json.dumps(known))
        self._cluster = cluster
        self.named = Path(cluster.kubeconfig).parent / "registries" / self.host
        self.named.mkdir()
        (self.named / "hosts.toml").write_text(
            f'server = "http://{self.host}"\n[host."http://{self.host}"]\n'
        )
        self.secret = "registry"
        body = {
            "metadata": {"name": self.secret},
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": self.credentials.read_text()},
        }
        cluster.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/secrets", body=body)
        self.start()
        self._push(BASE, f"{self.host}/fgpu/base:1")
        self.base = f"{self.host}/fgpu/base:1"

    def start(self, **more: Any) -> None:
        """Answer."""
        config = {
            "version": 0.1,
            "log": {"level": "info"},
            "storage": {
                "filesystem": {"rootdirectory": str(self._folder / "blobs")},
                "delete": {"enabled": True},
                **more,
            },
            "http": {"addr": self.host},
            "auth": {"htpasswd": {"realm": "test", "path": str(self._folder / "passwords")}},
        }
        path = self._folder / "config.yml"
        path.write_text(json.dumps(config))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["docker-registry", "serve", str(path)], stdout=log, stderr=subprocess.STDOUT
            )
        until(self._answers, what="the registry answers")

    def stop(self) -> None:
        """Answer nobody any more."""
        self._process.terminate()
        self._process.wait(30)

    def close(self) -> None:
        """Be gone, with all that it needed."""
        self.stop()
        shutil.rmtree(self.named)
        self._cluster.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/secrets/{self.secret}")

    def _answers(self) -> bool:
        try:
            return self.get("").status_code == 200
        except requests.ConnectionError:
            return False

    def get(self, path: str, method: str = "GET", **more: Any) -> requests.Response:
        """Ask it."""
        return requests.request(
            method, f"http://{self.host}/v2/{path}", auth=(USER, PASSWORD), timeout=60, **more
        )

    def log(self) -> str:
        """Return what it says of who asked for what."""
        return self._log.read_text()

    def manifest(self, name: str, which: str) -> dict[str, Any]:
        """Return a manifest."""
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        answer = self.get(f"{name}/manifests/{which}", headers={"Accept": kind})
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def blob(self, name: str, digest: str) -> bytes:
        """Return a blob."""
        answer = self.get(f"{name}/blobs/{digest}")
        answer.raise_for_status()
        return answer.content

    def _push(self, image: str, reference: str) -> None:
        socket = Path(self._cluster.kubeconfig).parent / "containerd.sock"
        ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io", "images"]
        subprocess.run([*ctr, "tag", "--force", image, reference], check=True, capture_output=True)
        push = [*ctr, "push", "--plain-http", "--user", f"{USER}:{PASSWORD}", reference]
        subprocess.run(push, check=True, capture_output=True, timeout=300)
        # So that the node fetches it as it would on any other.
        subprocess.run([*ctr, "rm", reference], check=True, capture_output=True)


@pytest.fixture(scope="module")
def registry(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A real registry. Without one the tests that need it are skipped; in CI that is a failure."""
    if shutil.which("docker-registry") is None:
        reason = "no docker-registry; tests/kube/cluster.sh installs it"
        pytest.skip(reason)
    found = Registry(tmp_path_factory.mktemp("registry"), cluster)
    yield found
    found.close()


@pytest.fixture(scope="module")
def hub(
    cluster: Cluster, registry: Registry, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HubProcess]:
    """A Hub whose sessions can be saved, with two of its users' sessions."""
    folder = tmp_path_factory.mktemp("hub")
    path = folder / "catalogue.toml"
    path.write_text(entry("python", registry.base))
    before = f"""
c.KubernetesFGPUSpawner.private_registry = {registry.repository!r}
c.KubernetesFGPUSpawner.registry_credentials = {str(registry.credentials)!r}
c.KubernetesFGPUSpawner.insecure_registries = [{registry.host!r}]
c.KubernetesFGPUSpawner.image_pull_secrets = [{registry.secret!r}]
c.Spawner.environment = {{"LAB_SECRET": {SECRET!r}}}
"""
    more = {"catalogue": str(path), "max_private_images": 5, "max_private_images_mib": 100}
    with on(cluster, folder, before=before, owners_may_commit=True, **more) as found:
        for user in ("ann", "ben"):
            found.add_user(user)
        assert found.spawn("ann", options={**ASKED, "image": "python"}).status_code in (201, 202)
        found.reach({"ann/": "RUNNING"}, within_s=180)
        yield found


@pytest.fixture(scope="module")
def images(hub: HubProcess) -> Iterator[PrivateImages]:
    """The store, written as the service does."""
    store = Store(f"sqlite:///{hub.data / 'fgpu.sqlite'}")
    store.connect()
    yield PrivateImages(store)
    store.close()


def pod_of(hub: HubProcess, cluster: Cluster, user: str) -> str:
    """Return the name of the one pod of a user's."""
    (name,) = [n for n, p in cluster.pods(hub).items() if p["metadata"]["annotations"]["fgpu.user"] == user]
    return name


def saved(hub: HubProcess, images: PrivateImages, name: str, user: str = "ann") -> PrivateImage:
    """Save a user's session and return what became of it."""
    (session,) = [s for s in hub.store.snapshot(0).sessions if s.request.user == user]
    wished = images.wish(session.id, name=name, asked_by=user, quota=ImageQuota(), now_s=1)
    making = (ImageState.WISHED, ImageState.COMMITTING)
    until(lambda: images.get(wished.id).state not in making, within_s=180, what=f"{name} is made")
    return images.get(wished.id)


@pytest.fixture(scope="module")
def image(hub: HubProcess, images: PrivateImages, cluster: Cluster) -> PrivateImage:
    """Ann's session, in which she has changed something, as an image."""
    assert cluster.run(pod_of(hub, cluster, "ann"), CHANGE).strip() == b"done"
    found = saved(hub, images, "more")
    assert found.state is ImageState.READY, f"{found.message}\n{hub.log_text()[-3000:]}"
    return found


def test_a_session_of_the_image_has_what_was_changed_and_not_what_was_deleted_or_at_home(
    hub: HubProcess, cluster: Cluster, image: PrivateImage
) -> None:
    until(lambda: f" is saved as {image.name}, " in hub.log_text(), what="it is offered")
    hub.stop("ann")
    hub.reach({})
    assert hub.spawn("ann", options={**ASKED, "image": image.name}).status_code in (201, 202)
    hub.reach({"ann/": "RUNNING"}, within_s=180)
    assert json.loads(cluster.run(pod_of(hub, cluster, "ann"), LOOK)) == [
        "answer = 42",
        "0o100640",
        [1000, 1000],
        "my_pkg.py",
        True,
        False,
        False,
        300_000,
        3 << 20,
        [False, False, False],
    ]


def test_one_layer_is_sent_and_the_others_are_taken_over(registry: Registry, image: PrivateImage) -> None:
    base, made = registry.manifest("fgpu/base", "1"), registry.manifest("fgpu/private", str(image.image_id))
    assert made["layers"][:-1] == base["layers"]
    assert made["layers"][-1]["size"] < 100_000
    below = base["layers"][0]["digest"]
    assert re.search(
        rf"POST /v2/fgpu/private/blobs/uploads/\?[^ ]*{re.escape(below.replace(':', '%3A'))}|"
        rf"POST /v2/fgpu/private/blobs/uploads/\?[^ ]*{re.escape(below)}",
        registry.log(),
    )
    assert len(re.findall(r'"PATCH /v2/fgpu/private/', registry.log())) == 2
    (image_config,) = [json.loads(registry.blob("fgpu/private", made["config"]["digest"]))]
    assert image_config["config"]["Labels"]["fgpu.private.owner"] == "ann"
    with tarfile.open(fileobj=io.BytesIO(registry.blob("fgpu/private", made["layers"][-1]["digest"]))) as tar:
        members = {member.name: member for member in tar}
    assert all(name.startswith("opt/env/") for name in members), sorted(members)[:20]
    assert {"opt/env/bin/.wh.pip3", f"{SITE[1:]}/.wh.pip"} <= members.keys()
    assert {member.uid for name, member in members.items() if ".wh." not in name} == {1000}


def test_neither_token_nor_password_is_anywhere(
    hub: HubProcess, registry: Registry, image: PrivateImage
) -> None:
    made = registry.manifest("fgpu/private", str(image.image_id))
    config = registry.blob("fgpu/private", made["config"]["digest"])
    layer = registry.blob("fgpu/private", made["layers"][-1]["digest"])
    whole = config + unpacked(layer)
    for secret in (SECRET, PASSWORD, "JUPYTERHUB_API_TOKEN", "only-in-the-home"):
        assert secret.encode() not in whole
    assert PASSWORD not in hub.log_text()
    assert base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode() not in hub.log_text()


def unpacked(packed: bytes) -> bytes:
    """Return a layer as a tar."""
    return gzip.decompress(packed)


def test_the_recipe_names_what_was_installed(images: PrivateImages, image: PrivateImage) -> None:
    recipe = images.recipe(image.id) or ""
    assert "'my-pkg==1.0'" in recipe
    assert recipe.startswith("FROM ")
    assert "/fgpu/base@sha256:" in recipe
    assert image.server_kept
    assert (image.size_bytes or 0) > 3 << 20


def test_it_can_be_saved_again_and_the_pod_beside_it_is_gone(
    hub: HubProcess, images: PrivateImages, cluster: Cluster, registry: Registry, image: PrivateImage
) -> None:
    (session,) = [s for s in hub.store.snapshot(0).sessions if s.request.user == "ann"]
    assert session.request.image == image.name
    found = saved(hub, images, "again")
    assert found.state is ImageState.READY, found.message
    assert len(registry.manifest("fgpu/private", str(found.image_id))["layers"]) == 3
    pods = cluster.ask("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    assert not [
        p
        for p in pods
        if "fgpu.save" in (p["metadata"].get("labels") or {}) and "deletionTimestamp" not in p["metadata"]
    ]


def test_a_registry_that_is_away_leaves_the_session_and_says_so(
    hub: HubProcess, images: PrivateImages, cluster: Cluster, registry: Registry, image: PrivateImage
) -> None:
    registry.stop()
    found = saved(hub, images, "away")
    registry.start()
    assert found.state is ImageState.FAILED
    assert found.message == f"registry {registry.host} cannot be reached"
    assert hub.states() == {"ann/": "RUNNING"}
    assert not images_left(registry, found)


def test_a_password_that_is_wrong_leaves_the_session_and_says_so(
    hub: HubProcess, images: PrivateImages, registry: Registry, image: PrivateImage
) -> None:
    known = registry.credentials.read_text()
    wrong = base64.b64encode(f"{USER}:wrong-password-42".encode()).decode()
    registry.credentials.write_text(json.dumps({"auths": {registry.host: {"auth": wrong}}}))
    found = saved(hub, images, "wrong")
    registry.credentials.write_text(known)
    assert found.state is ImageState.FAILED
    assert found.message == (
        f"registry {registry.host} refuses, HTTP 401: authentication required; ask an administrator"
    )
    assert "wrong-password-42" not in hub.log_text()
    assert hub.states() == {"ann/": "RUNNING"}


def images_left(registry: Registry, image: PrivateImage) -> bool:
    """Return whether a registry has anything under an image's tag."""
    tags = registry.get("fgpu/private/tags/list").json().get("tags") or []
    return any(tag.endswith(f"-{image.id}") for tag in tags)


def test_a_session_with_more_than_its_owner_may_have_is_not_sent(
    hub: HubProcess, images: PrivateImages, cluster: Cluster, registry: Registry, image: PrivateImage
) -> None:
    pod = pod_of(hub, cluster, "ann")
    cluster.run(pod, f"open('{SITE}/huge', 'wb').truncate(1 << 40)")
    found = saved(hub, images, "huge")
    cluster.run(pod, f"import os; os.remove('{SITE}/huge')")
    assert found.state is ImageState.FAILED
    assert "of the 100 MiB that they may have" in str(found.message)
    assert not images_left(registry, found)


def test_without_a_registry_nothing_is_saved_and_the_api_and_the_page_say_what_to_set(
    cluster: Cluster, registry: Registry, hub: HubProcess, tmp_path: Path
) -> None:
    hub.stop("ann")
    hub.reach({})
    path = tmp_path / "catalogue.toml"
    path.write_text(entry("python", registry.base))
    pull = f"c.KubernetesFGPUSpawner.image_pull_secrets = [{registry.secret!r}]\n"
    why = "essions cannot be saved as images here until an administrator sets c.KubernetesFGPUSpawner.private_registry"
    with on(cluster, tmp_path, before=pull, owners_may_commit=True, catalogue=str(path)) as other:
        token = other.add_user("ann")
        assert other.spawn("ann", options={**ASKED, "image": "python"}).status_code in (201, 202)
        other.reach({"ann/": "RUNNING"}, within_s=180)
        (session,) = other.store.snapshot(0).sessions
        own = {"Authorization": f"token {token}"}
        service = f"{other.url}/services/fgpu"
        asked = f"{service}/api/v1/sessions/{session.id}/image"
        refused = requests.post(asked, json={"name": "more"}, headers=own, timeout=60)
        assert refused.status_code == 409, refused.text
        assert f"s{why}" in refused.text
        assert (
            'can_save": true' not in requests.get(f"{service}/api/v1/sessions", headers=own, timeout=60).text
        )


def test_deleting_it_deletes_it_in_the_registry(
    hub: HubProcess, images: PrivateImages, registry: Registry, image: PrivateImage
) -> None:
    hub.stop("ann")
    hub.reach({})
    images.delete(image.id, now_s=2)
    until(lambda: image.id not in {i.id for i in images.all()}, within_s=60, what="it is gone")
    kind = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}
    assert registry.get(f"fgpu/private/manifests/{image.image_id}", headers=kind).status_code == 404
