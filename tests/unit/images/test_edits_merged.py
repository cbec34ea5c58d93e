"""File and database together: what is in force, in which order, and where the two differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fgpu_scheduler import ImageEdit
from fgpuspawner.images.edits import Difference, Source, merge
from fgpuspawner.images.entry import entry_of
from fgpuspawner.images.model import Catalogue, Image

PYTHON = Image("python", "Python", "python", "3.11", "3.11", "lab/python:1", default=True)
TORCH = Image("torch", "PyTorch", "pytorch", "2.13", "3.12", "lab/torch:1", description="With CUDA.")
FLOW = Image("flow", "TensorFlow", "tensorflow", "2.7", "3.9", "lab/flow:1")
FILE = Catalogue((PYTHON, TORCH, FLOW))
JAX = Image("jax", "JAX", "jax", "0.5", "3.12", "lab/jax:1")


def slugs(found: object) -> list[str]:
    return [one.image.slug for one in found.listed]  # type: ignore[attr-defined]


def test_edit_overrides_the_file_by_key() -> None:
    edit = ImageEdit("torch", changes={"enabled": False, "description": None, "name": "Torch"})
    found = merge(FILE, [edit])
    assert found.catalogue.images[1] == replace(TORCH, enabled=False, description="", name="Torch")
    assert found.listed[1].source is Source.EDITED
    assert [str(difference) for difference in found.listed[1].differences] == [
        "name: Torch (in the file: PyTorch)",
        "enabled: no (in the file: yes)",
        "description: none (in the file: With CUDA.)",
    ]
    # What was not edited follows the file.
    newer = Catalogue((PYTHON, replace(TORCH, version="2.14"), FLOW))
    assert merge(newer, [edit]).catalogue.images[1].version == "2.14"


def test_differences_have_words_for_every_type() -> None:
    disabled = Catalogue((PYTHON, replace(TORCH, enabled=False, kernels=("a", "b"))))
    changes = {
        "enabled": None,
        "hidden": True,
        "kernels": None,
        "minimum": {"fgpu": "0.4", "memory_mib": 768},
    }
    found = merge(disabled, [ImageEdit("torch", changes=changes)])
    assert [str(difference) for difference in found.listed[1].differences] == [
        "minimum: fgpu 0.4, memory_mib 768 (in the file: none)",
        "hidden: yes (in the file: no)",
        "kernels: none (in the file: a, b)",
        "enabled: yes (in the file: no)",
    ]


def test_without_a_file_only_added_images_remain() -> None:
    found = merge(
        Catalogue(()), [ImageEdit("jax", entry_of(JAX)), ImageEdit("torch", changes={"hidden": True})]
    )
    assert found.catalogue == Catalogue((JAX,))
    assert [*found.lost] == ["torch"]


def test_edit_equal_to_the_file_is_no_difference() -> None:
    found = merge(FILE, [ImageEdit("torch", changes={"name": "PyTorch"})])
    assert (found.listed[1].source, found.listed[1].differences) == (Source.FILE, ())


def test_added_image_comes_last() -> None:
    found = merge(FILE, [ImageEdit("jax", entry_of(JAX), {"hidden": True})])
    assert found.listed[3].image == replace(JAX, hidden=True)
    assert found.listed[3].source is Source.ADDED


def test_an_added_image_that_the_file_has_now_counts_as_changes_of_it() -> None:
    file = Catalogue((*FILE.images, replace(JAX, name="From the file")))
    found = merge(file, [ImageEdit("jax", entry_of(JAX))])
    assert found.listed[3].differences == (Difference("name", "From the file", "JAX"),)


def test_wrong_edit_has_no_effect() -> None:
    file = Catalogue((PYTHON, replace(TORCH, min_fgpu_milli=2000)))
    found = merge(file, [ImageEdit("torch", changes={"recommended": {"fgpu": "1"}, "name": "Torch"})])
    assert found.catalogue == file
    assert found.problems == (
        'the edit of it has no effect: image "torch": recommended.fgpu: 1 is below the minimum of 2; write at least that',
    )


def test_lost_edits_are_reported() -> None:
    found = merge(FILE, [ImageEdit("old", changes={"name": "Old"}), ImageEdit("odd", {"slug": "odd"})])
    assert found.catalogue == FILE
    assert dict(found.lost) == {
        "old": 'image "old" is not in the file any more, and was edited',
        "odd": 'image "odd": name: missing; write a text of one line, at most 200 characters',
    }


def test_the_slug_cannot_be_edited() -> None:
    assert slugs(merge(FILE, [ImageEdit("torch", changes={"slug": "python"})])) == ["python", "torch", "flow"]


def test_newest_default_wins() -> None:
    edits = [
        ImageEdit("torch", changes={"default": True}, changed_at_s=9),
        ImageEdit("flow", changes={"default": True}, changed_at_s=5),
    ]
    found = merge(FILE, edits)
    assert [i.slug for i in found.catalogue.images if i.default] == ["torch"]
    assert found.listed[0].differences == (Difference("default", True, None),)


def test_default_of_the_file_stays() -> None:
    found = merge(FILE, [ImageEdit("python", changes={"default": None})])
    assert [i.slug for i in found.catalogue.images if i.default] == ["python"]


@pytest.mark.parametrize(
    ("positions", "order", "reordered"),
    [
        ({}, ["python", "torch", "flow"], False),
        ({"python": 0, "torch": 1, "flow": 2}, ["python", "torch", "flow"], False),
        ({"python": 2, "torch": 0, "flow": 1}, ["torch", "flow", "python"], True),
        # An image that is new in the file follows its predecessor there.
        ({"python": 1, "flow": 0}, ["flow", "python", "torch"], True),
        ({"torch": 1, "flow": 0}, ["python", "flow", "torch"], True),
    ],
)
def test_the_order_is_of_the_positions(positions: dict[str, int], order: list[str], reordered: bool) -> None:
    found = merge(FILE, [ImageEdit(slug, position=at) for slug, at in positions.items()])
    assert (slugs(found), found.reordered) == (order, reordered)
