"""What another user's image can do to the user who starts it: an attack on an administrator, step by step."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from bs4 import BeautifulSoup
from dockerhub import BASE, ONE, DockerHub, Engine, entry, until
from test_docker_private_images import images_of, settled, wish

from fgpu_scheduler import PrivateImage, PrivateImages, Store

FROM_ELSEWHERE = {
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "navigate",
    "Referer": "https://evil.example/",
}
IN_THE_IMAGE = "/opt/env/share/jupyter/labextensions"
AT_HOME = "/home/jovyan/.local/share/jupyter"
ASKED = "is eve's, and its programs run as you"
LEFT_BY_CONFIG = "/tmp/user-config-was-read"
TUTOR = """
c.JupyterHub.load_groups = {"class": {"users": ["bob"]}}
c.JupyterHub.load_roles.append({"name": "tutor", "users": ["eve"], "scopes": ["admin:servers!group=class"]})
"""


def extension(name: str, folder: str) -> str:
    """Return commands that install a JupyterLab extension."""
    script = {"load": "static/x.js", "extension": "./extension"}
    package = {"name": name, "version": "1.0.0", "jupyterlab": {"extension": True, "_build": script}}
    own = f"{folder}/{name}"
    return (
        f"mkdir -p {own}/static && echo {shlex.quote(json.dumps(package))} > {own}/package.json"
        f" && echo 'document.title = 1' > {own}/static/x.js"
    )


@pytest.fixture(scope="module")
def hub(
    make_hub: Callable[..., DockerHub], engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DockerHub]:
    """A Hub with JupyterLab, homes, and users who may save their sessions."""
    path = tmp_path_factory.mktemp("catalogue") / "catalogue.toml"
    path.write_text(entry("python", BASE))
    homes = f"c.FGPUSpawner.volumes = {{'{engine.prefix}-others-{{username}}': '/home/jovyan'}}\n"
    made = make_hub(after=homes + TUTOR, catalogue=str(path), owners_may_commit=True).start()
    yield made
    made.end_all_but(set())
    for image in images_of(engine, made.installation):
        engine.client.remove_image(image, force=True)
    for user in ("eve", "admin", "bob"):
        engine.remove_volume(f"{engine.prefix}-others-{user}")


@pytest.fixture(scope="module")
def images(hub: DockerHub) -> Iterator[PrivateImages]:
    store = Store(f"sqlite:///{hub.data / 'fgpu.sqlite'}")
    store.connect()
    yield PrivateImages(store)
    store.close()


@pytest.fixture(scope="module")
def hostile(hub: DockerHub, engine: Engine, images: PrivateImages) -> PrivateImage:
    """Eve's image, with an extension of hers, which she offers to the administrator."""
    eve = hub.running("eve")
    status, said = engine.run_in(eve.id, "sh", "-c", extension("evil", IN_THE_IMAGE))
    assert status == 0, said
    found = settled(hub, images, wish(images, eve, "nice"))
    assert found.server_kept, found
    hub.end("eve")
    images.share(found.id, users=["admin"], groups=[], now_s=1)
    hub.add_user("admin")
    # The Hub looks every other second.
    until(lambda: ASKED in words(hub, "admin", image=found.name), what="it is offered to the administrator")
    return images.get(found.id)


def lab_of(hub: DockerHub, user: str, token: str) -> str:
    """Return JupyterLab's page, which names the extensions that it runs."""
    page = requests.get(f"{hub.url}/user/{user}/lab", headers={"Authorization": f"token {token}"}, timeout=60)
    assert page.status_code == 200
    assert "jupyterlab-fgpu" in page.text
    return page.text


def words(hub: DockerHub, user: str, **options: Any) -> str:
    """Return what a start is refused with."""
    return str(hub.refused(user, options={**ONE, **options}).json()["message"])


@pytest.fixture(scope="module")
def browser(hub: DockerHub) -> requests.Session:
    """A browser in which the administrator has logged in."""
    return hub.browser("admin")


def asked(hub: DockerHub, browser: requests.Session, image: PrivateImage) -> list[Any]:
    """Follow a link to the image on another site, and return what the form asks; as soon as the Hub knows to."""

    def found() -> list[Any]:
        link = f"{hub.url}/hub/spawn/admin/x?image={image.name}&accept_image={image.image_id}"
        page = browser.get(link, headers=FROM_ELSEWHERE, timeout=30)
        assert page.status_code == 200
        return BeautifulSoup(page.text, "html.parser").select("#fgpu-accept")

    return until(found, what="the form asks")


def test_link_to_a_shared_image_asks_first_and_names_its_owner(
    hub: DockerHub, hostile: PrivateImage, browser: requests.Session
) -> None:
    (question,) = asked(hub, browser, hostile)
    assert f"{hostile.name} is eve's image. Its programs run as you" in " ".join(question.text.split())
    assert question.select("input[name=accept_image]")
    assert question.select("[checked]") == []
    assert hub.states() == {}
    # Nor does the form start it while its box is not ticked.
    form = BeautifulSoup(browser.get(f"{hub.url}/hub/spawn/admin/x", timeout=30).text, "html.parser")
    sent = {"image_name": hostile.name, "fgpu": "0.5", "cpu": "0.5", "memory_mib": "1024"}
    (spawn,) = form.select("#spawn_form")
    sent |= {hidden["name"]: hidden["value"] for hidden in spawn.select("input[name=_xsrf]")}
    action = spawn["action"]
    answer = browser.post(f"{hub.url}{action}", data=sent, timeout=30)
    assert answer.status_code == 400
    assert "tick the box below it to accept it" in answer.text
    assert hub.states() == {}


