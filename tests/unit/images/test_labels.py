"""Labels, files and pins: an image's facts go out and come back the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fgpuspawner.images.catalogue import Catalogue, CatalogueError, Image, checked, parse_catalogue, written
from fgpuspawner.images.edits import pinned
from fgpuspawner.images.labels import entry_from, labels_of
from fgpuspawner.images.model import FoundImage

LEAST = Image("python", "Python", "python", "3.11", "3.11", "lab/python:1")
FULL = Image(
    slug="torch",
    name="PyTorch \"2\" \\ 'x' # é [",
    framework="pytorch",
    version="2.13",
    python="3.12",
    reference="lab/torch:2.13",
    description="With CUDA; $(id) {{ 1 }}",
    icon="flame",
    kernels=("python3", "torch-2.13"),
    gpu_architectures=("7.0", "10.0"),
    cuda="12.4",
    min_fgpu_milli=200,
    min_gpu_memory_mib=1024,
    min_cpu_milli=1500,
    min_memory_mib=2048,
    recommended_fgpu_milli=1000,
    recommended_gpu_memory_mib=4096,
    recommended_cpu_milli=4000,
    recommended_memory_mib=8192,
    deprecated="Removed in May.",
    groups=("vision, and more", "nlp"),
    users=("[alice]", "bob"),
)
ADMINISTRATORS = {
    "digest": "sha256:" + "a" * 64,
    "environment": "/opt/x",
    "sudo": True,
    "hidden": True,
    "enabled": False,
    "default": True,
}


def test_labels_cannot_set_what_administrators_decide() -> None:
    labels = labels_of(replace(FULL, **ADMINISTRATORS))  # type: ignore[arg-type]
    assert labels == labels_of(FULL)
    forged = {
        **labels,
        "fgpu.sudo": "true",
        "fgpu.default": "true",
        "fgpu.digest": "x",
        "fgpu.enabled": "false",
    }
    assert checked(entry_from(forged, FULL.reference)) == FULL


def test_lists_in_labels_are_separated_by_commas() -> None:
    labels = labels_of(FULL)
    assert labels["fgpu.gpu_architectures"] == "7.0,10.0"
    assert labels["fgpu.groups"] == '["vision, and more", "nlp"]'
    by_hand = {**labels, "fgpu.gpu_architectures": " 7.0 , 10.0"}
    assert checked(entry_from(by_hand, FULL.reference)) == FULL


@pytest.mark.parametrize(
    ("label", "value", "line"),
    [
        ("fgpu.slug", "../x", '"../x": slug: "../x" cannot be used; write a-z, 0-9 and -, at most 40'),
        ("fgpu.name", "a\nb", '"torch": name: "a\\nb" cannot be used; write a text of one line, at most 200'),
        ("fgpu.kernels", "[1", '"torch": kernels: "[1" cannot be used; write different names of kernels'),
        (
            "fgpu.groups",
            '["a", {}]',
            '"torch": groups: {} cannot be used; write a list of names such as ["lab"]',
        ),
        ("fgpu.groups", "[" * 100_000, '"torch": groups: '),
        ("fgpu.minimum.cpu", "lots", '"torch": minimum.cpu: "lots" cannot be used; write a number above 0'),
        ("fgpu.minimum.memory_mib", "9" * 5000, '"torch": minimum.memory_mib: '),
    ],
)
def test_forged_labels_are_refused_in_one_line(label: str, value: str, line: str) -> None:
    with pytest.raises(CatalogueError) as caught:
        checked(entry_from({**labels_of(FULL), label: value}, FULL.reference))
    assert str(caught.value).startswith(f"image {line}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_exported_file_has_no_private_images() -> None:
    public = replace(LEAST, default=True)
    private = replace(LEAST, slug="alice/mine:1", owner="alice")
    assert parse_catalogue(written(Catalogue((public, private))).encode(), name="x") == Catalogue((public,))


A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def found(image_id: str, *digests: str) -> FoundImage:
    return FoundImage(image_id, (FULL.reference,), digests, {})


def test_repository_digest_is_found_under_docker_hub_names() -> None:
    for reference, listed in (
        ("docker.io/library/python:3", "python"),
        ("python:3", "python"),
        ("localhost:5000/a/b:1", "localhost:5000/a/b"),
        ("localhost:5000/a/b", "localhost:5000/a/b"),
    ):
        entry, _ = pinned(replace(LEAST, reference=reference), {"n1": found(A, f"{listed}@{B}")})
        assert entry["reference"] == f"{reference}@{B}"


def test_different_or_missing_images_cannot_be_pinned() -> None:
    with pytest.raises(CatalogueError, match="the engines have different images under lab"):
        pinned(FULL, {"n1": found(A), "n2": found(B)})
    with pytest.raises(CatalogueError, match="; pull or build it first"):
        pinned(FULL, {})
