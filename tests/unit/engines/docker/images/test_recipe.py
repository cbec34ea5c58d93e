"""The recipe of a private image: what was installed, in words that nothing can be smuggled in."""

from __future__ import annotations

import io
import itertools
import json
import re
import tarfile
import tracemalloc
from collections.abc import Iterator

import pytest
from docker.errors import APIError, NotFound
from hypothesis import given
from hypothesis import strategies as st

from fgpuspawner.engines.docker.images import inspection as changed
from fgpuspawner.engines.docker.images.inspection import base_of, recorded
from fgpuspawner.engines.docker.images.saver import helper_of, remove_helpers
from fgpuspawner.images.recipe import Base, Environment, PackageChanges, dockerfile, packages_of, read_changes

SITE = "/opt/env/lib/python3.11/site-packages"
OWN = Environment("/opt/env", "3.11")
BASE = Base("lab/torch@sha256:" + "0" * 64, "sha256:" + "1" * 64, "1000:1000", True)


def test_packages_are_read_from_the_names_of_their_folders() -> None:
    found = read_changes(
        {
            SITE: 0,
            f"{SITE}/my_pkg": 1,
            f"{SITE}/my_pkg/__init__.py": 1,
            f"{SITE}/my_pkg-1.0.dist-info": 1,
            f"{SITE}/my_pkg-1.0.dist-info/METADATA": 1,
            f"{SITE}/torch-2.1.0+cpu.dist-info": 1,
            f"{SITE}/numpy-1.26.0.dist-info": 2,
            f"{SITE}/numpy-2.3.1.dist-info": 1,
            f"{SITE}/PyYAML-5.3-py3.7.egg-info": 1,
            f"{SITE}/old-1.dist-info": 2,
            "/opt/env/bin/my-program": 1,
            "/tmp/left": 1,
            "/etc/ld.so.preload": 1,
        }
    )
    assert found.installed == {
        OWN: {"my-pkg": "1.0", "torch": "2.1.0+cpu", "numpy": "2.3.1", "pyyaml": "5.3"},
    }
    assert found.uninstalled == {OWN: ["old"]}
    assert (found.elsewhere, found.unreadable, found.apt) == ([], 0, {})


@pytest.mark.parametrize(
    "piece",
    [b"\n", b"a\n", b"%07x\n", b"Package: a\n", b"%07x: b\n", b" x\n"],
)
def test_invalid_package_list_takes_little_memory(piece: bytes) -> None:
    many = 2**18 // len(piece % 0 if b"%" in piece else piece)
    status = b"".join(piece % n if b"%" in piece else piece for n in range(many))
    tracemalloc.start()
    try:
        assert packages_of(status) == {}
        assert tracemalloc.get_traced_memory()[1] < len(status)
    finally:
        tracemalloc.stop()


def test_packages_belong_to_their_own_python() -> None:
    found = read_changes(
        {
            "/usr/local/lib/python3.11/dist-packages/a-1.dist-info": 1,
            "/usr/local/lib/python3.8/site-packages/b-2.dist-info": 1,
        }
    )
    assert {own.program: names for own, names in found.installed.items()} == {
        "/usr/bin/python3": {"a": "1"},
        "/usr/local/bin/python3": {"b": "2"},
    }


def test_other_changed_files_are_listed_once() -> None:
    found = read_changes(
        {
            f"{SITE}/a;rm -rf ~-1.0.dist-info": 1,
            f"{SITE}/b-$(id).dist-info": 1,
            f"{SITE}/c-1.0'\nRUN evil.dist-info": 1,
            "/srv/data\nRUN evil/x": 1,
            "/opt/tools/one": 1,
            "/opt/tools/two": 1,
        }
    )
    text = dockerfile(found, BASE, name="alice/torch:1")
    assert found.unreadable == 3
    assert "# Not in here: 3 Python packages without a name and version." in text
    assert "#   /opt/tools" in text
    assert "evil" not in [line.partition(" ")[2] for line in text.splitlines() if line.startswith("RUN")]
    assert [line for line in text.splitlines() if line.startswith("RUN")] == []


