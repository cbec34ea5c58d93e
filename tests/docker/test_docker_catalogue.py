"""``fgpu images`` on a real engine: what its labels propose, what it has, and an image pinned to that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dockerhub import Engine
from imageregistry import ImageRegistry, Made, random_layer

from fgpu_scheduler import Store
from fgpuspawner.cli import main as cli
from fgpuspawner.images.catalogue import Image, load_catalogue
from fgpuspawner.images.labels import PRIVATE, labels_of

CONFIG = """
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
configure(c, runtime="docker", data_dir={data!r}, simulated_gpus="1", catalogue={catalogue!r})
"""
PYTHON = """
[[image]]
slug = "python"
name = "Python"
framework = "python"
version = "3.11"
python = "3.11"
reference = "lab/not-there:1"
default = true
"""


@pytest.fixture
def registry() -> ImageRegistry:
    return ImageRegistry()


def test_images_of_an_engine_are_proposed_added_and_pinned(
    engine: Engine, registry: ImageRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue, config = tmp_path / "catalogue.toml", tmp_path / "jupyterhub_config.py"
    catalogue.write_text(PYTHON)
    config.write_text(CONFIG.format(data=str(tmp_path), catalogue=str(catalogue)))
    store = Store(f"sqlite:///{tmp_path / 'fgpu.sqlite'}")
    store.open()
    store.close()

    def fgpu(*arguments: str) -> tuple[int, list[str]]:
        status = cli.main(["images", *arguments, "--config", str(config)])
        said = capsys.readouterr()
        return status, (said.out or said.err).splitlines()

    def pulled(name: str, labels: dict[str, str]) -> str:
        made = Made((random_layer(0.01, name),), {"Labels": labels, "Cmd": ["/x"]})
        reference = engine.mine(registry.add(f"{engine.prefix}/{name}", made))
        engine.client.pull(reference)
        return reference

    slug = engine.prefix
    facts = Image(
        slug,
        f"Torch {slug}",
        "pytorch",
        "1.9",
        "3.9",
        "",
        kernels=("torch-1.9",),
        min_fgpu_milli=200,
        groups=("a, b",),
    )
    try:
        mine = pulled("torch", labels_of(facts))
        pulled("private", {**labels_of(facts), "fgpu.slug": "private", PRIVATE: "1"})
        odd = pulled("odd", {"fgpu.slug": "../../etc", "fgpu.name": "odd"})
        status, lines = fgpu("scan")
        assert status == 0
        assert f"{mine} on local: new: {slug}: Torch {slug}" in lines
        assert any(line.startswith(f"{odd} on local: its labels cannot be used: ") for line in lines)
        assert not any("private" in line for line in lines)
        assert fgpu("scan", "--add", slug)[0] == 0
        assert f"{mine} on local: {slug}: it is in the catalogue" in fgpu("scan")[1]
        # What came from a registry is pinned by its digest there, and is known by that.
        assert fgpu("pin", slug)[0] == 0
        (digest,) = engine.client.inspect_image(mine)["RepoDigests"]
        pinned = f"{mine}@{digest.partition('@')[2]}"
        out = tmp_path / "out.toml"
        assert fgpu("export", "--output", str(out))[0] == 0
        assert load_catalogue(out).entry(slug) == replace(facts, reference=pinned)
        listed = fgpu("list")[1]
        assert f"{slug}: Torch {slug}, {pinned}" in listed
        assert "  on: local" in listed[listed.index(f"{slug}: Torch {slug}, {pinned}") :][:4]
        # What was built there has none: it is pinned by its id.
        built = engine.build("built", f"FROM {mine}\nLABEL fgpu.slug={slug}-2\n")
        assert fgpu("scan", "--add", f"{slug}-2")[0] == 0
        assert fgpu("pin", f"{slug}-2")[0] == 0
        assert fgpu("export", "--output", str(tmp_path / "more.toml"))[0] == 0
        added = load_catalogue(tmp_path / "more.toml").entry(f"{slug}-2")
        assert added is not None
        assert (added.reference, added.digest) == (built, engine.client.inspect_image(built)["Id"])
        assert fgpu("pin", "python") == (
            1,
            ['fgpu: image "python": no engine has lab/not-there:1; pull or build it first'],
        )
    finally:
        registry.close()
