"""Image cards, and what an amount of fGPU means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launch_offers import PYTHON, offer, page

from fgpu_scheduler import Device
from fgpuspawner.form.advice import Advice
from fgpuspawner.form.image_cards import amount_meaning, amounts, cards
from fgpuspawner.images.model import Image

T4 = Device("GPU-0", "n1", 0, "T4", 16384, 4000)
A100 = replace(T4, uuid="GPU-1", index=1, model="A100", memory_mib=40960)
ODD = replace(T4, uuid="GPU-2", index=2, model="H100", memory_mib=81559)


@pytest.mark.parametrize(
    ("fgpu_milli", "words"),
    [
        (1000, "1/4 GPU: 4 GiB GPU memory, 25 % compute"),
        (100, "2 % of a GPU: 384 MiB GPU memory, 2 % compute"),
        (1200, "3/10 GPU: 4.75 GiB GPU memory, 30 % compute"),
        (4000, "1 GPU: 16 GiB GPU memory"),
        (8000, "2 GPUs: 16 GiB GPU memory each"),
    ],
)
def test_amount_is_described_as_part_of_a_gpu(fgpu_milli: int, words: str) -> None:
    assert amount_meaning(fgpu_milli, [T4, replace(T4, uuid="GPU-9", index=9)]) == {"T4": words}


def test_each_model_has_its_own_description() -> None:
    assert amount_meaning(2000, [T4, A100, ODD]) == {
        "T4": "1/2 GPU: 8 GiB GPU memory, 50 % compute",
        "A100": "1/2 GPU: 20 GiB GPU memory, 50 % compute",
        "H100": "1/2 GPU: 39.75 GiB GPU memory, 50 % compute",
    }
    assert amount_meaning(6000, [T4, replace(A100, capacity_milli=6000)]) == {
        "A100": "1 GPU: 40 GiB GPU memory"
    }
    assert amount_meaning(1000, []) == {}


def test_lent_compute_reads_at_least() -> None:
    strict = replace(T4, uuid="GPU-4", node_id="n2")
    least = "1/4 GPU: 4 GiB GPU memory, at least 25 % compute"
    assert amount_meaning(1000, [T4], {"n1"}) == {"T4": least}
    assert amount_meaning(1000, [T4, strict], {"n1"}) == {
        "T4": f"{least} or 1/4 GPU: 4 GiB GPU memory, 25 % compute"
    }
    assert amount_meaning(4000, [T4, strict], {"n1"}) == {"T4": "1 GPU: 16 GiB GPU memory"}


def test_model_with_two_sizes_shows_both() -> None:
    larger = replace(A100, uuid="GPU-3", memory_mib=81920)
    assert amount_meaning(4000, [A100, larger]) == {
        "A100": "1 GPU: 40 GiB GPU memory or 1 GPU: 80 GiB GPU memory"
    }


def image(slug: str, name: str, framework: str, **given: Any) -> Image:
    return Image(slug, name, framework, given.pop("version", "1"), "3.11", "r", **given)


OLD = image("tf-1", "TensorFlow 1.15", "tensorflow", version="1.15")
NEW = image("tf-2", "TensorFlow 2.21", "TensorFlow", version="2.21", description="With CUDA 12")
MINE = image("ann/more:1", "ann/more:1", "tensorflow", owner="ann")


def test_one_card_per_framework_with_private_images_last() -> None:
    found = cards(offer(MINE, OLD, PYTHON, NEW), {})
    told = {card["title"]: [i["short"] for i in card["images"]] for card in found}
    assert list(told.items()) == [
        ("TensorFlow", ["1.15", "2.21"]),
        ("Python", ["3.11"]),
        ("Private images", ["ann/more:1"]),
    ]


def test_card_shows_whole_name_without_framework_prefix() -> None:
    (card,) = cards(offer(OLD, image("course", "Course of 2026", "tensorflow")), {})
    assert [i["short"] for i in card["images"]] == ["TensorFlow 1.15", "Course of 2026"]


def test_radio_has_the_whole_name_and_a_description() -> None:
    shown = page(offer(PYTHON, OLD, NEW), given={"image": "tf-2"})
    names = [" ".join(label.text.split()) for label in shown.select(".version")]
    assert names == ["Python 3.11", "TensorFlow 1.15", "TensorFlow 2.21"]
    (checked,) = shown.select("[name=image][checked]")
    assert checked["value"] == "tf-2"
    (about,) = shown.select(f"#{checked['aria-describedby']}")
    assert "With CUDA 12" in about.text


def test_search_covers_names_versions_and_descriptions() -> None:
    (card,) = cards(offer(NEW), {})
    for word in ("tensorflow", "2.21", "cuda 12", "python 3.11"):
        assert word in card["images"][0]["search"]


def test_minimum_and_recommended_amounts_are_marked() -> None:
    needs = replace(NEW, min_gpu_memory_mib=3000, min_cpu_milli=500, recommended_fgpu_milli=1500)
    told = amounts(offer(PYTHON, needs), {})["tf-2"]
    # 0.8 of 2 fGPU is 3200 MiB of 8192; 0.7 is too little.
    assert told["least"]["default"] == {"fgpu": "0.8", "cpu": "0.5", "memory_gib": None}
    assert told["recommended"] == {"fgpu": True, "cpu": False, "memory_gib": False}
    assert told["amounts"]["default"]["fgpu"] == "1.5"
    plain = amounts(offer(PYTHON, needs), {})["python"]
    assert plain["least"]["default"] == {"fgpu": None, "cpu": None, "memory_gib": None}


def test_preselected_exact_memory_is_valid() -> None:
    for recommended_mib, filled_in in ((0, None), (3000, 3072), (3072, 3072), (24576, 8192)):
        wants = replace(NEW, recommended_gpu_memory_mib=recommended_mib)
        assert amounts(offer(PYTHON, wants), {})["tf-2"]["gpu_memory_mib"] == {"default": filled_in}


def test_advice_is_on_the_card() -> None:
    advice = {"tf-2": Advice("tf-2", 5, 1000, 300, 1331)}
    shown = page(offer(PYTHON, NEW), advice=advice)
    (said,) = shown.select(".advice")
    assert said.text == "Your last five runs peaked at 1.3 GiB: 0.3 fGPU would have been enough."
    found = amounts(offer(PYTHON, NEW), advice)
    assert (found["tf-2"]["enough"], found["python"]["enough"]) == ("0.3", None)