def test_dockerfile_names_the_digest_and_exact_versions() -> None:
    changes = PackageChanges(
        {OWN: {"b": "2.0", "a": "1.0+cu1"}}, {OWN: ["old"]}, {"curl": "7.88-1+b2"}, ["nano"]
    )
    assert dockerfile(changes, BASE, name="alice/torch:1") == (
        f"""\
FROM {BASE.reference}
# Where pip finds packages, if not on its usual index: docker build --build-arg PIP_INDEX_URL=...
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
# alice/torch:1
USER root
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
    curl=7.88-1+b2
RUN apt-get remove -y nano
USER 1000:1000
RUN /opt/env/bin/python3 -m pip uninstall -y old
RUN /opt/env/bin/python3 -m pip install --no-deps \\
    'a==1.0+cu1' \\
    'b==2.0'
"""
    )


def test_recipe_of_an_image_of_an_image_continues_the_first() -> None:
    first = dockerfile(PackageChanges({OWN: {"a": "1"}}), BASE, name="alice/torch:1")
    second = dockerfile(PackageChanges({OWN: {"b": "2"}}), BASE, name="alice/torch:2", before=first)
    assert second.startswith(first)
    assert second.count("FROM ") == 1
    assert second.index("'a==1'") < second.index("# alice/torch:2") < second.index("'b==2'")


def test_base_without_a_registrys_digest_has_name_and_id() -> None:
    inspected = {"Id": "sha256:ab", "RepoDigests": [], "Config": {"User": "1000:1000"}}
    base = base_of(inspected, "fgpuspawner/base:0.1")
    assert base == Base("fgpuspawner/base:0.1", "sha256:ab", "1000:1000", False)
    text = dockerfile(PackageChanges(), base, name="a/b:1")
    assert text.startswith(
        "# Not of a registry: on its engine it was sha256:ab.\nFROM fgpuspawner/base:0.1\n"
    )
    assert base_of({**inspected, "RepoDigests": ["lab/x@sha256:1"]}, "lab/x:1").reference == "lab/x@sha256:1"


STATUS = b"""\
Package: curl
Status: install ok installed
Version: 7.88.1-10+deb12u5
Description: words
 Version: 666

Package: gone
Status: deinstall ok config-files
Version: 1

Package: e vil
Status: install ok installed
Version: 1

Package: worse
Status: install ok installed
Version: 1;id
"""


def test_only_installed_packages_with_valid_names_are_read_from_dpkg() -> None:
    assert packages_of(STATUS) == {"curl": "7.88.1-10+deb12u5"}
    assert packages_of(b"\xff\xfe nothing") == {}


SHAPE = re.compile(
    r"#[A-Za-z0-9._/:@+? ,=-]*|FROM [a-z0-9./:@_-]+|ARG [A-Z_]+|USER [a-z0-9:]+"
    r"|RUN [A-Za-z0-9._/ -]+( \\)?|    '[A-Za-z0-9._+!=-]+'( \\)?|"
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([SITE, "/opt/x y/lib/python3.1/site-packages", "/srv", ""]),
            st.text(max_size=20),
            st.sampled_from(["-1.0.dist-info", ".dist-info", "", "-1.egg-info", "\\"]),
            st.integers(0, 2),
        ),
        max_size=8,
    )
)
def test_file_names_cannot_add_lines_to_a_recipe(
    entries: list[tuple[str, str, str, int]],
) -> None:
    changed = {f"{folder}/{name}{end}": kind for folder, name, end, kind in entries}
    text = dockerfile(read_changes(changed), BASE, name="alice/torch:1")
    for line in text.split("\n"):
        assert SHAPE.fullmatch(line), line


