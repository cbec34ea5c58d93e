"""What administrators do with images: what is written, what is refused, and that it comes out as it was meant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fgpu_scheduler import ImageEdit
from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.edits import Action, Draft, Merged, Update, merge
from fgpuspawner.images.entry import entry_of
from fgpuspawner.images.model import Catalogue, Image

PYTHON = Image("python", "Python", "python", "3.11", "3.11", "lab/python:1", default=True)
TORCH = Image("torch", "PyTorch", "pytorch", "2.13", "3.12", "lab/torch:1")
FLOW = Image("flow", "TensorFlow", "tensorflow", "2.7", "3.9", "lab/flow:1", enabled=False)
FILE = Catalogue((PYTHON, TORCH, FLOW))
JAX = Image("jax", "JAX", "jax", "0.5", "3.12", "lab/jax:1", default=True)

Edits = tuple[ImageEdit, ...]


def written(edits: Edits, update: Update, *, now_s: int = 1) -> Edits:
    """Return the edits after an update, as the store has them."""
    kept = {edit.slug: edit for edit in edits if edit.slug not in update.drop}
    kept |= {edit.slug: replace(edit, changed_at_s=now_s) for edit in update.put}
    return tuple(kept.values())


def after(*steps: tuple[Action, str], edits: Edits = ()) -> tuple[Merged, Edits]:
    for number, (action, slug) in enumerate(steps):
        edits = written(edits, Draft(FILE, edits).do(action, slug), now_s=number)
    return merge(FILE, edits), edits


@pytest.mark.parametrize(
    ("there", "back", "key"),
    [
        (Action.DISABLE, Action.ENABLE, lambda i: i.enabled),
        (Action.HIDE, Action.SHOW, lambda i: not i.hidden),
    ],
)
def test_undone_action_leaves_no_edit(there: Action, back: Action, key: Callable[[Image], bool]) -> None:
    found, edits = after((there, "torch"))
    assert [key(image) for image in found.catalogue.images if image.slug == "torch"] == [False]
    found, edits = after((back, "torch"), edits=edits)
    assert (found.catalogue, edits) == (FILE, ())


def test_new_default_replaces_the_previous_one() -> None:
    def default(found: Merged) -> list[str]:
        return [image.slug for image in found.catalogue.images if image.default]

    found, edits = after((Action.DEFAULT, "torch"), (Action.DEFAULT, "flow"))
    assert default(found) == ["flow"]
    # Not again the torch of before, once flow is back to the file.
    found, _ = after((Action.BACK, "flow"), edits=edits)
    assert default(found) == ["python"]
    found, edits = after((Action.DEFAULT, "python"), edits=edits)
    assert default(found) == ["python"]
    # Also where the one before is of the database only.
    jax = written((), Draft(FILE, ()).add([entry_of(JAX)]))
    assert default(merge(FILE, jax)) == ["jax"]
    found, _ = after((Action.DEFAULT, "torch"), edits=jax)
    assert default(found) == ["torch"]


def test_images_move_by_one_place_and_not_beyond_the_ends() -> None:
    def order(found: Merged) -> list[str]:
        return [one.image.slug for one in found.listed]

    found, edits = after((Action.UP, "flow"))
    assert (order(found), found.reordered) == (["python", "flow", "torch"], True)
    found, edits = after((Action.UP, "flow"), (Action.UP, "flow"), edits=edits)
    assert order(found) == ["flow", "python", "torch"]
    found, edits = after((Action.DOWN, "torch"), edits=edits)
    assert order(found) == ["flow", "python", "torch"]
    # Only moved: nothing else of them differs.
    assert [one.differences for one in found.listed] == [(), (), ()]


def test_back_removes_edits_and_added_images() -> None:
    edits = written((), Draft(FILE, ()).add([entry_of(replace(JAX, default=False))]))
    found, edits = after((Action.HIDE, "torch"), (Action.BACK, "torch"), (Action.BACK, "jax"), edits=edits)
    assert (found.catalogue, edits) == (FILE, ())
    # Also for an image that has left the file.
    _, edits = after((Action.BACK, "old"), edits=(ImageEdit("old", changes={"name": "Old"}),))
    assert edits == ()


def test_edited_entry_is_stored_as_differences() -> None:
    wanted = entry_of(replace(TORCH, name="Torch", min_fgpu_milli=500))
    edits = written((), Draft(FILE, ()).edit("torch", wanted))
    assert edits[0].changes == {"name": "Torch", "minimum": {"fgpu": "0.5"}}
    assert merge(FILE, edits).catalogue.images[1] == replace(TORCH, name="Torch", min_fgpu_milli=500)
    assert written(edits, Draft(FILE, edits).edit("torch", entry_of(TORCH))) == ()


def test_an_added_image_keeps_its_entry_when_it_is_edited() -> None:
    edits = written((), Draft(FILE, ()).add([entry_of(JAX)]))
    edits = written(edits, Draft(FILE, edits).edit("jax", entry_of(replace(JAX, name="Jax"))))
    assert merge(FILE, edits).catalogue.entry("jax") == replace(JAX, name="Jax")


@pytest.mark.parametrize(
    ("act", "line"),
    [
        (lambda d: d.do(Action.HIDE, "none"), 'there is no image "none"; there are python, torch, flow'),
        (lambda d: d.do(Action.UP, "none"), 'there is no image "none"; there are python, torch, flow'),
        (lambda d: d.do(Action.BACK, "none"), 'there is no image "none"; there are python, torch, flow'),
        (
            lambda d: d.edit("torch", {**entry_of(TORCH), "reference": "a; reboot"}),
            'image "torch": reference: "a; reboot" cannot be used; write a Docker image reference such as ',
        ),
        (lambda d: d.add([entry_of(TORCH)]), 'image "torch": slug: there is one already; slugs must differ'),
        (lambda d: d.add([entry_of(JAX)] * 2), 'image "jax": slug: there is one already; slugs must differ'),
        (lambda d: d.add([{"slug": "x", "evil": 1}]), 'image "x": evil: unknown key; known: '),
    ],
)
def test_impossible_change_is_refused_in_one_line(act: Callable[[Draft], Update], line: str) -> None:
    with pytest.raises(CatalogueError) as caught:
        act(Draft(FILE, ()))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
