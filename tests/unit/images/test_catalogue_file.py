"""The catalogue's file, written by the administrators' page: comments stay, and it is whole or as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fgpu_scheduler import ImageEdit, ImageEdits, Store
from fgpuspawner.images.catalogue import CatalogueError, parse_catalogue, replace_file, rewritten
from fgpuspawner.images.edits import write_to_file
from fgpuspawner.images.model import Catalogue

RAW = b"""# The images of our lab. Ask ada@lab.example before you change one.

# For everyone.
[[image]]
slug = "python"
name = "Python 3"        # shown in the form
framework = "python"
version = "3"
python = "3"
reference = "lab/python:1"
default = true

# For the course of spring.
[[image]]
slug = "course"
name = "Course"
framework = "python"
version = "3"
python = "3"
reference = "lab/course:1"
minimum = { fgpu = "0.5" }  # the exercises need it
groups = ["spring"]
"""
FILE = parse_catalogue(RAW, name="c")
PYTHON, COURSE = FILE.images


def written(*images: object) -> str:
    return rewritten(RAW, Catalogue(tuple(images)), name="c")  # type: ignore[arg-type]


def test_unchanged_catalogue_is_written_as_it_was() -> None:
    assert written(*FILE.images) == RAW.decode()


def test_only_changed_lines_change_and_comments_stay() -> None:
    text = written(replace(PYTHON, name='Plain "Python"'), replace(COURSE, min_fgpu_milli=1000, groups=()))
    assert text == RAW.decode().replace('"Python 3"', '"Plain \\"Python\\""').replace('"0.5"', '"1"').replace(
        'groups = ["spring"]\n', ""
    )


def test_images_are_added_removed_and_moved_with_their_comments() -> None:
    added = replace(COURSE, slug="autumn", name="Autumn", min_fgpu_milli=0)
    text = written(COURSE, PYTHON, added)
    assert (
        text.index("# For the course of spring.")
        < text.index('slug = "course"')
        < text.index("# For everyone.")
    )
    assert 'slug = "autumn"' in text
    alone = written(PYTHON)
    assert "spring" not in alone
    assert "# For everyone." in alone


@pytest.mark.parametrize("raw", [b'image = [{ slug = "python" }]\n', b"[[image"])
def test_file_that_is_written_in_another_way_is_left_alone(raw: bytes) -> None:
    with pytest.raises(CatalogueError):
        rewritten(raw, FILE, name="c")


def test_inline_list_of_images_is_left_alone() -> None:
    entry = (
        'slug = "python", name = "P", framework = "python", version = "3", python = "3", reference = "a:1"'
    )
    raw = f"image = [{{ {entry}, default = true }}]\n".encode()
    own = parse_catalogue(raw, name="c")
    with pytest.raises(CatalogueError, match="change it by hand"):
        rewritten(raw, Catalogue((replace(own.images[0], name="Q"),)), name="c")


def test_file_keeps_its_rights_and_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.toml"
    path.write_bytes(RAW)
    path.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    replace_file(link, "new\n")
    assert link.is_symlink()
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new\n", 0o640)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["catalogue.toml", "link.toml"]
    with pytest.raises(CatalogueError, match=r"gone.toml cannot be written \(No such file or directory\)"):
        replace_file(tmp_path / "gone.toml", "new\n")


def test_changes_of_the_database_move_into_the_file(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "catalogue.toml"
    path.write_bytes(RAW)
    edits = ImageEdits(store)
    edits.put([ImageEdit("course", changes={"hidden": True})], by="ada", now_s=1)
    write_to_file(store, path, by="ada")
    assert path.read_bytes() == RAW + b"hidden = true\n"
    assert edits.all() == ()
    # An image goes alone: another one's change stays where it is.
    edits.put([ImageEdit("python", changes={"name": "P"})], by="ada", now_s=2)
    write_to_file(store, path, by="ada", without="course")
    assert "course" not in path.read_text()
    assert 'name = "Python 3"' in path.read_text()
    assert [edit.slug for edit in edits.all()] == ["python"]
    with pytest.raises(
        CatalogueError, match=r"it is the default in catalogue\.toml; make another the default there"
    ):
        write_to_file(store, path, by="ada", without="python")


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ('image "a": reference: "x y" cannot be used; write', "reference"),
        ('image "a": minimum.fgpu: 0.3 cannot be asked for', "minimum.fgpu"),
        ('image "a": slug: there is one already', "slug"),
        ("nothing can be changed before: that", ""),
    ],
)
def test_refusal_names_the_field_of_the_form(message: str, key: str) -> None:
    assert CatalogueError(message).key == key