@pytest.mark.parametrize("name", ["a'b", "a\\", "-e", "--index-url", "a b", ".", "a/b", "a==1"])
def test_invalid_package_names_are_ignored(name: str) -> None:
    assert read_changes({f"{SITE}/{name}-1.0.dist-info": 1}).installed == {}


class FakeEngine:
    """An engine with containers, by name, each with its dpkg status file; ``killed`` comes when one is read."""

    def __init__(self, **containers: bytes) -> None:
        self.files = containers
        self.volumes_kept: list[str] = []
        self.killed = False
        self.changes: Iterator[bytes] = iter(())
        self.taken = 0

    def _url(self, path: str, container: str) -> str:
        return path.format(container)

    def _get(self, url: str, *, stream: bool) -> FakeEngine:
        assert (url, stream) == ("/containers/box/changes", True)
        return self

    def _raise_for_status(self, answer: FakeEngine) -> None:
        assert answer is self

    def iter_content(self, most: int) -> Iterator[bytes]:
        for piece in self.changes:
            self.taken += len(piece)
            yield piece

    def close(self) -> None:
        self.changes = iter(())

    def inspect_container(self, container: str) -> dict[str, str]:
        return {"Image": "sha256:base"}

    def create_container(self, image: str, command: list[str], *, name: str, **_: object) -> dict[str, str]:
        if name in self.files:
            raise APIError("Conflict. The container name is already in use")
        self.files[name] = b"Package: nano\nStatus: install ok installed\nVersion: 1\n"
        return {"Id": name}

    def remove_container(self, container: str, *, force: bool, v: bool = False) -> None:
        if container not in self.files:
            raise NotFound("no such container")
        if not v:
            self.volumes_kept.append(container)
        if not self.killed:
            del self.files[container]

    def get_archive(self, container: str, path: str) -> tuple[list[bytes], object]:
        if self.killed:
            raise KeyboardInterrupt
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            entry = tarfile.TarInfo("status")
            entry.size = len(self.files[container])
            tar.addfile(entry, io.BytesIO(self.files[container]))
        return [packed.getvalue()], None

    def containers(self, **_: object) -> list[dict[str, object]]:
        return [{"Id": name, "Names": [f"/{name}"]} for name in self.files]


def told(*added: str) -> Iterator[bytes]:
    """Return what an engine tells of files that were added, a few bytes at a time."""
    text = json.dumps([{"Path": path, "Kind": 1} for path in added]).encode()
    return iter(text[at : at + 7] for at in range(0, len(text), 7))


CURL = b"Package: curl\nStatus: install ok installed\nVersion: 7\n"


def test_helper_container_is_removed_also_after_a_kill() -> None:
    engine = FakeEngine(box=CURL)
    helper = helper_of("0123456789ab", 7)
    engine.killed, engine.changes = True, told("/var/lib/dpkg/status")
    with pytest.raises(KeyboardInterrupt):
        recorded(engine, "box", BASE, name="alice/torch:1", helper=helper)
    assert set(engine.files) == {"box", helper}
    engine.killed, engine.changes = False, told("/var/lib/dpkg/status")
    text = recorded(engine, "box", BASE, name="alice/torch:1", helper=helper)
    assert "curl=7" in text
    assert "apt-get remove -y nano" in text
    assert (set(engine.files), engine.volumes_kept) == ({"box"}, [])


def test_only_helper_containers_are_removed() -> None:
    own, others = "fgpu-0123456789ab", ("fgpu-0123456789ab-12-1", "my-fgpu-0123456789ab-carrier-7")
    others = (*others, "fgpu-0123456789ab-carrier-7x", "fgpu-0123456789abc-carrier-7")
    engine = FakeEngine(**dict.fromkeys((f"{own}-carrier-7", f"{own}-carrier-12", *others), b""))
    remove_helpers(engine, "0123456789ab")
    assert (set(engine.files), engine.volumes_kept) == (set(others), [])


