"""An image's catalogue entry, labels and written file are read back as the same image."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fgpuspawner.images.catalogue import checked, parse_catalogue, written
from fgpuspawner.images.entry import entry_of
from fgpuspawner.images.icons import ICONS
from fgpuspawner.images.labels import entry_from, labels_of
from fgpuspawner.images.model import Catalogue, Image
from fgpuspawner.service.admin.images import entry_from_form, form_values

exact = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

PRINTABLE = st.characters().filter(str.isprintable)
TEXTS = st.text(PRINTABLE, min_size=1, max_size=30).filter(lambda text: text.strip() == text)
MAYBE = st.one_of(st.just(""), TEXTS)
NAMES = st.lists(TEXTS, max_size=3).map(tuple)
MILLI = st.integers(0, 10**6)
MIB = st.integers(0, 10**6)
CAPABILITIES = st.lists(st.sampled_from(["3.5", "7.0", "8.6", "12.0"]), unique=True, max_size=3).map(tuple)


@st.composite
def images(draw: st.DrawFn) -> Image:
    least = draw(st.tuples(MILLI, MIB, MILLI, MIB))
    usual = [draw(st.one_of(st.just(0), st.integers(max(1, low), 10**6 + 1))) for low in least]
    return Image(
        slug=draw(st.from_regex(r"[a-z0-9-]{1,40}", fullmatch=True)),
        name=draw(TEXTS),
        framework=draw(TEXTS),
        version=draw(TEXTS),
        python=draw(st.sampled_from(["3.7", "3.12", "3.12.1"])),
        reference=draw(st.sampled_from(["a", "lab/a:1", "lab.example:5000/a/b@sha256:" + "0" * 64])),
        description=draw(MAYBE),
        icon=draw(st.sampled_from(["", *ICONS])),
        kernels=tuple(draw(st.lists(st.sampled_from(["python3", "a.b_c-d"]), unique=True))),
        gpu_architectures=draw(CAPABILITIES),
        cuda=draw(st.sampled_from(["", "9.0", "12.4"])),
        min_fgpu_milli=least[0],
        min_gpu_memory_mib=least[1],
        min_cpu_milli=least[2],
        min_memory_mib=least[3],
        recommended_fgpu_milli=usual[0],
        recommended_gpu_memory_mib=usual[1],
        recommended_cpu_milli=usual[2],
        recommended_memory_mib=usual[3],
        deprecated=draw(MAYBE),
        groups=draw(NAMES),
        users=draw(NAMES),
    )


@exact
@given(images())
def test_catalogue_entry_labels_and_form_agree(image: Image) -> None:
    assert checked(entry_of(image)) == image
    assert checked(entry_from(labels_of(image), image.reference)) == image
    assert checked(entry_from_form(image.slug, form_values(entry_of(image)))) == image


@exact
@given(st.lists(images(), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_written_catalogue_file_is_read_back_unchanged(found: list[Image], sudo: bool, hidden: bool) -> None:
    assume(len({image.slug for image in found}) == len(found))
    first = replace(found[0], default=True, sudo=sudo, hidden=hidden, enabled=not hidden)
    whole = Catalogue((first, *found[1:]))
    assert parse_catalogue(written(whole).encode(), name="x") == whole
