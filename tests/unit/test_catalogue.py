"""The image catalogue: what is read, who sees what, and the exact words of every refusal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fgpu_scheduler import FGPUError
from fgpuspawner.images.catalogue import Catalogue, CatalogueError, Image, load_catalogue

SHIPPED = Path(__file__).parents[2] / "images" / "catalogue.toml"

PYTHON = """
[[image]]
slug = "python"
name = "Python 3.11"
framework = "python"
version = "3.11"
python = "3.11"
reference = "fgpuspawner/base:0.1"
default = true
"""
TORCH = """
[[image]]
slug = "torch"
name = "PyTorch 2.13"
framework = "pytorch"
version = "2.13"
python = "3.12"
description = "With CUDA."
reference = "registry.example:5000/lab/torch:2.13"
environment = "/opt/torch"
groups = ["vision", "nlp"]
users = ["alice"]
"""


def load(folder: Path, text: str | bytes) -> Catalogue:
    path = folder / "catalogue.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_catalogue(path)


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(CatalogueError) as caught:
        load(folder, text)
    return str(caught.value)


def test_the_shipped_catalogue_has_python_as_its_default() -> None:
    catalogue = load_catalogue(SHIPPED)
    assert [image.slug for image in catalogue.images] == ["python"]
    image = catalogue.get("python")
    assert image is not None
    assert (image.reference, image.environment) == ("fgpuspawner/base:0.1", "")
    assert catalogue.default_for("anybody", ()) == image


def test_the_examples_in_the_shipped_catalogue_can_be_uncommented(tmp_path: Path) -> None:
    head, _, entries = SHIPPED.read_text(encoding="utf-8").partition("[[image]]")
    assert head.startswith("#")
    uncommented = "[[image]]" + entries.replace("\n# ", "\n")
    slugs = [image.slug for image in load(tmp_path, uncommented).images]
    assert slugs == ["python", "pytorch-2-13", "tensorflow-1-15"]


def test_every_key_is_read_and_the_file_gives_the_order(tmp_path: Path) -> None:
    assert load(tmp_path, TORCH + PYTHON).images == (
        Image(
            slug="torch",
            name="PyTorch 2.13",
            framework="pytorch",
            version="2.13",
            python="3.12",
            description="With CUDA.",
            reference="registry.example:5000/lab/torch:2.13",
            environment="/opt/torch",
            groups=("vision", "nlp"),
            users=("alice",),
        ),
        Image(
            slug="python",
            name="Python 3.11",
            framework="python",
            version="3.11",
            python="3.11",
            reference="fgpuspawner/base:0.1",
            default=True,
        ),
    )


def test_an_image_cannot_be_changed(tmp_path: Path) -> None:
    image = load(tmp_path, PYTHON).images[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        image.default = False  # type: ignore[misc]


def test_an_unknown_slug_is_no_image(tmp_path: Path) -> None:
    assert load(tmp_path, PYTHON).get("torch") is None


@pytest.mark.parametrize(
    ("user", "groups", "seen"),
    [
        ("bob", [], ["python"]),
        ("bob", ["biology"], ["python"]),
        ("bob", ["biology", "nlp"], ["torch", "python"]),
        ("alice", [], ["torch", "python"]),
        # A group of a user's name is not the user.
        ("bob", ["alice"], ["python"]),
        ("vision", [], ["python"]),
    ],
)
def test_an_image_is_seen_by_its_groups_and_users_only(
    tmp_path: Path, user: str, groups: list[str], seen: list[str]
) -> None:
    visible = load(tmp_path, TORCH + PYTHON).visible_to(user, groups)
    assert [image.slug for image in visible] == seen


def test_who_may_not_use_the_default_gets_their_first_image_or_none(tmp_path: Path) -> None:
    restricted = load(tmp_path, PYTHON + 'groups = ["staff"]\n' + TORCH)
    chosen = {
        name: restricted.default_for(name, groups)
        for name, groups in (("carol", ["staff"]), ("alice", []), ("bob", []))
    }
    slugs = {name: image.slug if image else None for name, image in chosen.items()}
    assert slugs == {"carol": "python", "alice": "torch", "bob": None}


@pytest.mark.parametrize(
    "reference",
    [
        "python",
        "python:3.12-slim-bookworm",
        "fgpuspawner/base:0.1",
        "ghcr.example/lab/a_b__c-d.e:v1",
        "localhost:5000/lab/image",
        "registry.example:5000/lab/image:1@sha256:" + "0" * 64,
        "sha256:" + "a" * 64,
    ],
)
def test_a_docker_reference_is_taken_as_it_is(tmp_path: Path, reference: str) -> None:
    catalogue = load(tmp_path, PYTHON.replace("fgpuspawner/base:0.1", reference))
    assert catalogue.images[0].reference == reference


@pytest.mark.parametrize(
    "reference",
    [
        "a b",
        "a;reboot",
        "$(id)",
        "`id`",
        "a|b",
        "a&b",
        "--privileged",
        "Upper/case:1",
        "name:",
        "name:tag:tag",
        "name:-tag",
        "name@sha256:abc",
        "https://registry.example/a",
        "a//b",
        "/a",
        "a/",
        "a..b",
        "a___b",
        "ä",
        # Non-ASCII digits are digits to a careless pattern.
        "a:\N{ARABIC-INDIC DIGIT ONE}",
    ],
)
def test_a_bad_reference_is_refused(tmp_path: Path, reference: str) -> None:
    message = refusal(tmp_path, PYTHON.replace("fgpuspawner/base:0.1", reference))
    assert message == (
        f'catalogue.toml:8: image "python": reference: "{reference}" cannot be used; '
        'write a Docker image reference such as "fgpuspawner/base:0.1"'
    )


def without(key: str) -> str:
    return "".join(line for line in PYTHON.splitlines(True) if not line.startswith(f"{key} ="))


def with_line(line: str) -> str:
    """The Python entry with this line in place of the one of the same key, or at its end."""
    key = line.partition("=")[0]
    lines = [line if old.startswith(key) else old for old in PYTHON.splitlines()]
    return "\n".join(lines if line in lines else [*lines, line]) + "\n"


REFUSED = {
    "no image": ("", "catalogue.toml: no image; write one [[image]] with default = true"),
    "an empty list": (
        "image = []",
        "catalogue.toml: no image; write one [[image]] with default = true",
    ),
    "single brackets": (
        PYTHON.replace("[[image]]", "[image]"),
        'catalogue.toml: "image" must be a list of tables: write [[image]], with two brackets',
    ),
    "no tables": (
        "image = [1]",
        'catalogue.toml: "image" must be a list of tables: write [[image]], with two brackets',
    ),
    "another table": (
        PYTHON + "[[images]]\n",
        'catalogue.toml: unknown table "images"; every image is an [[image]]',
    ),
    "broken in a line": (
        with_line("name = Python"),
        "catalogue.toml:4: not TOML: Invalid value",
    ),
    "broken at the end": (
        PYTHON + "name",
        "catalogue.toml:10: not TOML: Expected '=' after a key in a key/value pair",
    ),
    "a key twice": (
        PYTHON + 'slug = "b"\n',
        "catalogue.toml:10: not TOML: Cannot overwrite a value",
    ),
    "not UTF-8": (
        PYTHON.encode() + b"# \xff\n",
        "catalogue.toml:10: not UTF-8; save the file as UTF-8",
    ),
    "nested too deeply": (
        "a = " + "[" * 20_000,
        "catalogue.toml: not TOML that can be read: nested too deeply",
    ),
    "a misspelt key": (
        PYTHON + 'refrence = "a"\n',
        'catalogue.toml:10: image "python": refrence: unknown key; did you mean reference?',
    ),
    "an unknown key": (
        PYTHON + "gpu = 1\n",
        'catalogue.toml:10: image "python": gpu: unknown key; known: slug, name, framework, '
        "version, python, description, reference, environment, default, groups, users",
    ),
    "a key with a line break": (
        PYTHON + '"a\\nb" = 1\n',
        'catalogue.toml:10: image "python": "a\\nb": unknown key; known: slug, name, framework, '
        "version, python, description, reference, environment, default, groups, users",
    ),
    "no slug": (
        without("slug"),
        "catalogue.toml:2: image 1: slug: missing; write 1 to 40 of a-z, 0-9 and -",
    ),
    "no name": (without("name"), 'catalogue.toml:2: image "python": name: missing; write a text'),
    "no framework": (
        without("framework"),
        'catalogue.toml:2: image "python": framework: missing; write a text',
    ),
    "no version": (
        without("version"),
        'catalogue.toml:2: image "python": version: missing; write a text',
    ),
    "no python": (
        without("python"),
        'catalogue.toml:2: image "python": python: missing; write a version such as "3.11"',
    ),
    "no reference": (
        without("reference"),
        'catalogue.toml:2: image "python": reference: missing; '
        'write a Docker image reference such as "fgpuspawner/base:0.1"',
    ),
    "an empty slug": (
        with_line('slug = ""'),
        "catalogue.toml:3: image 1: slug: empty; write 1 to 40 of a-z, 0-9 and -",
    ),
    "a slug with capitals": (
        with_line('slug = "Python"'),
        'catalogue.toml:3: image 1: slug: "Python" cannot be used; write 1 to 40 of a-z, 0-9 and -',
    ),
    "a long slug": (
        with_line(f'slug = "{"a" * 41}"'),
        f'catalogue.toml:3: image 1: slug: "{"a" * 41}" cannot be used; write 1 to 40 of a-z, 0-9 and -',
    ),
    "a number for a text": (
        with_line("version = 3.11"),
        'catalogue.toml:6: image "python": version: 3.11 is a number; write a text',
    ),
    "a date for a text": (
        with_line("version = 2026-01-01"),
        'catalogue.toml:6: image "python": version: "2026-01-01" is a date or time; write a text',
    ),
    "a table for a text": (
        with_line("name = { en = 1 }"),
        'catalogue.toml:4: image "python": name: {"en": 1} is a table; write a text',
    ),
    "a blank name": (
        with_line('name = "  "'),
        'catalogue.toml:4: image "python": name: empty; write a text',
    ),
    "a name of two lines": (
        with_line('name = "a\\nb"'),
        'catalogue.toml:4: image "python": name: "a\\nb" has a line break or control character; remove it',
    ),
    "a long name": (
        with_line(f'name = "{"a" * 201}"'),
        'catalogue.toml:4: image "python": name: 201 characters; at most 200 are allowed',
    ),
    "a Python that is no version": (
        with_line('python = "three"'),
        'catalogue.toml:7: image "python": python: "three" cannot be used; write a version such as "3.11"',
    ),
    "a reference of two lines": (
        with_line('reference = "a:1\\n"'),
        'catalogue.toml:8: image "python": reference: "a:1\\n" has a line break or control '
        "character; remove it",
    ),
    "a long reference": (
        with_line(f'reference = "{"a" * 401}"'),
        'catalogue.toml:8: image "python": reference: 401 characters; at most 400 are allowed',
    ),
    "a relative environment": (
        with_line('environment = "envs/torch"'),
        'catalogue.toml:10: image "python": environment: "envs/torch" cannot be used; '
        'write an absolute path such as "/opt/torch", or "" for the Hub\'s own environment',
    ),
    "a text for a truth value": (
        with_line('default = "yes"'),
        'catalogue.toml:9: image "python": default: "yes" is a text; write true or false',
    ),
    "a number for a truth value": (
        with_line("default = 1"),
        'catalogue.toml:9: image "python": default: 1 is a number; write true or false',
    ),
    "a truth value for a text": (
        with_line("description = true"),
        'catalogue.toml:10: image "python": description: true is a truth value; write a text',
    ),
    "a text for groups": (
        with_line('groups = "lab"'),
        'catalogue.toml:10: image "python": groups: "lab" is a text; write a list such as ["lab"]',
    ),
    "a number among the users": (
        with_line('users = ["alice", 7]'),
        'catalogue.toml:10: image "python": users: 7 is a number; every entry must be a text',
    ),
    "a list among the users": (
        with_line('users = [["alice"]]'),
        'catalogue.toml:10: image "python": users: ["alice"] is a list; every entry must be a text',
    ),
    "a blank group": (
        with_line('groups = [" "]'),
        'catalogue.toml:10: image "python": groups: " " is no name; remove it',
    ),
    "nobody": (
        with_line("groups = []"),
        'catalogue.toml:10: image "python": groups: empty; '
        "leave the key out to allow everybody, or name somebody",
    ),
    "the same slug twice": (
        PYTHON + TORCH.replace('"torch"', '"python"'),
        'catalogue.toml:12: image 2: slug: "python" is image 1\'s already; slugs must differ',
    ),
    "no default": (
        without("default"),
        "catalogue.toml: no image is the default; write default = true in exactly one",
    ),
    "two defaults": (
        PYTHON + TORCH + "default = true\n",
        'catalogue.toml:22: image "torch": default: "python" is the default already; '
        "write true in exactly one",
    ),
    "an entry without a line of its own": (
        'image = [{ slug = "python" }]',
        'catalogue.toml: image "python": name: missing; write a text',
    ),
    "a header inside a text, so that lines cannot be told": (
        with_line('description = """a\n[[image]]"""'),
        'catalogue.toml: image "python": description: "a\\n[[image]]" has a line break or '
        "control character; remove it",
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_catalogue_is_refused_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert refusal(tmp_path, text) == message


def test_the_line_is_of_the_entry_that_is_wrong(tmp_path: Path) -> None:
    text = PYTHON + "# a remark\r\n" + TORCH.replace('"3.12"', '"x"').replace("\n", "\r\n")
    assert refusal(tmp_path, text).startswith('catalogue.toml:17: image "torch": python: ')


def test_a_long_value_is_cut_in_the_message(tmp_path: Path) -> None:
    message = refusal(tmp_path, with_line(f"name = [{'1, ' * 200}]"))
    assert message.endswith("1... is a list; write a text")
    assert len(message) < 160


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError) as caught:
        load_catalogue(tmp_path / "images.toml")
    assert str(caught.value) == ("images.toml: there is no such file; c.FGPU.catalogue names the catalogue")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError) as caught:
        load_catalogue(tmp_path)
    assert str(caught.value) == f"{tmp_path.name}: cannot be read: Is a directory"


def test_the_error_has_a_code_and_is_of_both_families(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError) as caught:
        load(tmp_path, "")
    assert caught.value.code == "bad_catalogue"
    assert isinstance(caught.value, FGPUError)
    assert isinstance(caught.value, ValueError)
