"""What an image needs: refused below it, preselected with it, and said where nothing could ever hold it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bs4 import BeautifulSoup
from traitlets.config import Config

from fgpu_scheduler import Caps, Device, Node, Refusal, Request
from fgpuspawner.form import page as form
from fgpuspawner.form.offer import Offer, RequestRefused, make_offer
from fgpuspawner.form.options import parse, read_fields
from fgpuspawner.images.model import Image
from fgpuspawner.images.needs import between_steps, capability_of, never_held, runs_on
from fgpuspawner.settings import FGPU

PLAIN = Image("plain", "Plain", "python", "3.11", "3.11", "lab/plain:1", default=True)
CAPS = Caps(100)


def device(
    number: int, model: str = "Test GPU", *, memory_mib: int = 8192, capacity_milli: int = 1000
) -> Device:
    return Device(f"GPU-{number}", "n1", number, model, memory_mib, capacity_milli)


def node(*devices: Device, group: str = "default") -> Node:
    return Node("n1", group, 8000, 16384, devices)


def offer(image: Image, *devices: Device, hidden: tuple[Image, ...] = (), **settings: Any) -> Offer:
    config = Config()
    for name, value in {"groups": {"default": {}}, "fgpu_per_gpu": 1, **settings}.items():
        setattr(config.FGPU, name, value)
    own = FGPU.from_config(config)
    return make_offer(
        own, [node(*(devices or (device(0),)))], (PLAIN, image, *hidden), ("default",), user="bob"
    )


def refusal(found: Offer, **raw: object) -> Refusal:
    with pytest.raises(RequestRefused) as caught:
        parse({"image": "big", **raw}, found)
    (only,) = caught.value.refusals
    return only


def big(**facts: Any) -> Image:
    return replace(PLAIN, slug="big", name="Big", default=False, **facts)


@pytest.mark.parametrize(
    ("facts", "raw", "words", "nearest"),
    [
        ({"min_fgpu_milli": 300}, {"fgpu": "0.2"}, "0.2 is below the least of 0.3", "0.3"),
        ({"min_cpu_milli": 1500}, {"cpu": "1"}, "1 is below the least of 1.5", "1.5"),
        ({"min_memory_mib": 2048}, {"memory_mib": 1024}, "1024 MiB is below the least of 2048 MiB", "2048"),
        (
            {"min_gpu_memory_mib": 3000},
            {"fgpu": "0.3"},
            "0.3 comes with 2432 MiB of GPU memory, below",
            "0.4",
        ),
        (
            {"min_gpu_memory_mib": 3000},
            {"gpu_memory_mib": 2944},
            "2944 MiB is below the least of 3072",
            "3072",
        ),
        (
            {"min_fgpu_milli": 500},
            {"gpu_memory_mib": 2048},
            "2048 MiB is below the least of 4096 MiB",
            "4096",
        ),
    ],
)
def test_request_below_the_minimum_is_refused(
    facts: dict[str, Any], raw: dict[str, object], words: str, nearest: str
) -> None:
    (field,) = raw
    found = refusal(offer(big(**facts)), **raw)
    assert (found.field, found.code, found.nearest) == (field, "below_image", nearest)
    assert found.message.startswith(f"{field}: {words}")
    # What it says would do, does.
    parse({"image": "big", **raw, field: nearest}, offer(big(**facts)))
    # It is the image that needs it.
    parse({"image": "plain", **raw}, offer(big(**facts)))


def test_gpu_with_the_least_memory_decides() -> None:
    image = big(min_gpu_memory_mib=3000)
    two = offer(image, device(0), device(1, "Old GPU", memory_mib=4096))
    assert refusal(two, fgpu="0.5").nearest == "0.8"
    assert parse({"image": "big", "fgpu": "0.5", "gpu_model": "Test GPU"}, two).gpu_models == ("Test GPU",)


def test_request_without_amounts_gets_the_recommended_ones() -> None:
    usual = parse({"image": "plain"}, offer(big()))
    assert (usual.fgpu_milli, usual.cpu_milli, usual.memory_mib) == (500, 4000, 8192)
    recommended = big(
        recommended_fgpu_milli=200, recommended_cpu_milli=1000, recommended_memory_mib=512, min_cpu_milli=500
    )
    got = parse({"image": "big"}, offer(recommended))
    assert (got.fgpu_milli, got.cpu_milli, got.memory_mib) == (200, 1000, 512)
    got = parse({"image": "big"}, offer(big(min_fgpu_milli=700, min_cpu_milli=6000, min_memory_mib=12000)))
    assert (got.fgpu_milli, got.cpu_milli, got.memory_mib) == (700, 6000, 12000)
    got = parse({"image": "big"}, offer(big(min_gpu_memory_mib=6000)))
    assert got.fgpu_milli == 800
    # What is asked for is taken as it is, and of the rest what is recommended.
    got = parse({"image": "big", "fgpu": "0.3"}, offer(recommended))
    assert (got.fgpu_milli, got.cpu_milli) == (300, 1000)


def test_recommended_amounts_are_cut_to_the_largest_node() -> None:
    got = parse(
        {"image": "big"}, offer(big(recommended_fgpu_milli=5000, recommended_cpu_milli=9000), max_cpu=2)
    )
    assert (got.fgpu_milli, got.cpu_milli) == (1000, 2000)


NODES = (
    Node("wide", "default", 32000, 4096, (device(0), device(1))),
    Node("deep", "default", 4000, 65536, (device(2, capacity_milli=2000),)),
    # It has the most, but no GPU, and not for this group.
    Node("bare", "default", 10**6, 10**6, ()),
    Node("others", "others", 10**6, 10**6, (device(3, capacity_milli=4000),)),
)


@pytest.mark.parametrize(
    ("recommended", "expected"),
    [
        ({"fgpu": 2000, "cpu": 10**6, "memory": 10**6}, (2000, 32000, 4096)),
        # Only the other node has a GPU from which so much can be cut.
        ({"fgpu": 1500, "cpu": 10**6, "memory": 10**6}, (1500, 4000, 65536)),
        ({"fgpu": 1500, "cpu": 1000, "memory": 1024}, (1500, 1000, 1024)),
        ({"fgpu": 500, "cpu": 4000, "memory": 32768}, (500, 4000, 32768)),
        ({"fgpu": 9000, "cpu": 10**6, "memory": 10**6}, (2000, 32000, 4096)),
    ],
    ids=str,
)
def test_preselected_amounts_fit_one_node(
    recommended: dict[str, int], expected: tuple[int, int, int]
) -> None:
    image = big(
        recommended_fgpu_milli=recommended["fgpu"],
        recommended_cpu_milli=recommended["cpu"],
        recommended_memory_mib=recommended["memory"],
    )
    settings = FGPU.from_config(Config({"FGPU": {"groups": {"default": {}}, "fgpu_per_gpu": 1}}))
    found = make_offer(settings, NODES, (PLAIN, image), ("default",))
    got = parse({"image": "big"}, found)
    assert (got.fgpu_milli, got.cpu_milli, got.memory_mib) == expected
    # As the default it is what the form shows first.
    alone = make_offer(settings, NODES, (replace(image, default=True),), ("default",))
    assert parse({}, alone) == alone.default == got


@pytest.mark.parametrize(
    ("facts", "caps", "problem"),
    [
        (
            {"min_fgpu_milli": 2000},
            CAPS,
            "minimum.fgpu: 2 is more than the largest GPU has (1), so no user sees it; write at most 1",
        ),
        (
            {"min_gpu_memory_mib": 8193},
            CAPS,
            "minimum.gpu_memory_mib: 8193 is more than the largest GPU has (8192), so no user sees it; "
            "write at most 8192",
        ),
        (
            {"min_cpu_milli": 8001},
            CAPS,
            "minimum.cpu: 8.001 is more than the largest node has (8), so no user sees it; write at most 8",
        ),
        (
            {"min_memory_mib": 2**20},
            CAPS,
            "minimum.memory_mib: 1048576 is more than the largest node has (16384), so no user sees it; "
            "write at most 16384",
        ),
        (
            {"min_memory_mib": 4096},
            Caps(100, max_memory_mib=2048),
            "minimum.memory_mib: 4096 is more than c.FGPU.max_memory_mib is (2048), so no user sees it; "
            "write at most 2048",
        ),
    ],
)
def test_administrators_see_images_that_fit_no_node(facts: dict[str, Any], caps: Caps, problem: str) -> None:
    assert never_held(big(**facts), [node(device(0))], caps) == f'image "big": {problem}'


def test_image_that_fits_no_node_is_not_offered() -> None:
    found = offer(big(min_fgpu_milli=2000))
    assert [image.slug for image in found.images] == ["plain"]
    assert refusal(found).message == "image: there is no 'big'; choose one of plain"


def test_unknown_nodes_hide_no_image() -> None:
    needs = big(min_fgpu_milli=2000, min_cpu_milli=10**6, gpu_architectures=("7.0",))
    assert never_held(needs, [], CAPS) is None
    assert "minimum.cpu" in str(never_held(needs, [node()], CAPS))


def test_a_refused_link_to_a_hidden_image_is_shown_again_with_its_name() -> None:
    secret = replace(PLAIN, slug="secret", name="Secret", default=False, hidden=True)
    found = offer(big(), hidden=(secret,))
    for given, checked, named in (
        ({"image": "secret", "fgpu": "77"}, [], "secret"),
        ({"image": "big", "fgpu": "77"}, ["big"], ""),
        ({"fgpu": "77"}, ["plain"], ""),
    ):
        html = form.render(found, hub_prefix="/hub/", ticket="t", given=given)
        page = BeautifulSoup(html, "html.parser")
        assert [radio["value"] for radio in page.select("[name=image][checked]")] == checked
        assert [field["value"] for field in page.select("[name=image_name]")] == [named]


def test_amount_between_two_steps_is_refused_with_the_nearest() -> None:
    amounts = (100, 200, 300, 400, 1000)
    assert between_steps(big(min_fgpu_milli=200, recommended_fgpu_milli=1000), amounts) is None
    assert between_steps(big(recommended_fgpu_milli=350), amounts) == (
        'image "big": recommended.fgpu: 0.35 cannot be asked for; write 0.3 or 0.4'
    )
    assert between_steps(big(min_fgpu_milli=50), amounts) == (
        'image "big": minimum.fgpu: 0.05 cannot be asked for; write 0.1'
    )
    assert between_steps(big(recommended_fgpu_milli=350), ()) is None, "no machine is known yet"


def test_offered_amounts_respect_the_minimum() -> None:
    found = offer(big(min_gpu_memory_mib=2048), device(0), device(1))
    wanted = parse({"image": "big", "gpu_memory_mib": 4096, "compute_percent": 50}, found)
    amounts = tuple(other.fgpu_milli for other in found.others(wanted))
    assert amounts == (300, 400, 500, 600, 700, 800, 900, 1000, 2000)
    assert next(found.others(parse({"fgpu": "1"}, found))).fgpu_milli == 100


@pytest.mark.parametrize("asked", [{"fgpu": "1"}, {"gpu_memory_mib": 4096, "compute_percent": 55}])
def test_cpu_and_memory_follow_another_amount_unless_they_were_chosen(asked: dict[str, object]) -> None:
    found = offer(big())
    usual = {other.fgpu_milli: other for other in found.others(parse(asked, found))}[100]
    plain = parse({"fgpu": "0.1"}, found)
    assert (usual.cpu_milli, usual.memory_mib) == (plain.cpu_milli, plain.memory_mib)
    chosen = next(found.others(parse({**asked, "cpu": "3.7"}, found)))
    assert (chosen.cpu_milli, chosen.memory_mib) == (3700, plain.memory_mib)


def test_a_form_with_no_image_chosen_starts_none() -> None:
    found = offer(big())
    with pytest.raises(RequestRefused) as caught:
        parse(read_fields({"image_name": [" "], "cpu": ["many"]}), found)
    assert [r.field for r in caught.value.refusals] == ["image", "cpu"]
    assert caught.value.refusals[0].message == "image: none is chosen; choose one of plain, big"
    # A link that says none takes the default.
    assert parse(read_fields({}), found).image == "plain"


def test_form_names_no_hidden_image() -> None:
    config = Config({"FGPU": {"groups": {"default": {}}, "fgpu_per_gpu": 1}})
    covert = replace(PLAIN, slug="covert", name="Covert", hidden=True, recommended_fgpu_milli=300)
    found = make_offer(FGPU.from_config(config), [node(device(0))], (covert,), ("default",), user="bob")
    assert (found.default.image, found.default.fgpu_milli) == ("", 500)
    for raw, said in (
        ({}, "image: you are shown none; name one that you may use, or ask an administrator"),
        (
            read_fields({"image_name": [""]}),
            "image: you are shown none; name one that you may use, or ask an administrator",
        ),
        ({"image": "x"}, "image: there is no 'x'; name one that you may use, or ask an administrator"),
    ):
        with pytest.raises(RequestRefused) as caught:
            parse(raw, found)
        assert [(r.field, r.message, r.nearest) for r in caught.value.refusals] == [("image", said, None)]
    with pytest.raises(RequestRefused) as caught:
        parse({"cpu": "many"}, found)
    assert [r.field for r in caught.value.refusals] == ["image", "cpu"]
    assert "covert" not in form.render(found, hub_prefix="/hub/", ticket="t", given={}).lower()
    wanted = parse(read_fields({"image_name": ["covert"]}), found)
    assert (wanted.image, wanted.fgpu_milli) == ("covert", 300)


def test_form_takes_a_hidden_image_by_name() -> None:
    own = replace(PLAIN, slug="bob/mine:1", name="mine", default=False, owner="bob")
    found = offer(big(), hidden=(own,))
    fields = {"image": ["plain"], "image_name": [" bob/mine:1 "]}
    assert parse(read_fields(fields), found).image == "bob/mine:1"
    assert parse(read_fields({**fields, "image_name": [""]}), found).image == "plain"
    # Another user's image is refused in the words for one that does not exist.
    with pytest.raises(RequestRefused) as caught:
        parse(read_fields({**fields, "image_name": ["eve/mine:1"]}), found)
    assert str(caught.value) == "image: there is no 'eve/mine:1'; choose one of plain, big, bob/mine:1"


@pytest.mark.parametrize(
    ("model", "capability"),
    [
        ("NVIDIA GeForce RTX 5090", "12.0"),
        ("NVIDIA B200", "10.0"),
        ("NVIDIA H200", "9.0"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA A100-SXM4-40GB", "8.0"),
        ("NVIDIA A100-PCIE-40GB", "8.0"),
        ("NVIDIA A10", "8.6"),
        ("Tesla V100-SXM2-16GB", "7.0"),
        ("Tesla T4", "7.5"),
        ("NVIDIA GeForce RTX 3090", "8.6"),
        ("NVIDIA GeForce GTX 1080 Ti", "6.1"),
        ("NVIDIA L40S", "8.9"),
        ("Simulated GPU", None),
        ("NVIDIA A1000000", None),
    ],
)
def test_the_capability_of_a_model_is_known_by_its_name(model: str, capability: str | None) -> None:
    assert capability_of(model) == capability


def test_code_runs_on_later_minor_versions_of_the_same_major_one() -> None:
    ampere = big(gpu_architectures=("7.0", "8.0"))
    runs = [
        m
        for m in ("Tesla V100", "Tesla T4", "NVIDIA A100", "NVIDIA A10", "NVIDIA H200")
        if runs_on(ampere, m)
    ]
    assert runs == ["Tesla V100", "Tesla T4", "NVIDIA A100", "NVIDIA A10"]
    assert not runs_on(big(gpu_architectures=("8.6",)), "NVIDIA A100")
    assert runs_on(big(), "NVIDIA H200")
    assert runs_on(big(gpu_architectures=("3.5",)), "Simulated GPU")


def test_image_starts_only_on_gpus_that_it_has_code_for() -> None:
    old = big(gpu_architectures=("7.0",))
    v100, a100, h200 = device(0, "Tesla V100"), device(1, "NVIDIA A100"), device(2, "NVIDIA H200")
    assert parse({"image": "big"}, offer(old, v100, a100)).gpu_models == ("Tesla V100",)
    assert parse({"image": "plain"}, offer(old, v100, a100)).gpu_models == ()
    wrong = refusal(offer(old, v100, a100), gpu_model="NVIDIA A100")
    assert (wrong.field, wrong.nearest) == ("gpu_models", "Tesla V100")
    assert wrong.message == "gpu_models: Big has code for compute capability 7.0 only; choose Tesla V100"
    both = big(gpu_architectures=("7.0", "8.0"))
    several = refusal(offer(both, v100, a100, h200))
    assert several.message.endswith("choose Tesla V100 or NVIDIA A100")
    none = offer(old, a100, h200)
    assert [image.slug for image in none.images] == ["plain"]


def test_group_without_a_suitable_gpu_is_refused() -> None:
    old = big(gpu_architectures=("7.0",))
    config = Config()
    config.FGPU.groups = {"default": {}, "new": {}}
    nodes = [node(device(0, "Tesla V100")), replace(node(device(1, "NVIDIA H200"), group="new"), id="n2")]
    found = make_offer(FGPU.from_config(config), nodes, (PLAIN, old), ("default", "new"))
    assert refusal(found, group="new").message == (
        "image: Big has code for compute capability 7.0 only, and none of the GPUs of new (NVIDIA H200) has that"
    )


def test_request_keeps_the_slug_of_its_image() -> None:
    own = replace(PLAIN, slug="bob/mine:1", name="mine", default=False, owner="bob")
    request = parse({"image": "bob/mine:1"}, offer(own)).for_server("")
    assert isinstance(request, Request)
    assert request.image == "bob/mine:1"