def test_api_needs_the_digest_and_lab_runs_nothing_of_the_image(
    hub: DockerHub, engine: Engine, images: PrivateImages, hostile: PrivateImage
) -> None:
    for more in ({}, {"accept_image": True}, {"accept_image": "sha256:" + "0" * 64}):
        said = words(hub, "admin", image=hostile.name, **more)
        assert said.endswith(f"accept it with accept_image={hostile.image_id}")
    admin = hub.running("admin", image=hostile.name, accept_image=hostile.image_id)
    assert admin.container["Image"] == hostile.image_id
    assert engine.run_in(admin.id, "ls", IN_THE_IMAGE) == (0, "evil\n"), "it is there"
    assert "evil" not in lab_of(hub, "admin", admin.token)
    headers = {"Authorization": f"token {admin.token}"}
    script = f"{hub.url}/user/admin/lab/extensions/evil/static/x.js"
    assert requests.get(script, headers=headers, timeout=30).status_code == 404
    # An image made from it still has eve's programs.
    made = settled(hub, images, wish(images, admin, "mine"))
    hub.end("admin")
    own = hub.running("admin", image=made.name)
    assert "evil" not in lab_of(hub, "admin", own.token)
    hub.end("admin")


def test_acceptance_is_remembered_and_declined_or_revoked_images_do_not_start(
    hub: DockerHub, images: PrivateImages, hostile: PrivateImage, browser: requests.Session
) -> None:
    hub.running("admin", image=hostile.name, accept_image=hostile.image_id)
    hub.end("admin")
    hub.running("admin", image=hostile.name)
    hub.end("admin")
    images.answer(str(hostile.image_id), user="admin", accepted=False, now_s=2)
    assert asked(hub, browser, hostile)
    assert ASKED in words(hub, "admin", image=hostile.name)
    # With the options of the last start, which accepted it, it is refused as well.
    assert ASKED in hub.refused("admin").json()["message"]
    images.share(hostile.id, users=["bob"], groups=[], now_s=3)
    none = words(hub, "admin", image="eve/none:1").replace("eve/none:1", "X")

    def revoked() -> bool:
        said = words(hub, "admin", image=hostile.name, accept_image=hostile.image_id)
        return said.replace(hostile.name, "X") == none

    until(revoked, what="it does not exist any more")
    assert hub.states() == {}


def test_the_owner_has_the_extensions_of_an_image_of_their_own(hub: DockerHub, hostile: PrivateImage) -> None:
    eve = hub.running("eve", image=hostile.name)
    assert "evil" in lab_of(hub, "eve", eve.token)
    hub.end("eve")


def test_files_at_home_do_not_run_in_the_next_sessions_server(hub: DockerHub, engine: Engine) -> None:
    config = f"open('{LEFT_BY_CONFIG}', 'w')"
    files = "jupyter_server_config.py .jupyter/jupyter_server_config.py .jupyter/jupyter_lab_config.py"
    code = f"mkdir -p .jupyter && for file in {files}; do echo {shlex.quote(config)} > $file; done"
    bob = hub.running("bob")
    for command in (code, extension("at-home", f"{AT_HOME}/labextensions")):
        status, said = engine.run_in(bob.id, "sh", "-c", f"cd /home/jovyan && {command}")
        assert status == 0, said
    hub.end("bob")
    again = hub.running("bob")
    assert "at-home" not in lab_of(hub, "bob", again.token)
    assert engine.run_in(again.id, "test", "-e", LEFT_BY_CONFIG)[0] == 1
    hub.end("bob")


def test_administrator_cannot_accept_an_image_for_another_user(
    hub: DockerHub, images: PrivateImages, hostile: PrivateImage
) -> None:
    """Eve may start bob's servers, and read none of his files: her image would, in his name."""
    images.share(hostile.id, users=["bob"], groups=[], now_s=4)
    eve, bob = hub.add_user("eve"), hub.add_user("bob")
    options = {**ONE, "image": hostile.name, "accept_image": hostile.image_id}
    until(lambda: ASKED in words(hub, "bob", image=hostile.name), what="it is offered to bob")

    def said(server: str, token: str, **more: Any) -> str:
        def answer() -> str:
            given = hub.spawn("bob", server, token=token, **more)
            return "" if given.status_code < 400 or "is pending" in given.text else given.json()["message"]

        return str(until(answer, what="it is refused"))

    only = f"image: only bob can accept {hostile.name}"
    assert said("", eve, options=options).startswith(only)
    # Nor does she put words into his mouth, for when he starts it as it was set up.
    kept = hub.api("PUT", "users/bob/servers/later", token=eve, json={"user_options": options})
    assert kept.status_code == 201, kept.text
    assert said("later", bob).startswith(only)
    assert images.get(hostile.id).accepted_by == ()
    assert hub.states() == {}
    hub.running("bob", image=hostile.name, accept_image=hostile.image_id)
    hub.end("bob")
