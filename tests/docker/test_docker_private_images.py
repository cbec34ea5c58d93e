"""Sessions that become private images, on a real engine: what is in them, who sees them, what a killed Hub leaves."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dockerhub import BASE, ONE, PYTHON, DockerHub, Engine, Running, entry, until

from fgpu_scheduler import ImageQuota, ImageState, PrivateImage, PrivateImages, Store
from fgpuspawner.engines.base import CannotSave, SaveSpec
from fgpuspawner.engines.docker.images.saver import commit

SECRET = "secret-of-the-lab-0123456789"
HOME_FILE = "only-in-the-home-9876543210"
SETTINGS = """
from pathlib import Path
def note(spawner):
    Path({folder!r}, spawner.user.name).write_text(spawner.api_token)
c.Spawner.pre_spawn_hook = note
c.Spawner.environment = {{"LAB_SECRET": {secret!r}}}
c.FGPUSpawner.volumes = {{"{volume}-{{username}}": "/home/jovyan"}}
"""
WHEEL = "my_pkg-1.0-py3-none-any.whl"
MAKE_WHEEL = f"""
import zipfile
with zipfile.ZipFile("/wheels/{WHEEL}", "w") as wheel:
    wheel.writestr("my_pkg.py", "answer = 42")
    wheel.writestr("my_pkg-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: my-pkg\\nVersion: 1.0\\n")
    wheel.writestr(
        "my_pkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    )
    wheel.writestr("my_pkg-1.0.dist-info/RECORD", "my_pkg.py,,\\nmy_pkg-1.0.dist-info/METADATA,,\\n"
        "my_pkg-1.0.dist-info/WHEEL,,\\nmy_pkg-1.0.dist-info/RECORD,,\\n")
"""
PIP = ("pip", "install", "--no-index", "--find-links", "/wheels", "my-pkg")
IMPORT = ("python", "-c", "import my_pkg; print(my_pkg.answer)")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def hub(
    make_hub: Callable[..., DockerHub], engine: Engine, tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DockerHub]:
    """A Hub with homes, and images with a wheel; one image cannot wait for its identity."""
    code = base64.b64encode(MAKE_WHEEL.encode()).decode()
    own = (
        f"FROM {BASE}\nUSER root\n"
        f"RUN mkdir /wheels && echo {code} | base64 -d | {PYTHON} - && chmod -R a+rX /wheels\nUSER 1000:1000\n"
    )
    python, old = engine.build("own", own), engine.build("own-old", f"{own}LABEL fgpu.handover=\n")
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.toml"
    path.write_text(entry("python", python) + entry("old", old))
    after = SETTINGS.format(folder=str(tokens), secret=SECRET, volume=engine.prefix)
    made = make_hub(
        after=after, catalogue=str(path), max_private_images=3, max_private_images_mib=100
    ).start()
    yield made
    made.end_all_but(set())
    installation = made.installation
    for image in images_of(engine, installation):
        engine.client.remove_image(image, force=True)
    for user in ("alice", "bob"):
        engine.remove_volume(f"{engine.prefix}-{user}")


def images_of(engine: Engine, installation: str) -> list[str]:
    """Return the names of all images that an installation has made, carriers too."""
    names = [name for image in engine.client.images() for name in image.get("RepoTags") or ()]
    return [name for name in names if name.startswith((f"fgpu-{installation}/", f"fgpu-{installation}-"))]


@pytest.fixture(scope="module")
def images(hub: DockerHub) -> Iterator[PrivateImages]:
    """The store, written as the service and the command line do."""
    store = Store(f"sqlite:///{hub.data / 'fgpu.sqlite'}")
    store.connect()
    yield PrivateImages(store)
    store.close()


def wish(images: PrivateImages, running: Running, name: str, **more: Any) -> PrivateImage:
    given = {"asked_by": "test", "quota": ImageQuota(), "now_s": 1, **more}
    return images.request(running.session.id, name=name, **given)


def settled(hub: DockerHub, images: PrivateImages, found: PrivateImage) -> PrivateImage:
    """Wait until an image is ready or has failed."""
    making = (ImageState.WISHED, ImageState.COMMITTING)
    until(lambda: images.get(found.id).state not in making, within_s=120, what=f"{found.name} is made")
    if images.get(found.id).state is ImageState.READY:
        # Which the Hub says when it offers it.
        until(lambda: f" is saved as {found.name}, " in hub.log_text(), what=f"{found.name} is offered")
    return images.get(found.id)


@pytest.fixture(scope="module")
def saved(hub: DockerHub, engine: Engine, images: PrivateImages) -> tuple[Running, PrivateImage]:
    """Alice's session, in which she has installed something, and the image that it was saved as."""
    alice = hub.running("alice")
    engine.python_in(alice.id, f"open('/home/jovyan/notes', 'w').write({HOME_FILE!r})")
    status, said = engine.run_in(alice.id, *PIP)
    assert status == 0, said
    found = settled(hub, images, wish(images, alice, "torch-more"))
    assert found.state is ImageState.READY, found.message
    return alice, found


def test_installed_packages_are_in_a_session_of_the_image(
    hub: DockerHub, engine: Engine, saved: tuple[Running, PrivateImage]
) -> None:
    alice, image = saved
    assert engine.run_in(alice.id, *IMPORT) == (0, "42\n"), "the session goes on"
    again = hub.running("alice", "again", image=image.name)
    assert again.container["Image"] == image.image_id
    assert engine.run_in(again.id, *IMPORT) == (0, "42\n")
    assert again.labels["fgpu.session"] == str(again.session.id)
    assert engine.python_in(again.id, "print(open('/home/jovyan/notes').read())") == HOME_FILE
    hub.end("alice", "again")


def test_the_image_has_no_token_no_home_and_no_labels_of_the_session(
    engine: Engine, saved: tuple[Running, PrivateImage], tokens: Path, tmp_path: Path
) -> None:
    alice, image = saved
    token = (tokens / "alice").read_text()
    inspected = engine.client.inspect_image(image.reference)
    labels = inspected["Config"]["Labels"]
    base = engine.client.inspect_image(alice.container["Image"])
    assert {k: v for k, v in labels.items() if k.startswith("fgpu.private")} == {
        "fgpu.private": "1",
        "fgpu.private.owner": "alice",
        "fgpu.private.session": str(alice.session.id),
        "fgpu.private.from": "python",
        "fgpu.private.base": "python",
        "fgpu.private.installation": labels["fgpu.private.installation"],
        "fgpu.private.made-at": labels["fgpu.private.made-at"],
    }
    own = ("installation", "session", "attempt", "node", "user", "server", "image", "amount", "slug")
    assert [key for key in own if f"fgpu.{key}" in labels] == []
    for key in ("Env", "Cmd", "Entrypoint", "User", "WorkingDir", "Volumes"):
        assert inspected["Config"][key] == base["Config"][key], key
    tar = tmp_path / "image.tar"
    subprocess.run(["docker", "save", "-o", tar, image.reference], check=True, timeout=120)
    secrets = (
        token,
        SECRET,
        HOME_FILE,
        "JUPYTERHUB_API_TOKEN=",
        f"fgpu-{labels['fgpu.private.installation']}-",
    )
    for secret in secrets:
        assert grep(tar, secret) == 1, f"{secret} is in the image"
    assert grep(tar, "answer = 42") == 0, "the search finds what is there"
    known = json.dumps([inspected, engine.client.history(image.reference)])
    assert [secret for secret in secrets if secret in known] == []
    assert image.size_bytes is not None
    assert 0 < image.size_bytes < 2**20


def grep(path: Path, text: str) -> int:
    """Return 0 if a file has a text, 1 if not. Layers are not compressed in there."""
    return subprocess.run(["grep", "-q", "-a", "-F", text, path], check=False).returncode


def test_the_recipe_says_what_was_installed(
    images: PrivateImages, saved: tuple[Running, PrivateImage]
) -> None:
    recipe = images.recipe(saved[1].id)
    assert recipe is not None
    assert "RUN /opt/env/bin/python3 -m pip install --no-deps \\\n    'my-pkg==1.0'\n" in recipe


def test_private_image_looks_missing_to_other_users(
    hub: DockerHub, images: PrivateImages, saved: tuple[Running, PrivateImage]
) -> None:
    _, image = saved
    token = hub.add_user("bob")

    def words(name: str) -> str:
        answer = hub.refused("bob", options={**ONE, "image": name})
        assert answer.status_code == 400, answer.text
        return str(answer.json()["message"])

    assert words(image.name).replace(image.name, "X") == words("alice/none:1").replace("alice/none:1", "X")
    assert image.name in form_of(hub, "alice")
    assert "alice/" not in form_of(hub, "bob")
    images.share(image.id, users=["bob"], groups=[], now_s=2)

    def admitted() -> bool:
        options = {**ONE, "image": image.name, "accept_image": image.image_id}
        return hub.spawn("bob", options=options, token=token).status_code in (201, 202)

    until(admitted, what="bob may start it")
    hub.wait_ready("bob")
    hub.end("bob")
    images.share(image.id, users=[], groups=[], now_s=3)


def form_of(hub: DockerHub, user: str) -> str:
    """Return the launch form as a user sees it."""
    found = hub.browser(user).get(f"{hub.url}/hub/spawn/{user}/another", timeout=30)
    assert "fgpu" in found.text
    return found.text


def test_a_session_whose_environment_has_its_token_is_saved_without_it(
    hub: DockerHub, engine: Engine, images: PrivateImages, tokens: Path, tmp_path: Path
) -> None:
    bob = hub.running("bob", image="old")
    token = (tokens / "bob").read_text()
    assert token in bob.env["JUPYTERHUB_API_TOKEN"]
    found = settled(hub, images, wish(images, bob, "old"))
    assert found.state is ImageState.READY
    tar = tmp_path / "image.tar"
    subprocess.run(["docker", "save", "-o", tar, found.reference], check=True, timeout=120)
    assert [grep(tar, text) for text in (token, "JUPYTERHUB_API_TOKEN=")] == [1, 1]
    hub.end("bob")


def test_image_saved_from_an_image_has_both_layers_and_is_renamed_and_removed(
    hub: DockerHub, engine: Engine, images: PrivateImages, saved: tuple[Running, PrivateImage]
) -> None:
    _, first = saved
    again = hub.running("alice", "again", image=first.name)
    engine.python_in(again.id, "open('/opt/env/more', 'w').write('1' * 10**6)")
    second = settled(hub, images, wish(images, again, "torch-more"))
    assert (second.name, second.made_from, second.base) == ("alice/torch-more:2", first.name, "python")
    assert second.size_bytes is not None
    assert first.size_bytes is not None
    assert second.size_bytes >= first.size_bytes + 10**6
    hub.end("alice", "again")
    renamed = images.rename(second.id, name="vision", tag="v1", now_s=4)
    wanted = images.wanted_reference(renamed)
    until(lambda: images.get(second.id).reference == wanted, what="the engine knows its new name")
    until(
        lambda: (
            set(images_of(engine, hub.installation)) >= {wanted}
            and second.reference not in images_of(engine, hub.installation)
        ),
        what="the old name is gone",
    )
    third = hub.running("alice", "again", image="alice/vision:v1")
    assert engine.run_in(third.id, *IMPORT) == (0, "42\n")
    hub.end("alice", "again")
    images.delete(second.id, now_s=5)
    until(lambda: second.id not in [i.id for i in images.all()], what="it is removed")
    assert wanted not in images_of(engine, hub.installation)
    assert first.reference in images_of(engine, hub.installation)


def test_saved_bytes_are_the_checked_bytes(
    hub: DockerHub, engine: Engine, images: PrivateImages, saved: tuple[Running, PrivateImage]
) -> None:
    """A file that is short while it is counted, and long while it is copied, would fill the engine's disk."""
    alice, image = saved
    told: list[tuple[int, bool]] = []

    def check(size: int) -> None:
        told.append((size, engine.client.inspect_container(alice.id)["State"]["Paused"]))
        raise CannotSave("too large")

    session = hub.store.session(image.session_id)
    assert session is not None
    spec = SaveSpec(session, image, None, None, None, check, lambda message: None, False)
    grows = "while :; do truncate -s 300M /opt/env/grows; truncate -s 0 /opt/env/grows; done"
    engine.run_in(alice.id, "bash", "-c", f"({grows}) > /dev/null 2>&1 & echo $! > /tmp/grows")
    with pytest.raises(CannotSave, match="too large"):
        commit(engine.client, alice.id, spec, installation=hub.installation, recipe="")
    ((_, paused),) = told
    assert paused
    assert not engine.client.inspect_container(alice.id)["State"]["Paused"], "it goes on"
    assert [name for name in images_of(engine, hub.installation) if "carrier" in name] == []
    engine.run_in(alice.id, "bash", "-c", "kill $(cat /tmp/grows); rm /opt/env/grows")


@pytest.mark.slow
def test_the_recipe_builds_and_has_the_package(
    engine: Engine, images: PrivateImages, saved: tuple[Running, PrivateImage]
) -> None:
    recipe = images.recipe(saved[1].id)
    assert recipe is not None
    name = engine.mine(f"{engine.prefix}/rebuilt:1")
    arguments = ("--build-arg", "PIP_FIND_LINKS=/wheels", "--build-arg", "PIP_NO_INDEX=1")
    done = subprocess.run(
        ["docker", "build", "--network", "none", "--tag", name, *arguments, "-"],
        input=recipe,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = ["docker", "run", "--rm", "--network", "none", name, *IMPORT]
    assert subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout == "42\n"