def the_recipe(engine: FakeEngine, before: str | None = None) -> str:
    return recorded(engine, "box", BASE, name="alice/torch:1", helper="helper", before=before)


def test_changed_files_are_read_from_the_engines_answer() -> None:
    engine = FakeEngine()
    engine.changes = told(f"{SITE}/a-1.dist-info", '/srv/a{"b/c', "/srv/\u00e9\n/x")
    text = the_recipe(engine)
    assert "'a==1'" in text
    assert "#   /srv/a??b/c" in text
    engine.changes = iter([b"null\n"])
    assert "# No package was installed or removed." in the_recipe(engine)
    engine.changes = iter([b'[{"Path":"/srv/a","Ki'])
    assert "# It could not be recorded what was installed" in the_recipe(engine)


def test_too_many_changed_files_give_no_recipe_and_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine()
    # It never ends; only its beginning is read.
    engine.changes = itertools.repeat(b'{"Path":"/srv/x","Kind":1},' * 40_000)
    text = the_recipe(engine, before="FROM lab/x\nRUN one\n")
    assert text.startswith("FROM lab/x\nRUN one\n")
    assert "at most 32 MiB of their names are looked at" in text
    assert engine.taken < 40 * 2**20
    monkeypatch.setattr(changed, "MOST_CHANGES", 10)
    engine.changes = told(*(f"/srv/{n}" for n in range(11)))
    assert "more than 10 files have changed" in the_recipe(engine)


def test_a_recipe_has_a_limited_number_of_environments_and_of_characters() -> None:
    sites = [f"/opt/e{n:04}/lib/python3.11/site-packages" for n in range(120)]
    text = dockerfile(read_changes({f"{site}/a-1.dist-info": 1 for site in sites}), BASE, name="a/b:1")
    assert text.count("RUN ") == 50
    assert "# Not in here: what was installed in 70 more Python environments." in text
    engine = FakeEngine()
    engine.changes = told(*(f"{site}/{'a' * 100}{n}-1.dist-info" for site in sites[:30] for n in range(100)))
    text = the_recipe(engine)
    assert "at most 262144 are kept" in text
    assert len(text) < 1000


def test_environments_made_by_the_session_are_named_only() -> None:
    packages = ("/tmp/pip-build-env-x/overlay", "/srv/venv", "/srv/conda/envs/own", "/opt/env")
    added = [f"{prefix}/lib/python3.11/site-packages/a-1.dist-info" for prefix in packages]
    found = read_changes(
        dict.fromkeys([*added, "/srv/venv/pyvenv.cfg", "/srv/conda/envs/own/bin/python3.11"], 1)
    )
    assert found.made == ["/srv/conda/envs/own", "/srv/venv"]
    text = dockerfile(found, BASE, name="alice/torch:1")
    assert [line for line in text.splitlines() if line.startswith("RUN")] == [
        "RUN /opt/env/bin/python3 -m pip install --no-deps \\"
    ]
    assert "# Not in here: the Python environment /srv/venv, which the session made." in text
    # What a later session installs there has no interpreter in what the recipe builds, either.
    later = read_changes(dict.fromkeys([path.replace("/a-1.", "/b-1.") for path in added], 1))
    assert later.made == []
    more = dockerfile(later, BASE, name="alice/torch:2", before=text).removeprefix(text)
    assert more.count("RUN ") == 1
    assert "RUN /opt/env/bin/python3" in more


def test_scripts_belong_to_their_environment() -> None:
    prefix = "/a/b/c/d/e/f/g/h"
    changed = {f"{prefix}/lib/python3.11/site-packages/a-1.dist-info": 1, f"{prefix}/bin/a/b": 1}
    assert read_changes(changed).elsewhere == []
    assert read_changes({**changed, "/a/bin/x": 1}).elsewhere == ["/a/bin/x"]
