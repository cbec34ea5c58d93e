"""What is saved of a session's container, and what never is."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from docker.errors import APIError

from fgpu_scheduler import ImageState, PrivateImage
from fgpuspawner.engines.base import CannotSave
from fgpuspawner.engines.docker.fleet import image_store
from fgpuspawner.engines.docker.images import saver as commit
from fgpuspawner.engines.docker.images.saver import (
    configuration,
    keeps_its_server,
    labels_of,
    left_behind,
    refuse_what_cannot_be_saved,
)

IMAGE = PrivateImage(
    id=7,
    owner="alice",
    name="alice/torch:1",
    reference="fgpu-0123456789ab/alice/torch:1",
    state=ImageState.COMMITTING,
    message=None,
    node_id="local",
    image_id=None,
    size_bytes=None,
    session_id=12,
    made_from="python",
    base="python",
    facts="{}",
    has_recipe=False,
    shared_users=(),
    shared_groups=(),
    asked_by="alice",
    asked_at_s=1,
    made_at_s=None,
)


def container(*mounts: str, read_only: bool = False, running: bool = True) -> dict[str, Any]:
    return {
        "State": {"Running": running},
        "HostConfig": {"ReadonlyRootfs": read_only},
        "Config": {"Env": ["HOME=/home/jovyan", "EMPTY"], "WorkingDir": "/srv"},
        "Mounts": [{"Destination": mount} for mount in mounts],
    }


@pytest.mark.parametrize("mount", ["/home/jovyan", "/home/jovyan/", "/home", "/"])
def test_a_session_whose_home_is_mounted_can_be_saved(mount: str) -> None:
    refuse_what_cannot_be_saved(container("/etc/ld.so.preload", mount))


@pytest.mark.parametrize("mounts", [(), ("/home/jovyan/data",), ("/home/jov",), ("/etc/ld.so.preload",)])
def test_session_with_its_home_in_the_image_cannot_be_saved(mounts: tuple[str, ...]) -> None:
    with pytest.raises(
        CannotSave, match=r"home folder /home/jovyan would be in the image.*FGPUSpawner.volumes"
    ):
        refuse_what_cannot_be_saved(container(*mounts))


OURS = {"Labels": {"fgpu.handover": "1"}, "Env": ["PATH=/bin"], "WorkingDir": "/home/jovyan"}


@pytest.mark.parametrize(
    ("kept", "host", "user", "base"),
    [
        (True, {}, "1000:1000", {}),
        (True, {"SecurityOpt": ["label=disable", "no-new-privileges:true"]}, "jovyan", {"WorkingDir": ""}),
        (False, {"SecurityOpt": ["no-new-privileges:false"]}, "1000", {}),
        (False, {"SecurityOpt": None}, "1000", {}),
        (False, {"Privileged": True}, "1000", {}),
        (False, {}, "0:1000", {}),
        (False, {}, "", {}),
        # Its server is among the files that users may write, for all that is known.
        (False, {}, "1000", {"Labels": {"fgpu.handover": ""}}),
        (False, {}, "1000", {"Labels": None}),
        # It would read what the session may have written there.
        (False, {}, "1000", {"WorkingDir": "/work"}),
        (False, {}, "1000", {"Env": ["JUPYTER_CONFIG_PATH=/opt/env/etc"]}),
    ],
)
def test_server_counts_as_unchanged_only_if_the_session_could_not_write_it(
    kept: bool, host: dict[str, Any], user: str, base: dict[str, Any]
) -> None:
    session = {
        "HostConfig": {"SecurityOpt": ["no-new-privileges"]} | host,
        "Config": {"User": user, "Env": ["HOME=/home/jovyan"]},
    }
    assert keeps_its_server(session, {"Config": OURS | base}) is kept


def test_read_only_or_ended_session_cannot_be_saved() -> None:
    with pytest.raises(CannotSave, match="read_only_root"):
        refuse_what_cannot_be_saved(container("/home/jovyan", read_only=True))
    with pytest.raises(CannotSave, match="has ended"):
        refuse_what_cannot_be_saved(container("/home/jovyan", running=False))


def test_session_of_a_renamed_image_cannot_be_saved() -> None:
    session = container("/home/jovyan") | {"Image": "sha256:1"}
    refuse_what_cannot_be_saved(session, under_id="sha256:1")
    with pytest.raises(CannotSave, match="was renamed or deleted"):
        refuse_what_cannot_be_saved(session, under_id="sha256:2")


BASE = {
    "Architecture": "amd64",
    "Os": "linux",
    "Variant": "v2",
    "Config": {
        "Env": ["PATH=/bin"],
        "Cmd": ["server"],
        "User": "1000:1000",
        "Hostname": "box",
        "Image": "sha256:0",
        "Labels": {"fgpu.slug": "python", "fgpu.name": "Python", "fgpu.handover": "1", "lab.own": "kept"},
    },
    "RootFS": {"Layers": ["sha256:a", "sha256:b"]},
}
HISTORY = [
    {"Created": 30, "CreatedBy": "COPY", "Size": 5},
    {"Created": 20, "CreatedBy": "ENV", "Size": 0},
    {"Created": 10, "CreatedBy": "ADD", "Size": 9},
]


def test_saved_image_has_the_base_configuration_and_its_owners_labels() -> None:
    labels = labels_of(IMAGE, "0123456789ab", 60)
    layers = ["sha256:a", "sha256:b", "sha256:c"]
    found = json.loads(configuration(BASE, HISTORY, layers, labels=labels, made_at_s=60))
    assert found["config"] == {
        "Env": ["PATH=/bin"],
        "Cmd": ["server"],
        "User": "1000:1000",
        "Labels": {"fgpu.handover": "1", "lab.own": "kept", **labels},
    }
    assert found["rootfs"] == {"type": "layers", "diff_ids": layers}
    assert [(h["created_by"], h.get("empty_layer", False)) for h in found["history"]] == [
        ("ADD", False),
        ("ENV", True),
        ("COPY", False),
        ("saved from a session", False),
    ]
    assert (found["architecture"], found["os"], found["variant"]) == ("amd64", "linux", "v2")
    assert "container_config" not in found


def test_scan_proposes_no_private_images() -> None:
    # An engine lists only what has a slug: a saved image has it only if its owner added one.
    labels = labels_of(IMAGE, "0123456789ab", 60) | {"fgpu.slug": "mine"}
    listed = [
        {"Id": "sha256:1", "RepoTags": [IMAGE.reference], "Labels": labels},
        {"Id": "sha256:2", "RepoTags": ["lab/torch:1"], "Labels": {"fgpu.slug": "torch"}},
    ]
    client = SimpleNamespace(images=lambda filters: listed)
    daemon: Any = SimpleNamespace(answers=True, client=client, address=SimpleNamespace(node_ids=()))
    assert [found.references for found in image_store(daemon).labelled()] == [("lab/torch:1",)]


def test_history_that_does_not_match_the_layers_is_replaced() -> None:
    # A layer can be empty and be one all the same.
    layers = ["sha256:a", "sha256:b", "sha256:c"]
    found = json.loads(configuration(BASE, HISTORY[1:], layers, labels={}, made_at_s=60))
    assert len([h for h in found["history"] if not h.get("empty_layer")]) == 3


class FakeEngine:
    """Lists images, and notes when what is known was asked for."""

    def images(self, **kwargs: Any) -> list[Any]:
        if kwargs.get("quiet"):
            return ["sha256:1"] if "private" in kwargs["filters"]["label"] else ["sha256:2"]
        own = ["fgpu-0123456789ab/alice/a:1", "fgpu-0123456789ab/alice/b:1", "fgpu-0123456789ab-carrier:7"]
        others = ["fgpu-0123456789ab2/alice/c:1", "fgpuspawner/base:0.1", "alice/a:1"]
        return [{"RepoTags": [*own, *others]}, {"RepoTags": None}]


def test_only_unknown_images_of_this_installation_are_swept() -> None:
    found = left_behind(FakeEngine(), "0123456789ab", lambda: ["fgpu-0123456789ab/alice/a:1"])
    assert found == ["fgpu-0123456789ab/alice/b:1", "fgpu-0123456789ab-carrier:7", "sha256:2", "sha256:1"]


class Freezing:
    """A container on an engine that fails to pause it this number of times."""

    def __init__(self, fails: int, status: int = 500) -> None:
        self.fails, self.status, self.paused = fails, status, False

    def inspect_container(self, container: str) -> Any:
        return {"State": {"Paused": self.paused}}

    def pause(self, container: str) -> None:
        self.fails -= 1
        if self.fails >= 0:
            answer = requests.Response()
            answer.status_code = self.status
            raise APIError("OCI runtime pause failed: unable to freeze", answer)
        self.paused = True

    def unpause(self, container: str) -> None:
        self.paused = False


def test_failed_pause_is_retried_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit, "LOOK_EVERY_S", 0)
    engine = Freezing(2)
    noted: list[str] = []
    with commit._paused(engine, "c", noted.append):
        assert engine.paused
    assert not engine.paused
    assert noted == ["the engine could not pause the session; trying again"] * 2


@pytest.mark.parametrize(("fails", "status"), [(commit.PAUSE_TRIES, 500), (1, 409)])
def test_pause_that_never_works_is_an_error(fails: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "LOOK_EVERY_S", 0)
    engine = Freezing(fails, status)
    with pytest.raises(APIError), commit._paused(engine, "c", lambda message: None):
        raise AssertionError("it runs on")
    assert not engine.paused
