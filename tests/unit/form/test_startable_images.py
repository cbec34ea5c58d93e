"""An image that can't start is not offered, and is refused with the reason wherever it is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launch_offers import settings

from fgpuspawner.form.offer import Offer, RequestRefused, make_offer
from fgpuspawner.form.options import parse, parse_to_start
from fgpuspawner.form.presets import one_click
from fgpuspawner.images.availability import Availabilities, Availability, Where
from fgpuspawner.images.model import Image

PYTHON = Image("python", "Python", "python", "3", "3", "r", default=True)
OLD = Image("tf-1", "TensorFlow 1.15", "tensorflow", "1.15", "3.6", "r")
HERE, UNKNOWN = Availability(Where.HERE), Availability()
BUILD = Availability(Where.CANNOT, "nothing has built it")
GROUPS = ("default", "class")
"""One node each, "a" and "b"; "none" has none."""


def offer(
    *images: Image, groups: tuple[str, ...] = (*GROUPS, "none"), **where: tuple[Availability, Availability]
) -> Offer:
    gpus = {"simulated": 1, "memory_mib": 8192}
    nodes = [{"name": n, "group": g, "gpus": gpus} for n, g in zip("ab", GROUPS, strict=True)]
    own = settings(nodes=nodes, groups={group: {} for group in GROUPS})
    at = {slug.replace("_", "-"): dict(zip("ab", both, strict=True)) for slug, both in where.items()}
    known = Availabilities(1, at)
    return make_offer(own, own.discover_nodes(), images, groups, user="ann", available=known)


def refused(choice: Offer, **raw: object) -> str:
    with pytest.raises(RequestRefused) as found:
        parse(raw, choice)
    return str(found.value)


def test_unstartable_image_is_hidden_and_refused_with_its_reason() -> None:
    choice = offer(PYTHON, OLD, tf_1=(BUILD, BUILD))
    assert choice.shown_images == (PYTHON,)
    said = "TensorFlow 1.15 can't start: nothing has built it; choose another image, or ask an administrator"
    assert refused(choice, image="tf-1") == f"image: {said}"
    assert not choice.shows("tf-1")
    presets = [{"name": "Old", "image": "tf-1"}, {"name": "Plain", "image": "python"}]
    assert [one["title"] for one in one_click(choice, presets, ())["presets"]] == ["Plain"]


def test_image_startable_on_some_node_is_offered() -> None:
    assert offer(PYTHON, OLD).shown_images == (PYTHON, OLD)
    assert offer(PYTHON, OLD, tf_1=(UNKNOWN, BUILD)).shown_images == (PYTHON, OLD)


def test_image_of_another_group_is_refused() -> None:
    choice = offer(PYTHON, OLD, tf_1=(BUILD, HERE))
    assert parse({"image": "tf-1", "group": "class"}, choice).image == "tf-1"
    assert "image: TensorFlow 1.15 in default can't start: nothing has built it" in refused(
        choice, image="tf-1"
    )


def test_preselected_image_starts_in_preselected_group() -> None:
    both = {"python": (BUILD, HERE), "tf_1": (HERE, HERE)}
    cases: list[dict[str, tuple[Availability, Availability]]] = [{}, both, both | {"tf_1": (BUILD, HERE)}]
    defaults = [offer(OLD, PYTHON, **where).default for where in cases]
    assert [(one.image, one.resource_group) for one in defaults] == [
        ("python", "default"),
        ("tf-1", "default"),
        ("python", "class"),
    ]


def test_without_startable_images_each_reason_is_listed() -> None:
    with pytest.raises(RequestRefused) as found:
        offer(PYTHON, replace(OLD, hidden=True), python=(BUILD, BUILD), tf_1=(BUILD, BUILD))
    assert [refusal.message.partition(":")[2].strip() for refusal in found.value.refusals] == [
        "Python can't start: nothing has built it; choose another image, or ask an administrator"
    ]
    with pytest.raises(RequestRefused, match="you may use no image"):
        offer(replace(OLD, hidden=True), tf_1=(BUILD, BUILD))


def test_waiting_request_keeps_its_place_without_its_image() -> None:
    """As after a restart of the Hub, while the registry does not answer."""
    asked = parse({"image": "tf-1"}, offer(PYTHON, OLD))
    waiting, now = asked.for_server(""), offer(PYTHON, OLD, tf_1=(BUILD, BUILD))
    assert parse_to_start(asked.as_options(), now, waiting) == (asked, "")
    # The default image, as it was when it was asked for.
    python = parse({}, offer(PYTHON, OLD)).for_server("")
    away = offer(PYTHON, OLD, python=(BUILD, BUILD))
    assert parse_to_start({}, away, python)[0].image == "python"
    assert parse({}, away).image == "tf-1"
    # Another image is judged as if nothing waited.
    for other in (python, None):
        with pytest.raises(RequestRefused, match="nothing has built it"):
            parse_to_start(asked.as_options(), now, other)
