"""The image catalogue: what is read, who sees what, and the exact words of every refusal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fgpu_scheduler import FGPUError, Request
from fgpuspawner.images.catalogue import Catalogue, CatalogueError, Image, load_catalogue
from fgpuspawner.images.entry import entry_of, read_entry
from fgpuspawner.images.values import shown

KNOWN = (
    "slug, name, framework, version, python, description, icon, kernels, reference, digest, environment, "
    "gpu_architectures, cuda, minimum, recommended, sudo, default, enabled, hidden, deprecated, groups, users"
)
SHIPPED = Path(__file__).parents[3] / "images" / "catalogue.toml"

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
FULL = """
icon = "flask"
kernels = ["python3", "tensorflow-1.15"]
digest = "sha256:DIGEST"
gpu_architectures = ["7.0", "10.0"]
cuda = "11.2"
recommended = { fgpu = 1, cpu = 2.5, memory_mib = 4096, gpu_memory_mib = 8192 }
sudo = true
enabled = false
hidden = true
deprecated = "Use PyTorch 2.13."
[image.minimum]
fgpu = "0.2"
cpu = "0.5"
memory_mib = 512.0
gpu_memory_mib = 1024
""".replace("DIGEST", "0" * 64)
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


def with_tricky_texts() -> str:
    return PYTHON.replace('"Python 3.11"', json.dumps("a \"b\" \\ 'c' # é []"))


def load(folder: Path, text: str | bytes) -> Catalogue:
    path = folder / "catalogue.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_catalogue(path)


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(CatalogueError) as caught:
        load(folder, text)
    return str(caught.value)


def test_the_shipped_catalogue_offers_python_and_knows_what_else_can_be_built() -> None:
    catalogue = load_catalogue(SHIPPED)
    assert [image.slug for image in catalogue.visible_to("alice", ())] == ["python"]
    image = catalogue.get("python")
    assert image is not None
    assert (image.reference, image.environment) == ("fgpuspawner/base:0.1", "")
    assert image.default
    assert catalogue.get("tensorflow-1-15") is None
    assert catalogue.entry("tensorflow-1-15") is not None


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


def test_every_optional_key_is_read_in_its_unit(tmp_path: Path) -> None:
    assert load(tmp_path, PYTHON + FULL).images == (
        Image(
            slug="python",
            name="Python 3.11",
            framework="python",
            version="3.11",
            python="3.11",
            reference="fgpuspawner/base:0.1",
            default=True,
            icon="flask",
            kernels=("python3", "tensorflow-1.15"),
            digest="sha256:" + "0" * 64,
            gpu_architectures=("7.0", "10.0"),
            cuda="11.2",
            min_fgpu_milli=200,
            min_cpu_milli=500,
            min_memory_mib=512,
            min_gpu_memory_mib=1024,
            recommended_fgpu_milli=1000,
            recommended_cpu_milli=2500,
            recommended_memory_mib=4096,
            recommended_gpu_memory_mib=8192,
            sudo=True,
            enabled=False,
            hidden=True,
            deprecated="Use PyTorch 2.13.",
        ),
    )


def test_what_is_disabled_is_started_by_nobody_and_what_is_hidden_only_by_its_slug(tmp_path: Path) -> None:
    other = TORCH.replace('groups = ["vision", "nlp"]', "").replace('users = ["alice"]', "")
    hidden = load(tmp_path, PYTHON + other + "hidden = true\n")
    assert [i.slug for i in hidden.visible_to("bob", ())] == ["python"]
    assert [i.slug for i in hidden.startable_by("bob", ())] == ["python", "torch"]
    assert hidden.get("torch") is not None
    disabled = load(tmp_path, PYTHON + other + "enabled = false\n")
    assert [i.slug for i in disabled.startable_by("bob", ())] == ["python"]
    assert disabled.get("torch") is None
    assert disabled.entry("torch") is not None


USERS = ("alice", "bob", "carol", "dan")


def test_a_private_image_is_its_owners_and_of_whom_it_is_shared_with(tmp_path: Path) -> None:
    public = load(tmp_path, PYTHON).images[0]
    private = dataclasses.replace(public, slug="alice/mine:1", owner="alice", users=("bob",), groups=("lab",))
    found = Catalogue((public, private))
    seen = {
        (user, groups): len(found.startable_by(user, groups))
        for user in ("alice", "bob", "carol")
        for groups in ((), ("lab",))
    }
    assert [who for who, count in seen.items() if count == 1] == [("carol", ())]
    alone = Catalogue((dataclasses.replace(private, users=(), groups=()),))
    assert [user for user in ("alice", "bob", "") if alone.startable_by(user, ("lab",))] == ["alice"]
    # To be started it has to be accepted, and only then it is among those that are shown.
    accepted = Catalogue((public, dataclasses.replace(private, accepted_by=("bob",), declined_by=("dan",))))
    waits = [Request(user, "", private.slug, "default", 0, 1, 1, groups=("lab",)) for user in USERS]
    for known, users in ((found, ["alice"]), (accepted, ["alice", "bob"])):
        assert [u for u in USERS if private.slug in [i.slug for i in known.visible_to(u, ("lab",))]] == users
        assert [request.user for request in waits if known.of(request)] == users


def test_somebody_elses_programs_are_all_that_not_its_owner_alone_has_made(tmp_path: Path) -> None:
    public = load(tmp_path, PYTHON).images[0]
    private = dataclasses.replace(public, slug="alice/mine:1", owner="alice", users=("bob",))
    assert [public.may_have_others_programs(user) for user in USERS] == [False] * 4
    assert [private.may_have_others_programs(user) for user in USERS] == [True] * 4
    alone = dataclasses.replace(private, owners_alone=True)
    assert [alone.may_have_others_programs(user) for user in USERS] == [False, True, True, True]


@pytest.mark.parametrize(
    "text",
    [PYTHON, TORCH + PYTHON, PYTHON + FULL, with_tricky_texts()],
    ids=["least", "two", "full", "tricky"],
)
def test_the_entry_of_an_image_is_read_as_that_image(tmp_path: Path, text: str) -> None:
    for image in load(tmp_path, text).images:
        assert read_entry(entry_of(image)) == image


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


LONG_HEX = "0x" + "f" * 6000
"""TOML has it, and Python reads it, but writes no number of so many digits."""

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
    "a number of too many digits": (
        PYTHON + f"x = {'1' * 5000}\n",
        "catalogue.toml: not TOML that can be read: a number in it has too many digits",
    ),
    "a number that cannot be written in digits": (
        with_line(f"slug = {LONG_HEX}"),
        "catalogue.toml:3: image 1: slug: what is too long to be shown is a number; "
        "write 1 to 40 of a-z, 0-9 and -",
    ),
    "an amount that cannot be written in digits": (
        PYTHON + f"minimum = {{ fgpu = {LONG_HEX} }}\n",
        'catalogue.toml:10: image "python": minimum.fgpu: what is too long to be shown cannot be used; '
        'write a number such as "0.5"',
    ),
    "MiB that cannot be written in digits": (
        PYTHON + f"minimum = {{ memory_mib = {LONG_HEX} }}\n",
        'catalogue.toml:10: image "python": minimum.memory_mib: what is too long to be shown cannot be used; '
        "write whole MiB, 1 to 1000000000",
    ),
    "a misspelt key": (
        PYTHON + 'refrence = "a"\n',
        'catalogue.toml:10: image "python": refrence: unknown key; did you mean reference?',
    ),
    "an unknown key": (
        PYTHON + "gpu = 1\n",
        f'catalogue.toml:10: image "python": gpu: unknown key; known: {KNOWN}',
    ),
    "a key with a line break": (
        PYTHON + '"a\\nb" = 1\n',
        f'catalogue.toml:10: image "python": "a\\nb": unknown key; known: {KNOWN}',
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
    "a minimum that is no table": (
        with_line("minimum = 1"),
        'catalogue.toml:10: image "python": minimum: 1 is a number; write a table such as { fgpu = "0.5" }',
    ),
    "an empty minimum": (
        with_line("minimum = {}"),
        'catalogue.toml:10: image "python": minimum: empty; leave the key out, or write an amount',
    ),
    "an unknown amount in an inline table": (
        with_line('minimum = { gpu = "0.5" }'),
        'catalogue.toml:10: image "python": minimum.gpu: unknown key; did you mean fgpu?',
    ),
    "a wrong amount in an inline table": (
        with_line('minimum = { cpu = "1", fgpu = "half" }'),
        "catalogue.toml:10: image \"python\": minimum.fgpu: 'half' is not a number such as 0.5",
    ),
    "a wrong amount in a table of its own": (
        PYTHON + '[image.minimum]\ncpu = "1"\n# as in the course\nfgpu = 0.0001\n',
        'catalogue.toml:13: image "python": minimum.fgpu: 0.0001 has more than three decimals',
    ),
    "a wrong amount with a dotted key": (
        PYTHON + 'minimum.cpu = "1"\n"minimum" . fgpu = -1\n',
        'catalogue.toml:11: image "python": minimum.fgpu: -1 is negative; it must be above 0',
    ),
    "an amount of nothing": (
        with_line("recommended = { fgpu = 0 }"),
        'catalogue.toml:10: image "python": recommended.fgpu: 0 is no amount; '
        "leave the key out, or write more than 0",
    ),
    "a truth value for an amount": (
        with_line("minimum = { cpu = true }"),
        'catalogue.toml:10: image "python": minimum.cpu: true is a truth value; write a number such as "0.5"',
    ),
    "memory that is no whole number": (
        with_line("minimum = { memory_mib = 1.5 }"),
        'catalogue.toml:10: image "python": minimum.memory_mib: 1.5 cannot be used; '
        "write whole MiB, 1 to 1000000000",
    ),
    "memory of nothing": (
        with_line("minimum = { gpu_memory_mib = 0 }"),
        'catalogue.toml:10: image "python": minimum.gpu_memory_mib: 0 cannot be used; '
        "write whole MiB, 1 to 1000000000",
    ),
    "recommended below the minimum": (
        PYTHON + '[image.minimum]\nfgpu = 1\n[image.recommended]\ncpu = 1\nfgpu = "0.5"\n',
        'catalogue.toml:14: image "python": recommended.fgpu: 0.5 is below the minimum of 1; '
        "write at least that",
    ),
    "an icon that there is not": (
        with_line('icon = "cat"'),
        'catalogue.toml:10: image "python": icon: there is no icon of this name; '
        "choose one of snake, flame, flow, chart, chip, book, flask, cube",
    ),
    "an icon from elsewhere": (
        with_line('icon = "data:image/svg+xml,<svg/>"'),
        'catalogue.toml:10: image "python": icon: there is no icon of this name; pictures from elsewhere are '
        "not shown; choose one of snake, flame, flow, chart, chip, book, flask, cube",
    ),
    "a short digest": (
        with_line('digest = "sha256:abc"'),
        'catalogue.toml:10: image "python": digest: "sha256:abc" cannot be used; '
        'write "sha256:" and 64 of 0-9 and a-f',
    ),
    "an architecture by its name": (
        with_line('gpu_architectures = ["volta"]'),
        'catalogue.toml:10: image "python": gpu_architectures: "volta" cannot be used; '
        'write compute capabilities such as "7.0"',
    ),
    "an architecture twice": (
        with_line('gpu_architectures = ["7.0", "7.0"]'),
        'catalogue.toml:10: image "python": gpu_architectures: "7.0" is there twice; write it once',
    ),
    "a kernel with a slash": (
        with_line('kernels = ["../python3"]'),
        'catalogue.toml:10: image "python": kernels: "../python3" cannot be used; write a kernel\'s name '
        "such as python3, at most 100 of A-Z, a-z, 0-9, ., _ and -",
    ),
    "no kernel": (
        with_line("kernels = []"),
        'catalogue.toml:10: image "python": kernels: empty; leave the key out, or list something',
    ),
    "a CUDA that is no version": (
        with_line('cuda = "12"'),
        'catalogue.toml:10: image "python": cuda: "12" cannot be used; write a version such as "12.4"',
    ),
    "sudo as a text": (
        with_line('sudo = "yes"'),
        'catalogue.toml:10: image "python": sudo: "yes" is a text; write true or false',
    ),
    "a key that only the next image has": (
        without("version") + TORCH,
        'catalogue.toml:2: image "python": version: missing; write a text',
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


def test_what_is_in_too_many_tables_is_told_without_showing_it() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = {"a": deep}
    assert shown(deep) == "what is too long to be shown"


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
