"""The command ``fgpu images`` where sessions are local processes: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fgpu_scheduler import Device, ImageEdits, Node, Store
from fgpuspawner.cli import main as cli
from fgpuspawner.images.catalogue import load_catalogue

CONFIG = """
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
configure(c, data_dir={data!r}, simulated_gpus="2", catalogue={catalogue!r})
"""
CATALOGUE = """
[[image]]
slug = "python"
name = "Python"
framework = "python"
version = "3.11"
python = "3.11"
reference = "lab/python:1"
default = true

[[image]]
slug = "torch"
name = "PyTorch"
framework = "pytorch"
version = "2.13"
python = "3.12"
reference = "lab/torch:1"
groups = ["vision"]
"""


class Lab:
    """An installation after the first start of its Hub."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.catalogue = folder / "catalogue.toml"
        self.catalogue.write_text(CATALOGUE)
        self.config = folder / "jupyterhub_config.py"
        self.config.write_text(CONFIG.format(data=str(folder), catalogue=str(self.catalogue)))
        self.store = Store(f"sqlite:///{folder / 'fgpu.sqlite'}")
        self.store.open()
        gpu = Device("GPU-0", "n1", 0, "Test GPU", 8192, 2000)
        self.store.set_nodes([Node("n1", "default", 8000, 16384, (gpu,))], now_s=1)
        self._capsys = capsys

    def fgpu(self, *arguments: str) -> tuple[int, str]:
        """Return the status of ``fgpu images`` and what it says, on whichever stream."""
        status = cli.main(["images", *arguments, "--config", str(self.config)])
        said = self._capsys.readouterr()
        assert not (said.out and said.err)
        return status, said.out or said.err


@pytest.fixture
def lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Lab:
    return Lab(tmp_path, capsys)


def test_list_shows_state_source_and_differences(lab: Lab) -> None:
    assert lab.fgpu("hide", "torch") == (
        0,
        "image torch is not shown any more; who knows its slug may start it\n",
    )
    assert lab.fgpu("list") == (
        0,
        "python: Python, lab/python:1\n"
        "  file; enabled; default\n"
        "torch: PyTorch, lab/torch:1\n"
        "  edited; hidden; for group vision\n"
        "  differs: hidden: yes (in the file: no)\n",
    )


def test_list_as_json(lab: Lab) -> None:
    lab.fgpu("disable", "torch")
    status, said = lab.fgpu("list", "--json")
    found = json.loads(said)
    assert (status, found["version"], found["problems"]) == (0, 1, [])
    assert found["images"][1] == {
        "slug": "torch",
        "name": "PyTorch",
        "reference": "lab/torch:1",
        "source": "edited",
        "state": ["disabled", "for group vision"],
        "differences": ["enabled: no (in the file: yes)"],
        "engines": None,
        "problem": None,
    }


def test_action_is_recorded_and_back_undoes_it(lab: Lab) -> None:
    lab.fgpu("default", "torch")
    (edit,) = ImageEdits(lab.store).all()
    assert (edit.slug, edit.changes) == ("torch", {"default": True})
    assert edit.changed_by
    assert lab.fgpu("back", "torch") == (0, "image torch is as the file has it\n")
    assert ImageEdits(lab.store).all() == ()


def test_file_order_undoes_moves(lab: Lab) -> None:
    lab.fgpu("up", "torch")
    assert lab.fgpu("list")[1].startswith("torch")
    assert lab.fgpu("file-order") == (0, "the images are in the file's order\n")
    assert lab.fgpu("list")[1].startswith("python")


def test_export_is_the_catalogue_in_force(lab: Lab, tmp_path: Path) -> None:
    lab.fgpu("disable", "torch")
    lab.fgpu("up", "torch")
    out = tmp_path / "new.toml"
    assert lab.fgpu("export", "--output", str(out)) == (0, f"wrote 2 images to {out}\n")
    found = load_catalogue(out)
    assert [(image.slug, image.enabled, image.groups) for image in found.images] == [
        ("torch", False, ("vision",)),
        ("python", True, ()),
    ]
    assert lab.fgpu("export")[1] == out.read_text()
    # An existing file is not written over.
    status, said = lab.fgpu("export", "--output", str(out))
    assert status == 1
    assert "exists" in said
    # With the exported file in use nothing differs.
    lab.catalogue.write_text(out.read_text())
    assert "differs" not in lab.fgpu("list")[1]


def test_check_refuses_a_wrong_catalogue_in_one_line(lab: Lab, tmp_path: Path) -> None:
    assert lab.fgpu("check") == (0, f"OK: {lab.catalogue}: 2 images (python, torch)\n")
    lab.catalogue.write_text(CATALOGUE + 'minimum = { fgpu = "3" }\n')
    assert lab.fgpu("check") == (
        1,
        'fgpu: image "torch": minimum.fgpu: 3 is more than the largest GPU has (2), so no user sees it; '
        "write at most 2\n",
    )
    lab.catalogue.write_text(CATALOGUE + "x = 1\n")
    line = 'catalogue.toml:11: image "torch": x: unknown key; known: '
    assert lab.fgpu("check")[0] == 1
    assert lab.fgpu("check")[1].startswith(f"fgpu: {line}")
    # Without a last good one nothing can be laid over it.
    status, said = lab.fgpu("disable", "torch")
    assert status == 1
    assert line in said
    other = tmp_path / "other.toml"
    other.write_text(CATALOGUE)
    assert lab.fgpu("check", str(other)) == (0, f"OK: {other}: 2 images (python, torch)\n")
    other.write_text("")
    assert lab.fgpu("check", str(other)) == (
        1,
        "fgpu: other.toml: write an [[image]] for each image\n",
    )


def test_edit_of_a_removed_image_is_reported(lab: Lab) -> None:
    lab.fgpu("hide", "torch")
    lab.catalogue.write_text(CATALOGUE.partition('[[image]]\nslug = "torch"')[0])
    line = 'image "torch" is not in the file any more, and was edited'
    assert lab.fgpu("check") == (1, f"fgpu: {line}\n")
    assert lab.fgpu("list")[1].endswith(f"problem: {line}\n")
    lab.fgpu("back", "torch")
    assert lab.fgpu("check")[0] == 0


@pytest.mark.parametrize("what", ["enable", "hide", "up", "back", "default"])
def test_unknown_image_is_refused(lab: Lab, what: str) -> None:
    assert lab.fgpu(what, "flow") == (1, 'fgpu: there is no image "flow"; there are python, torch\n')


@pytest.mark.parametrize("arguments", [["scan"], ["pin", "torch"]])
def test_local_processes_have_no_engine_to_scan(lab: Lab, arguments: list[str]) -> None:
    status, said = lab.fgpu(*arguments)
    assert status == 1
    assert "sessions are local processes" in said
