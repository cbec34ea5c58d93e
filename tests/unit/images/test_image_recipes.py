"""images/NAME/image.toml: every one can be read, and its image proposes an entry that the catalogue takes."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fgpuspawner.images.catalogue import load_catalogue
from fgpuspawner.images.entry import read_entry
from fgpuspawner.images.labels import LABELS, entry_from

IMAGES = Path(__file__).parents[3] / "images"
sys.path.insert(0, str(IMAGES))

import onbase  # noqa: E402
from debianfiles import CannotBuild, installed, write  # noqa: E402

NAMES = sorted(path.parent.name for path in IMAGES.glob("*/image.toml"))
ASKED: dict[str, Any] = {
    "program": "/usr/bin/python3",
    "python": "3.8.10",
    "libc": "2.31",
    "machine": "x86_64",
    "path": "/usr/bin:/bin",
    "packages": [],
}


def test_the_images_that_are_promised_are_there() -> None:
    frameworks = {"tensorflow": ("-1.13", "-1.15", "-2.2", "-2.7", ""), "pytorch": ("-1.5", "-1.9", "")}
    wanted = [f"{name}{version}" for name, versions in frameworks.items() for version in versions]
    assert sorted(NAMES) == sorted(["base", *wanted])


@pytest.mark.parametrize("name", NAMES)
def test_the_labels_of_an_image_propose_an_entry_that_the_catalogue_takes(name: str) -> None:
    recipe = onbase.read_recipe(IMAGES / name)
    version = f"{recipe.facts['version']}.1"
    facts = onbase.facts_of(recipe, {**ASKED, "version": version}, made_here=False)
    labels = onbase.labels_of(facts)
    assert set(labels) <= set(LABELS)
    reference = f"fgpuspawner/{name}:0.1"
    image = read_entry(entry_from(labels, reference))
    assert image == read_entry({**facts, "reference": reference})
    assert (image.python, image.version, image.kernels) == ("3.8", version, ("python3",))
    assert image.slug == name.replace(".", "-") or name == "base"
    assert bool(image.cuda) == bool(image.gpu_architectures) == (name != "base")
    here = onbase.facts_of(recipe, {**ASKED, "version": version}, made_here=True)
    assert not {"cuda", "gpu_architectures", "minimum"} & set(here), "another base may have no CUDA"


@pytest.mark.parametrize("name", NAMES)
def test_the_catalogue_has_an_entry_for_each_and_offers_what_needs_no_build(name: str) -> None:
    catalogue = load_catalogue(IMAGES / "catalogue.toml")
    found = {image.reference: image for image in catalogue.images}
    image = found[f"fgpuspawner/{name}:0.1"]
    said = tomllib.loads((IMAGES / name / "image.toml").read_text())
    assert image.enabled == (name == "base")
    if name != "base":
        assert (image.name, image.framework, image.version) == (
            said["name"],
            said["framework"],
            said["version"],
        )
        assert (image.cuda, list(image.gpu_architectures)) == (said["cuda"], said["gpu_architectures"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "image.toml: Invalid value"),
        ('name = "Ours"\nframework = "ours"\nversion = "1"', "image.toml: base is missing"),
        (
            'name = "Ours"\nframework = "ours"\nversion = "1"\nbase = "a"\nbasis = "b"',
            "image.toml: unknown key basis",
        ),
    ],
)
def test_a_recipe_that_is_wrong_is_refused_with_its_file(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "image.toml").write_text(text)
    with pytest.raises(CannotBuild) as refused:
        onbase.read_recipe(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}/{words}")


def test_what_is_put_into_an_image_is_for_its_user_to_read_whoever_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "etc/profile.d/fgpu.sh"
    monkeypatch.setattr(onbase, "build", lambda *_, **__: write(written, "x\n"))
    monkeypatch.setattr(sys, "argv", ["onbase.py", "build", str(IMAGES / NAMES[0]), "--tag", "x:1"])
    before = os.umask(0o077)
    try:
        assert onbase.main() == 0
    finally:
        os.umask(before)
    assert written.stat().st_mode & 0o777 == 0o644
    assert written.parent.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(
    shutil.which("dpkg-query") is None, reason="needs dpkg, of whose packages images are made"
)
def test_package_with_pending_triggers_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {
        "plain": "install ok installed",
        "held": "hold ok installed",
        "waiting": "install ok triggers-awaited\nTriggers-Awaited: plain",
        "pending": "install ok triggers-pending\nTriggers-Pending: ldconfig",
        "half": "install ok half-configured",
        "unpacked": "install ok unpacked",
        "removed": "deinstall ok config-files",
    }
    paragraph = (
        "Package: {}\nStatus: {}\nArchitecture: all\nVersion: 1\nMaintainer: nobody\nDescription: one\n"
    )
    (tmp_path / "status").write_text("\n".join(paragraph.format(*state) for state in states.items()))
    for folder in ("info", "updates", "triggers"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("DPKG_ADMINDIR", str(tmp_path))
    assert sorted(installed.__wrapped__()) == ["held", "pending", "plain", "waiting"]
