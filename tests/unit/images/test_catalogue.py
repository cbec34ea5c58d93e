"""The image catalogue: how it is read, which users see an image, and the words of refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fgpu_scheduler import FGPUError, Request
from fgpuspawner.images.catalogue import Catalogue, CatalogueError, Image, load_catalogue
from fgpuspawner.images.entry import entry_of, read_entry, shown

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


def test_file_gives_the_order(tmp_path: Path) -> None:
    assert [image.slug for image in load(tmp_path, TORCH + PYTHON).images] == ["torch", "python"]


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


def test_disabled_image_cannot_start_and_hidden_one_starts_by_its_slug(tmp_path: Path) -> None:
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


def test_private_image_is_seen_by_its_owner_and_by_users_who_accepted_it(tmp_path: Path) -> None:
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


def test_only_an_image_made_by_its_owner_alone_is_free_of_others_programs(tmp_path: Path) -> None:
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


def with_line(line: str) -> str:
    """The Python entry with this line in place of the one of the same key, or at its end."""
    key = line.partition("=")[0]
    lines = [line if old.startswith(key) else old for old in PYTHON.splitlines()]
    return "\n".join(lines if line in lines else [*lines, line]) + "\n"


LONG_HEX = "0x" + "f" * 6000
"""Python reads this number from TOML, but writes no number of more than 4300 digits."""
TEXT = "write a text of one line, at most 200 characters"
DEFAULT_ONE = "default = true in exactly one"

REFUSED_FILES = {
    "no image": ("", ": write an [[image]] for each image"),
    "single brackets": (PYTHON.replace("[[image]]", "[image]"), ": write an [[image]] for each image"),
    "another table": (PYTHON + "[[images]]\n", ': unknown table "images"; write an [[image]] for each image'),
    "not TOML": (with_line("name = Python"), ": not TOML in UTF-8: Invalid value (at line 4, column 8)"),
    "not UTF-8": (PYTHON.encode() + b"# \xff\n", ": not TOML in UTF-8: 'utf-8' codec can't decode byte 0xff"),
    "too deep": ("a = " + "[" * 20_000, ": not TOML in UTF-8: maximum recursion depth"),
    "too many digits": (PYTHON + f"x = {'1' * 5000}\n", ": not TOML in UTF-8: Exceeds the limit"),
    "no default": (PYTHON.replace("default = true", ""), f": no image is the default; write {DEFAULT_ONE}"),
    "the second entry": (
        PYTHON + "# a remark\r\n" + TORCH.replace('"3.12"', '"x"').replace("\n", "\r\n"),
        ':12: image "torch": python: "x" cannot be used; write a version such as "3.11"',
    ),
    "an entry in a list": ('image = [{ slug = "python" }]', f': image "python": name: missing; {TEXT}'),
    "the same slug twice": (
        PYTHON + TORCH.replace('"torch"', '"python"'),
        ':11: image 2: slug: "python" is there twice; slugs must differ',
    ),
    "two defaults": (
        PYTHON + TORCH + "default = true\n",
        ':11: image "torch": default: "python" is the default already; write true in exactly one',
    ),
}
REFUSED_LINES = {
    'refrence = "a"': "refrence: unknown key; did you mean reference?",
    '"a\\nb" = 1': '"a\\nb": unknown key; known: slug, name, ',
    "version = 3.11": f"version: 3.11 cannot be used; {TEXT}",
    "version = 2026-01-01": f'version: "2026-01-01" cannot be used; {TEXT}',
    "name = { en = 1 }": f'name: {{"en": 1}} cannot be used; {TEXT}',
    'name = " "': f'name: " " cannot be used; {TEXT}',
    'name = "a\\nb"': f'name: "a\\nb" cannot be used; {TEXT}',
    'name = "a\\u0007b"': f'name: "a\\u0007b" cannot be used; {TEXT}',
    f'name = "{"a" * 201}"': f'name: "{"a" * 76}... cannot be used; {TEXT}',
    f'reference = "{"a" * 401}"': "write a Docker image reference such as ",
    'reference = "a:1\\n"': "write a Docker image reference such as ",
    'environment = "envs/torch"': "write an absolute path of letters, digits and . _ + @ -, or",
    'environment = "/envs/../etc"': "environment: ",
    'environment = "/envs/$(id)"': "environment: ",
    'environment = "/envs/a;b"': "environment: ",
    'default = "yes"': 'default: "yes" cannot be used; write true or false',
    "sudo = 1": "sudo: 1 cannot be used; write true or false",
    "description = true": "description: true cannot be used; write a text of one line, at most 1000 characters",
    'groups = "lab"': 'groups: "lab" cannot be used; write a list of names such as ["lab"]',
    'users = ["alice", 7]': "users: 7 cannot be used; write a list of names",
    'groups = [" "]': 'groups: " " cannot be used; write a list of names',
    'groups = ["a\\nb"]': 'groups: ["a\\nb"] cannot be used; write a list of names',
    "groups = []": 'groups: [] cannot be used; write a list of names such as ["lab"], or leave the key out for all users',
    "minimum = {}": 'minimum: {} cannot be used; write a table such as { fgpu = "0.5" }',
    f"kernels = {[f'k{n}' for n in range(1001)]}": "write different names of kernels",
    "minimum = 1": 'minimum: 1 cannot be used; write a table such as { fgpu = "0.5" }',
    'minimum = { gpu = "0.5" }': "minimum.gpu: unknown key; did you mean fgpu?",
    'minimum = { cpu = "1", fgpu = "half" }': 'minimum.fgpu: "half" cannot be used; write a number above 0',
    "minimum = { fgpu = 0.0001 }": "minimum.fgpu: 0.0001 cannot be used; write a number above 0 with at most three",
    "recommended = { fgpu = 0 }": "recommended.fgpu: 0 cannot be used; write a number above 0",
    "minimum = { cpu = true }": "minimum.cpu: true cannot be used; write a number above 0",
    f"minimum = {{ fgpu = {LONG_HEX} }}": "minimum.fgpu: a value too long to show cannot be used; write a number",
    "minimum = { memory_mib = 1.5 }": "minimum.memory_mib: 1.5 cannot be used; write whole MiB, 1 to 1000000000",
    "minimum = { gpu_memory_mib = 0 }": "minimum.gpu_memory_mib: 0 cannot be used; write whole MiB",
    "minimum = { memory_mib = true }": "minimum.memory_mib: true cannot be used; write whole MiB",
    'minimum.fgpu = 1\nrecommended = { cpu = 1, fgpu = "0.5" }': (
        "recommended.fgpu: 0.5 is below the minimum of 1; write at least that"
    ),
    'icon = "data:image/svg+xml,<svg/>"': "write one of snake, flame, flow, chart, chip, book, flask, cube",
    'digest = "sha256:abc"': 'digest: "sha256:abc" cannot be used; write "sha256:" and 64 of 0-9 and a-f',
    'gpu_architectures = ["volta"]': 'gpu_architectures: "volta" cannot be used; write different compute capabilities',
    'gpu_architectures = ["7.0", "7.0"]': 'gpu_architectures: ["7.0", "7.0"] cannot be used; write different',
    'kernels = ["../python3"]': 'kernels: "../python3" cannot be used; write different names of kernels',
    'cuda = "12"': 'cuda: "12" cannot be used; write a version such as "12.4"',
}
REFUSED_SLUGS = ('""', '"Python"', f'"{"a" * 41}"', LONG_HEX, '"a\\n"')


@pytest.mark.parametrize(("text", "message"), REFUSED_FILES.values(), ids=REFUSED_FILES)
def test_wrong_catalogue_is_refused_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    found = refusal(tmp_path, text)
    assert found.startswith(f"catalogue.toml{message}")
    assert "\n" not in found


@pytest.mark.parametrize(("line", "message"), REFUSED_LINES.items(), ids=range(len(REFUSED_LINES)))
def test_wrong_value_is_refused_with_its_key_and_what_to_write(
    tmp_path: Path, line: str, message: str
) -> None:
    found = refusal(tmp_path, with_line(line))
    assert found.startswith('catalogue.toml:2: image "python": ')
    assert message in found


@pytest.mark.parametrize("slug", REFUSED_SLUGS, ids=range(len(REFUSED_SLUGS)))
def test_wrong_slug_is_refused(tmp_path: Path, slug: str) -> None:
    assert refusal(tmp_path, with_line(f"slug = {slug}")).endswith(
        "write a-z, 0-9 and -, at most 40 characters"
    )


@pytest.mark.parametrize("key", ["slug", "name", "framework", "version", "python", "reference"])
def test_missing_key_is_refused(tmp_path: Path, key: str) -> None:
    text = "".join(line for line in PYTHON.splitlines(True) if not line.startswith(f"{key} ="))
    assert f": {key}: missing; write " in refusal(tmp_path, text + TORCH)


def test_value_nested_too_deeply_is_refused_without_showing_it() -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = {"a": deep}
    assert shown(deep) == "a value too long to show"


def test_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        CatalogueError, match=r"^images\.toml: there is no such file; c\.FGPU\.catalogue names"
    ):
        load_catalogue(tmp_path / "images.toml")
    with pytest.raises(CatalogueError, match=r": cannot be read: Is a directory$") as caught:
        load_catalogue(tmp_path)
    assert (caught.value.code, isinstance(caught.value, FGPUError)) == ("bad_catalogue", True)
