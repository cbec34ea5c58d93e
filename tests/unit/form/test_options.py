"""Form, link and API: one table of bad input with the exact words at each edge, and one of good input."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import launch_offers
import pytest
from bs4 import BeautifulSoup
from launch_offers import DUO, PYTHON
from launch_offers import page as form_of

from fgpu_scheduler import Refusal
from fgpuspawner.form import page as form
from fgpuspawner.form.offer import LaunchRequest, Offer, RequestRefused, asks_the_same, make_offer
from fgpuspawner.form.options import parse, parse_to_start, read_fields
from fgpuspawner.form.presets import fields_of
from fgpuspawner.images.catalogue import Image
from fgpuspawner.text.fields import Given, in_gib

TORCH = Image("torch", "PyTorch", "pytorch", "2.13", "3.12", "lab/torch:2.13")
SOLO = {"name": "solo", "group": "class", "cpu": 4, "memory_mib": 4096, "gpus": {"simulated": 1}}
EMPTY = {"name": "empty", "group": "none", "cpu": 4, "memory_mib": 4096, "gpus": {"simulated": 0}}
LAB: dict[str, Any] = {"nodes": [DUO, SOLO, EMPTY], "groups": {"default": {}, "class": {}, "none": {}}}
"""2 GPUs of 2 fGPU in "default", one in "class", none in "none"."""


def offer(
    of: tuple[str, ...] = ("default", "class", "none"),
    *,
    images: tuple[Image, ...] = (PYTHON, TORCH),
    user: str = "",
    hub_groups: tuple[str, ...] = (),
    **given: Any,
) -> Offer:
    return launch_offers.offer(*images, of=of, user=user, hub_groups=hub_groups, **(LAB | given))


def by_form(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a browser's form: texts, in lists."""
    return read_fields({name: [str(value)] for name, value in raw.items()})


def by_link(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the Hub's fields for ``?opt-NAME=VALUE``, for the given fields."""
    query = {f"opt-{name}": [str(value)] for name, value in raw.items()}
    return read_fields({name.removeprefix("opt-"): values for name, values in query.items()})


def by_api(raw: Mapping[str, object]) -> dict[str, object]:
    """Return the API's ``user_options``: JSON values as they are."""
    return dict(raw)


EDGES: dict[str, Callable[[Mapping[str, object]], dict[str, object]]] = {
    "form": by_form,
    "link": by_link,
    "API": by_api,
}
TEXTS = ("form", "link", "API")
JSON = ("API",)
NUMBER = "is not a number such as 0.5"
LONG = "9" * 4000
MARKUP = "<script>alert(1)</script>"
OPTIONS = (
    "the options are image, group, account, gpu, fgpu, gpu_memory_mib, compute_percent, gpu_models, gpu_model, cpu, "
    "memory_mib, memory_gib, count, time_limit, time_limit_s, priority, name, folders, setup, variables, script"
)

BAD: list[tuple[tuple[str, ...], dict[str, object], str, str, str]] = [
    # Edges, input, and of the one refusal: field, code, message.
    (TEXTS, {"fgpu": "half"}, "fgpu", "bad_amount", f"fgpu: 'half' {NUMBER}"),
    (TEXTS, {"fgpu": "NaN"}, "fgpu", "bad_amount", f"fgpu: 'NaN' {NUMBER}"),
    (TEXTS, {"fgpu": "1e9"}, "fgpu", "bad_amount", "fgpu: 1e9 is too large; at most 1000000 is possible"),
    (TEXTS, {"fgpu": "5e-4"}, "fgpu", "bad_amount", "fgpu: 5e-4 has more than three decimals"),
    (TEXTS, {"fgpu": "-0.5"}, "fgpu", "bad_amount", "fgpu: -0.5 is negative; it must be above 0"),
    (TEXTS, {"fgpu": "0"}, "fgpu", "too_small", "fgpu: 0 is too small; choose at least 0.1"),
    (TEXTS, {"fgpu": "0.5001"}, "fgpu", "bad_amount", "fgpu: 0.5001 has more than three decimals"),
    (TEXTS, {"fgpu": "0.55"}, "fgpu", "not_a_step",
     "fgpu: 0.55 isn't possible; choose 0.5 or 0.6 (in steps of 0.1)"),
    (TEXTS, {"fgpu": "2.5"}, "fgpu", "straddles",
     "fgpu: 2.5 isn't possible; choose 2 or 4 (above one GPU, 2 fGPU, only whole GPUs)"),
    (TEXTS, {"fgpu": "6"}, "fgpu", "never_fits", "fgpu: 6 is more than any machine has; choose at most 4"),
    (TEXTS, {"fgpu": LONG}, "fgpu", "bad_amount",
     f"fgpu: {'9' * 40}... is too large; at most 1000000 is possible"),
    (TEXTS, {"memory_gib": "lots"}, "memory_gib", "not_a_number",
     "memory_gib: 'lots' is not a number of GiB such as 4 or 0.5"),
    (TEXTS, {"memory_gib": "0.1"}, "memory_gib", "too_small",
     "memory_gib: 0.1 is too small; choose at least 0.125"),
    (TEXTS, {"memory_gib": "16.1"}, "memory_gib", "never_fits",
     "memory_gib: 16.1 is more than any machine has; choose at most 16"),
    (TEXTS, {"memory_gib": "1", "memory_mib": "1024"}, "memory_gib", "given_twice",
     "memory_gib: given in GiB, and in MiB as memory_mib; give one of them"),
    (TEXTS, {"cpu": "0"}, "cpu", "too_small", "cpu: 0 is too small; choose at least 0.01"),
    (TEXTS, {"cpu": "\u0661"}, "cpu", "bad_amount", "cpu: '\u0661' is not a number such as 0.5"),
    (TEXTS, {"fgpu": "\uff10.\uff15"}, "fgpu", "bad_amount", "fgpu: '\uff10.\uff15' is not a number such as 0.5"),
    (TEXTS, {"count": "\uff11"}, "count", "not_a_number", "count: '\uff11' is not a whole number such as 1"),
    (TEXTS, {"cpu": "8.001"}, "cpu", "never_fits", "cpu: 8.001 is more than any machine has; choose at most 8"),
    (TEXTS, {"memory_mib": "127"}, "memory_mib", "too_small", "memory_mib: 127 is too small; choose at least 128"),
    (TEXTS, {"memory_mib": "16385"}, "memory_mib", "never_fits",
     "memory_mib: 16385 is more than any machine has; choose at most 16384"),
    (TEXTS, {"memory_mib": "1024.5"}, "memory_mib", "not_a_number",
     "memory_mib: '1024.5' is not a whole number such as 4096"),
    (TEXTS, {"count": "0"}, "count", "out_of_range", "count: 0 isn't possible; choose 1 to 8 sessions"),
    (TEXTS, {"count": "-1"}, "count", "not_a_number", "count: '-1' is not a whole number such as 1"),
    (TEXTS, {"image": "none"}, "image", "unknown_choice", "image: there is no 'none'; choose one of python, torch"),
    (TEXTS, {"group": "staff"}, "group", "unknown_choice",
     "group: there is no 'staff'; choose one of default, class, none"),
    (TEXTS, {"group": "none"}, "group", "no_devices", "group: resource group 'none' has no GPU; choose another"),
    (TEXTS, {"gpu_model": "T4"}, "gpu_model", "unknown_choice",
     "gpu_model: there is no 'T4'; choose one of Simulated GPU 8192 MiB"),
    (TEXTS, {"gpu_models": "Simulated GPU 8192 MiB, T4"}, "gpu_models", "unknown_choice",
     "gpu_models: there is no 'T4'; choose one of Simulated GPU 8192 MiB"),
    (TEXTS, {"gpu_models": "Simulated GPU 8192 MiB,Simulated GPU 8192 MiB"}, "gpu_models", "named_twice",
     "gpu_models: 'Simulated GPU 8192 MiB' is named twice; name each model once: Simulated GPU 8192 MiB"),
    (JSON, {"gpu_models": {"T4": 1}}, "gpu_models", "not_a_text",
     "gpu_models: {'T4': 1} is no name of a GPU model, nor a list of them"),
    (TEXTS, {"gpu_models": "T4", "gpu_model": "T4"}, "gpu_models", "given_twice",
     "gpu_models: given, and one as gpu_model; give one of them"),
    (TEXTS, {"gpu_memory_mib": "4 GiB"}, "gpu_memory_mib", "not_a_number",
     "gpu_memory_mib: '4 GiB' is not a whole number such as 4096"),
    (TEXTS, {"gpu_memory_mib": "4096", "compute_percent": "2.5"}, "compute_percent", "not_a_number",
     "compute_percent: '2.5' is not a whole number such as 25"),
    (TEXTS, {"gpu_memory_mib": "4096", "fgpu": "1"}, "gpu_memory_mib", "two_ways",
     "gpu_memory_mib: give this or fgpu, not both"),
    (TEXTS, {"compute_percent": "25"}, "compute_percent", "compute_alone",
     "compute_percent: give gpu_memory_mib, too"),
    (TEXTS, {"gpu_memory_mib": "5000"}, "gpu_memory_mib", "not_a_step",
     "gpu_memory_mib: 5000 isn't possible; choose 4992 (a multiple of 128, or all of a GPU)"),
    (TEXTS, {"gpu_memory_mib": "0"}, "gpu_memory_mib", "too_small",
     "gpu_memory_mib: 0 is too small; choose at least 128"),
    (TEXTS, {"gpu_memory_mib": "8193"}, "gpu_memory_mib", "never_fits",
     "gpu_memory_mib: 8193 is more than one GPU has; choose at most 8192"),
    (TEXTS, {"gpu_memory_mib": "4096", "compute_percent": "7"}, "compute_percent", "not_a_step",
     "compute_percent: 7 isn't possible; choose 5 (a multiple of 5)"),
    (TEXTS, {"gpu_memory_mib": "4096", "compute_percent": "101"}, "compute_percent", "out_of_range",
     "compute_percent: 101 isn't possible; choose 5 to 100"),
    (TEXTS, {"time_limit": "2h"}, "time_limit", "bad_time", "time_limit: '2h' is not hours:minutes such as 2:30"),
    (TEXTS, {"time_limit": "10000:01"}, "time_limit", "above_cap",
     "time_limit: 10000:01 is too long; choose at most 10000:00"),
    (TEXTS, {"time_limit_s": "59"}, "time_limit_s", "too_small", "time_limit_s: 59 is too short; choose at least 60"),
    (TEXTS, {"time_limit_s": "1:00"}, "time_limit_s", "not_a_number",
     "time_limit_s: '1:00' is not a whole number such as 3600"),
    (TEXTS, {"time_limit_s": "3600", "time_limit": "1:00"}, "time_limit_s", "given_twice",
     "time_limit_s: given in seconds, and in hours and minutes as time_limit; give one of them"),
    (TEXTS, {"priority": "1"}, "priority", "above_cap",
     "priority: 1 is too high; choose at most 0"),
    (TEXTS, {"priority": "-1"}, "priority", "not_a_number", "priority: '-1' is not a whole number such as 0"),
    (JSON, {"time_limit": 7200}, "time_limit", "bad_time", "time_limit: 7200 is not hours:minutes such as 2:30"),
    (TEXTS, {"gpus": "1"}, "options", "unknown_option", f"'gpus': no such option; {OPTIONS}"),
    (TEXTS, {"gpu": "1"}, "gpu", "unknown_choice", "gpu: there is no '1'; choose one of at-start"),
    (TEXTS, {MARKUP: "1"}, "options", "unknown_option", f"'{MARKUP}': no such option; {OPTIONS}"),
    (JSON, {"fgpu": True}, "fgpu", "not_a_number", f"fgpu: True {NUMBER}"),
    (JSON, {"fgpu": {"a": 1}}, "fgpu", "not_a_number", f"fgpu: {{'a': 1}} {NUMBER}"),
    (JSON, {"fgpu": float("nan")}, "fgpu", "bad_amount", f"fgpu: 'nan' {NUMBER}"),
    (JSON, {"fgpu": 0.1 + 0.2}, "fgpu", "bad_amount", "fgpu: 0.30000000000000004 has more than three decimals"),
    (JSON, {"memory_mib": True}, "memory_mib", "not_a_number",
     "memory_mib: True is not a whole number such as 4096"),
    (JSON, {"count": -3}, "count", "not_a_number", "count: -3 is not a whole number such as 1"),
    (JSON, {"image": None}, "image", "unknown_choice", "image: there is no None; choose one of python, torch"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("edge", "raw", "field", "code", "message"),
    [
        pytest.param(edge, raw, field, code, message, id=f"{edge}-{str(raw)[:40]}")
        for edges, raw, field, code, message in BAD
        for edge in edges
    ],
)
def test_bad_input_gets_the_same_message_from_form_link_and_api(
    edge: str, raw: dict[str, object], field: str, code: str, message: str
) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(EDGES[edge](raw), offer())
    (refused,) = caught.value.refusals
    assert (refused.field, refused.code, refused.message) == (field, code, message)
    assert str(caught.value) == message
    assert len(message) < 270


QUOTAS = [
    {"user": "*", "max_fgpu": "1.5", "max_sessions": 3},
    {"hub_group": "ml101", "max_fgpu": 1},
    {"user": "bob", "resource_group": "class", "max_fgpu": "0.5"},
]
LIMITED: list[tuple[dict[str, Any], dict[str, object], str, str, str, str | None]] = [
    # Settings and user, input, and of the one refusal: code, message, limit, and what works.
    ({"max_fgpu": 1}, {"fgpu": "1.5"}, "above_cap", "fgpu: 1.5 is above the limit of 1 per session", "1", "1"),
    ({"max_cpu": 2}, {"cpu": "3"}, "above_cap", "cpu: 3 is above the limit of 2 per session", "2", "2"),
    ({"max_memory_mib": 1024}, {"memory_mib": "2048"}, "above_cap",
     "memory_mib: 2048 is above the limit of 1024 MiB per session", "1024", "1024"),
    ({"max_sessions": 2}, {"count": "3"}, "out_of_range", "count: 3 isn't possible; choose 1 to 2 sessions", "2", "2"),
    ({"max_fgpu": 1}, {"gpu_memory_mib": "2048", "compute_percent": "75"}, "above_cap",
     "gpu_memory_mib: this is worth 1.5 fGPU, above the limit of 1 per session", "1", None),
    ({"max_time_limit_s": 8 * 3600}, {"time_limit": "8:01"}, "above_cap",
     "time_limit: 8:01 is too long; choose at most 8:00", "8:00", "8:00"),
    ({"max_time_limit_s": 3600}, {"time_limit_s": "3601"}, "above_cap",
     "time_limit_s: 3601 is too long; choose at most 3600", "3600", "3600"),
    ({"max_priority": {"*": 3}}, {"priority": "4"}, "above_cap", "priority: 4 is too high; choose at most 3", "3", "3"),
    ({"fgpu_per_gpu": "0.5", "fgpu_step": "0.25"}, {"fgpu": "0.3"}, "not_a_step",
     "fgpu: 0.3 isn't possible; choose 0.25 or 0.5 (in steps of 0.25)", "0.25", "0.25"),
    ({"quotas": QUOTAS, "user": "alice"}, {"fgpu": "2"}, "above_quota",
     "fgpu: 2 fGPU is above 1.5, the quota of each user", "1.5", "1.5"),
    ({"quotas": QUOTAS, "user": "alice", "hub_groups": ("ml101",)}, {"fgpu": "1.1"}, "above_quota",
     "fgpu: 1.1 fGPU is above 1, the quota of group 'ml101'", "1", "1"),
    ({"quotas": QUOTAS, "user": "bob"}, {"group": "class", "gpu_memory_mib": "4096"}, "above_quota",
     "gpu_memory_mib: 1 fGPU is above 0.5, the quota of user 'bob' in resource group 'class'", "0.5", "2048"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "raw", "code", "message", "limit", "nearest"), LIMITED, ids=str)
@pytest.mark.parametrize("edge", TEXTS)
def test_request_over_a_limit_or_a_quota_is_refused_with_it(
    edge: str,
    given: dict[str, Any],
    raw: dict[str, object],
    code: str,
    message: str,
    limit: str,
    nearest: str | None,
) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(EDGES[edge](raw), offer(**given))
    field = message.partition(":")[0]
    assert caught.value.refusals == (Refusal(field, code, message, limit, nearest),)


def offer_to(user: str, *hub_groups: str) -> Offer:
    return offer(("default", "class"), images=(PYTHON,), user=user, hub_groups=hub_groups, quotas=QUOTAS)


def test_offered_amounts_are_within_quotas() -> None:
    assert offer_to("alice").amounts("default")[-1] == 1500
    assert offer_to("alice", "ml101").amounts("class")[-1] == 1000
    bob = offer_to("bob")
    assert bob.amounts("class")[-1] == 500
    assert bob.amounts("default")[-1] == 1500
    offered = offer(("default",), user="alice", quotas=[{"user": "*", "max_fgpu": "0.4"}])
    assert offered.default.fgpu_milli == 400
    assert parse({}, offered) == offered.default


def test_file_in_a_field_is_refused() -> None:
    # What the Hub makes of a part of a form that has a file name.
    file: Any = [{"filename": "x", "body": b"python"}]
    with pytest.raises(RequestRefused, match=r"^'image_file': a file was sent; send a text$"):
        read_fields({"image_file": file})


@pytest.mark.parametrize("edge", ["form", "link"])
@pytest.mark.parametrize(
    ("name", "values", "field", "message"),
    [
        ("fgpu", ["0.5", "2"], "fgpu", "'fgpu': given 2 times; give it once"),
        ("count", ["1", "1", "1"], "count", "'count': given 3 times; give it once"),
        ("x" * 4000, ["1", "1"], "options", f"'{'x' * 56}...: given 2 times; give it once"),
    ],
)
def test_repeated_field_is_refused(edge: str, name: str, values: list[str], field: str, message: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_fields({name: values})
    assert caught.value.refusals == (Refusal(field, "given_twice", message),)


def test_only_a_few_unknown_options_are_named() -> None:
    with pytest.raises(RequestRefused) as caught:
        parse({f"{n}": 1 for n in range(100_000)}, offer())
    assert {r.code for r in caught.value.refusals} == {"unknown_option"}
    assert len(str(caught.value)) < 2000


def test_all_reasons_are_listed() -> None:
    with pytest.raises(RequestRefused) as caught:
        parse({"image": "none", "fgpu": "x", "cpu": "y", "color": "red"}, offer())
    assert [(r.field, r.code) for r in caught.value.refusals] == [
        ("options", "unknown_option"),
        ("image", "unknown_choice"),
        ("fgpu", "bad_amount"),
        ("cpu", "bad_amount"),
    ]


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        # What is too much in every group is told beside a group that is none.
        ({"group": "nope", "count": 99, "priority": 7, "fgpu": "9"}, ["group", "count", "priority"]),
        ({"cpu": "y", "fgpu": "9", "memory_mib": 1, "time_limit": "0:00"}, ["cpu", "fgpu", "memory_mib"]),
        # Nothing is told of defaults, nor of what two fields ask for together.
        ({"gpu_memory_mib": "4 GiB", "compute_percent": "25"}, ["gpu_memory_mib"]),
        ({"cpu": "y"}, ["cpu"]),
    ],
)
def test_unreadable_field_hides_no_other_reason(raw: dict[str, object], fields: list[str]) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(raw, offer())
    assert [r.field for r in caught.value.refusals] == fields


def test_amounts_no_node_has_together_are_refused() -> None:
    nodes = [
        {"name": "big", "cpu": 2, "memory_mib": 2048, "gpus": {"simulated": 2}},
        {"name": "wide", "cpu": 32, "memory_mib": 65536, "gpus": {"simulated": 1}},
    ]
    with pytest.raises(RequestRefused) as caught:
        parse({"fgpu": "4", "cpu": "16"}, offer(("default",), groups={}, nodes=nodes))
    (refused,) = caught.value.refusals
    assert (refused.field, refused.code) == ("fgpu", "never_fits_together")
    assert refused.message.startswith("fgpu: no machine has 4 fGPU together with 16 CPU and ")


# --- Good input ---

HALF = {"fgpu_milli": 500, "cpu_milli": 1000, "memory_mib": 2048}
"""What goes with half an fGPU: as much of the node as of its GPUs."""
BESIDE = {"cpu_milli": 2500, "memory_mib": 5120}
"""The same for 5 GiB of one of two GPUs with 8 GiB."""
DEFAULT = LaunchRequest("", "", "python", "default", fgpu_milli=1000, cpu_milli=2000, memory_mib=4096)


@pytest.mark.parametrize("edge", TEXTS)
@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        ({}, {}),
        ({"fgpu": "0.5"}, HALF),
        ({"fgpu": " 0.5 "}, HALF),
        ({"fgpu": "+0.500"}, HALF),
        ({"fgpu": "5e-1"}, HALF),
        ({"fgpu": 0.5}, HALF),
        ({"fgpu": 2}, {"fgpu_milli": 2000, "cpu_milli": 4000, "memory_mib": 8192}),
        ({"fgpu": "4", "cpu": "8", "memory_mib": "16384"},
         {"fgpu_milli": 4000, "cpu_milli": 8000, "memory_mib": 16384}),
        ({"image": "torch", "group": "class", "cpu": 0.25, "memory_mib": 128, "count": 8},
         {"image": "torch", "resource_group": "class", "cpu_milli": 250, "memory_mib": 128, "count": 8}),
        ({"memory_gib": "1.5"}, {"memory_mib": 1536}),
        ({"memory_mib": 512.0, "count": "2.0"}, {"memory_mib": 512, "count": 2}),
        ({"memory_gib": "0.5625"}, {"memory_mib": 576}),
        ({"count": "02"}, {"count": 2}),
        ({"gpu_memory_mib": "5120", "compute_percent": "25"},
         {"fgpu_milli": 0, "gpu_memory_mib": 5120, "compute_percent": 25, **BESIDE}),
        ({"gpu_memory_mib": 5120}, {"fgpu_milli": 0, "gpu_memory_mib": 5120, **BESIDE}),
        ({"gpu_model": "Simulated GPU 8192 MiB"}, {"gpu_models": ("Simulated GPU 8192 MiB",)}),
        ({"gpu_models": "Simulated GPU 8192 MiB"}, {"gpu_models": ("Simulated GPU 8192 MiB",)}),
        ({"gpu_models": ""}, {}),
        ({"time_limit": "2:30"}, {"time_limit_s": 9000}),
        ({"time_limit_s": 9000}, {"time_limit_s": 9000}),
        ({"time_limit": "0:00"}, {}),
        ({"priority": 0}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_good_input_means_the_same_from_form_link_and_api(
    edge: str, raw: dict[str, object], changes: dict[str, Any]
) -> None:
    assert parse(EDGES[edge](raw), offer()) == replace(DEFAULT, **changes)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({}, {"time_limit_s": 7200}),
        # No limit is no limit also where another is preselected.
        ({"default_time_limit_s": 3600}, {"time_limit_s": None}),
        ({"default_time_limit_s": 3600}, {"time_limit_s": 7200}),
        ({"max_priority": {"*": 5}}, {"priority": 4}),
        ({}, {"fgpu_milli": 0, "gpu_memory_mib": 5120, "compute_percent": 25, **BESIDE}),
        ({}, {"fgpu_milli": 0, "gpu_memory_mib": 5120, "gpu_models": ("Simulated GPU 8192 MiB",)}),
    ],
    ids=str,
)
def test_requests_survive_the_round_trip_through_options(
    given: dict[str, Any], changes: dict[str, Any]
) -> None:
    wanted = replace(DEFAULT, **changes)
    assert parse(wanted.as_options(), offer(**given)) == wanted
    assert LaunchRequest.of(wanted.for_server("")) == wanted


@pytest.mark.parametrize(
    ("given", "expected_s"),
    [
        ({}, None),
        ({"default_time_limit_s": 3600}, 3600),
        ({"max_time_limit_s": 7200}, 7200),
        ({"default_time_limit_s": 3600, "max_time_limit_s": 7200}, 3600),
    ],
)
def test_default_time_limit_applies(given: dict[str, int], expected_s: int | None) -> None:
    assert parse({}, offer(**given)).time_limit_s == expected_s


def test_emptied_time_limit_in_the_form_means_none() -> None:
    usual = offer(default_time_limit_s=7200)
    page = form_of(usual)
    assert [field["value"] for field in page.select("[name=time_limit]")] == ["2:00"]
    sent = {"gpu_by": ["fgpu"], "fgpu": ["1"], "time_limit": [""]}
    wanted = parse(read_fields(sent), usual)
    assert wanted.time_limit_s is None
    assert parse(read_fields(sent), offer(max_time_limit_s=3600)).time_limit_s == 3600
    assert parse(read_fields({"fgpu": ["1"], "time_limit": [""]}), usual).time_limit_s == 7200
    # Shown again after a refusal, or as a launch before, it is empty again, and means the same.
    for given in (form.first_of(sent), fields_of(wanted.as_options())):
        page = form_of(usual, given=given)
        assert [field["value"] for field in page.select("[name=time_limit]")] == [""]
    again = {name: [value] for name, value in fields_of(wanted.as_options()).items()}
    assert parse(read_fields(again), usual) == wanted


@pytest.mark.parametrize(
    ("by", "left"),
    [("fgpu", {"fgpu": "1"}), ("memory", {"gpu_memory_mib": "4096", "compute_percent": "25"})],
)
def test_unused_gpu_fields_of_the_form_are_ignored(by: str, left: dict[str, str]) -> None:
    typed = {"gpu_by": by, "fgpu": "1", "gpu_memory_mib": "4096", "compute_percent": "25"}
    assert by_form(typed) == left


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"groups": ("staff",)}, True),
        ({"time_limit_s": 3600}, True),
        ({"priority": 1}, False),
        ({"compute_percent": 5}, False),
    ],
)
def test_repeated_request_is_recognized(changes: dict[str, Any], same: bool) -> None:
    before = replace(DEFAULT, user="alice", groups=("ml101",)).for_server("")
    assert asks_the_same(before, replace(before, **changes)) is same


def test_waiting_request_keeps_its_place_when_folders_have_another_order_or_became_everybodys() -> None:
    before = replace(DEFAULT, user="alice", folders=("models", "datasets")).for_server("")
    assert asks_the_same(before, replace(before, folders=("datasets", "models")))
    assert not asks_the_same(before, replace(before, folders=("datasets",)))
    assert asks_the_same(before, replace(before, folders=("datasets",)), ["models"])


def test_priority_is_limited_by_group() -> None:
    given = {"max_priority": {"staff": 10, "*": 1}}
    assert offer(**given).max_priority == 1
    assert offer(hub_groups=("ml101", "staff"), **given).max_priority == 10


def test_form_shows_refusals_at_fields_and_keeps_input() -> None:
    typed = {
        "gpu_by": "memory",
        "gpu_memory_mib": "4 GiB",
        "compute_percent": "25",
        "fgpu": "0.7",
        "cpu": "many",
        "time_limit": "8h",
    }
    with pytest.raises(RequestRefused) as caught:
        parse(by_form(typed), offer(max_time_limit_s=8 * 3600))
    given = form.first_of({name: [value] for name, value in typed.items()})
    page = form_of(offer(max_time_limit_s=8 * 3600), given=given, refusals=caught.value.refusals)
    told = {e["data-refused"]: e.text for e in page.select("[data-refused]") if not e.has_attr("hidden")}
    assert told == {
        "gpu_memory_mib": "'4 GiB' is not a whole number such as 4096",
        "cpu": f"'many' {NUMBER}",
        "time_limit": "'8h' is not hours:minutes such as 2:30",
    }
    for name in told:
        field = page.select_one(f"[name={name}]")
        assert field is not None
        assert field["aria-invalid"] == "true"
        assert f"fgpu-{name}-refused" in str(field["aria-describedby"]).split()
    chosen = page.select("[name=gpu_by][checked]")
    assert [radio["value"] for radio in chosen] == ["memory"]
    kept = {str(i["name"]): i.get("value") for i in page.select("input[name]") if i["name"] != "gpu_by"}
    assert {name: kept[name] for name in typed if name != "gpu_by"} == {
        k: v for k, v in typed.items() if k != "gpu_by"
    }


def test_longest_image_name_is_kept_whole() -> None:
    longest = "u" * 100 + "/" + "n" * (form.FIELD_MAX_LENGTH - 101)
    page = form_of(offer(), given=form.first_of({"image_name": [longest + "n"]}))
    (field,) = page.select("[name=image_name]")
    assert (field["value"], field["maxlength"]) == (longest, "400")


@pytest.mark.parametrize(
    ("given", "by", "time_limit"),
    [
        ({}, "fgpu", ""),
        ({"time_limit_s": "5400"}, "fgpu", "1:30"),
        ({"time_limit_s": "soon"}, "fgpu", ""),
        ({"gpu_memory_mib": "4096"}, "memory", ""),
        ({"gpu_memory_mib": "4096", "fgpu": "1"}, "fgpu", ""),
    ],
)
def test_form_shows_the_links_values(given: dict[str, str], by: str, time_limit: str) -> None:
    page = form_of(offer(), given=given)
    assert [radio["value"] for radio in page.select("[name=gpu_by][checked]")] == [by]
    (field,) = page.select("[name=time_limit]")
    assert field["value"] == time_limit


def test_priority_and_model_fields_need_a_choice() -> None:
    plain = form_of(offer())
    assert not plain.select("[name=priority], [name=gpu_models], [for^=fgpu-model], #fgpu-model-hint")
    some = offer(max_priority={"*": 3})
    node = replace(
        some.nodes[0], devices=(replace(some.nodes[0].devices[0], model="Tesla T4"), *some.nodes[0].devices)
    )
    rich = form_of(replace(some, nodes=(node,)))
    (priority,) = rich.select("[name=priority]")
    assert (priority["max"], priority["value"]) == ("3", "0")
    assert [o["value"] for o in rich.select("#fgpu-model option")] == [
        "",
        "Tesla T4",
        "Simulated GPU 8192 MiB",
    ]


MODELS = ("Tesla T4", "Simulated GPU 8192 MiB", "NVIDIA A100")


def several_models() -> Offer:
    some = offer()
    (device,) = some.nodes[0].devices[:1]
    devices = tuple(replace(device, uuid=f"GPU-{i}", model=model) for i, model in enumerate(MODELS))
    return replace(some, nodes=(replace(some.nodes[0], devices=devices), *some.nodes[1:]))


def test_models_keep_their_order_from_form_link_and_api() -> None:
    a100_t4 = replace(DEFAULT, gpu_models=("NVIDIA A100", "Tesla T4"))
    # The first field that is empty ends the list of the form.
    for fields in (["NVIDIA A100", "Tesla T4", ""], ["NVIDIA A100, Tesla T4"], ["NVIDIA A100,Tesla T4"]):
        found = parse(read_fields({"gpu_models": fields}), several_models())
        assert found.gpu_models == ("NVIDIA A100", "Tesla T4")
    assert parse(read_fields({"gpu_models": ["", "Tesla T4", ""]}), several_models()).gpu_models == ()
    assert parse({"gpu_models": []}, several_models()) == parse({}, several_models())
    options = a100_t4.as_options()
    assert options["gpu_models"] == ["NVIDIA A100", "Tesla T4"]
    assert parse(options, several_models()).gpu_models == a100_t4.gpu_models
    assert LaunchRequest.of(a100_t4.for_server("")) == a100_t4
    with pytest.raises(
        RequestRefused, match="'Tesla T4' is named twice; name each model once: Tesla T4, NVIDIA A100"
    ):
        parse(read_fields({"gpu_models": ["Tesla T4", "NVIDIA A100", "Tesla T4"]}), several_models())


def test_form_has_a_field_per_model() -> None:
    for given in (
        {"gpu_models": "NVIDIA A100, Tesla T4"},
        form.first_of({"gpu_models": ["NVIDIA A100", "Tesla T4", ""]}),
    ):
        page = form_of(several_models(), given=given)
        fields = page.select("[name=gpu_models]")
        assert [[o["value"] for o in field.select("option[selected]")] for field in fields] == [
            ["NVIDIA A100"],
            ["Tesla T4"],
            [],
        ]
        labels = [page.select_one(f"[for={field['id']}]") for field in fields]
        assert [label.text for label in labels if label] == ["GPU model", *["Or, if that is not free"] * 2]
    by_old_link = form_of(several_models(), given={"gpu_model": MODELS[0]})
    assert [o["value"] for o in by_old_link.select("[name=gpu_models] option[selected]")] == [MODELS[0]]


# --- What is preselected ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1000, 2000, 4096)),
        ({"fgpu_per_gpu": 5}, (2500, 2000, 4096)),
        ({"fgpu_per_gpu": 1}, (500, 2000, 4096)),
        # Half a GPU is no step here: the largest amount below it.
        ({"fgpu_per_gpu": 1, "fgpu_step": "0.2"}, (400, 1600, 3072)),
        ({"fgpu_per_gpu": 1, "fgpu_step": 1}, (1000, 4000, 8192)),
        ({"default_fgpu": "0.5"}, (500, 1000, 2048)),
        ({"default_cpu": "1.5", "default_memory_mib": 512}, (1000, 1500, 512)),
        ({"max_fgpu": "0.4"}, (400, 800, 1536)),
        ({"max_cpu": 1, "max_memory_mib": 1024}, (1000, 1000, 1024)),
    ],
    ids=str,
)
def test_half_a_gpu_and_its_part_of_the_node_are_preselected(
    given: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    default = offer(**given).default
    assert (default.fgpu_milli, default.cpu_milli, default.memory_mib) == expected
    assert (default.image, default.resource_group, default.count) == ("python", "default", 1)
    assert parse({}, offer(**given)) == default


def test_mib_to_gib_is_exact() -> None:
    for amount_mib in (*range(128, 5000), 24_105, 999_999):
        given = Given({"memory_gib": in_gib(amount_mib)})
        assert (given.memory_mib(0), given.refusals) == (amount_mib, [])


@pytest.mark.parametrize(("fgpu", "sessions"), [("0.1", 40), ("0.3", 13), ("0.5", 8), ("1", 4), ("2", 2)])
def test_default_cpu_and_memory_fill_the_node_evenly(fgpu: str, sessions: int) -> None:
    found = parse({"fgpu": fgpu, "group": "default"}, offer())
    assert found.cpu_milli * sessions <= 8000
    assert found.memory_mib * sessions <= 16384
    # And hardly less than their part.
    assert (found.cpu_milli + 100) * sessions > 8000 * 0.9


def test_smallest_node_sets_the_default_cpu_and_memory() -> None:
    poor = {"name": "poor", "cpu": 2, "memory_mib": 65536, "gpus": {"simulated": 2, "memory_mib": 8192}}
    found = parse({"fgpu": "1"}, offer(nodes=[DUO, poor, SOLO, EMPTY]))
    assert (found.cpu_milli, found.memory_mib) == (500, 4096)


def test_form_completes_the_links_values() -> None:
    page = form_of(offer(), given={"fgpu": "0.5"}, by_link=True)
    values = {name: page.select_one(f"[name={name}]")["value"] for name in ("fgpu", "cpu", "memory_gib")}
    assert values == {"fgpu": "0.5", "cpu": "1", "memory_gib": "2"}
    kept = form_of(offer(), given={"fgpu": "0.5", "memory_mib": "576"}, by_link=True)
    assert kept.select_one("[name=memory_gib]")["value"] == "0.5625"
    # What the link gives does not follow the GPU; the rest does.
    known = json.loads(kept.select_one(".fgpu-form")["data-known"])
    assert known["given"] == ["fgpu", "memory_gib"]


def test_first_group_and_default_image_are_preselected() -> None:
    both = (TORCH, PYTHON)
    assert offer(("class",), images=(TORCH,)).default.image == "torch"
    assert offer(("class",), images=both).default.image == "python"
    assert offer(("class", "default"), images=both).default.resource_group == "class"


def test_only_nodes_of_own_groups_are_offered() -> None:
    assert [n.id for n in offer(("class",)).nodes] == ["solo"]
    with pytest.raises(RequestRefused, match=r"^group: there is no 'default'; choose one of class$"):
        parse({"group": "default"}, offer(("class",)))


@pytest.mark.parametrize(
    ("images", "groups", "message"),
    [
        ((PYTHON,), (), "group: you may use no resource group; ask an administrator"),
        ((), ("default",), "image: you may use no image; ask an administrator"),
    ],
)
def test_users_without_group_or_image_are_refused(
    images: tuple[Image, ...], groups: tuple[str, ...], message: str
) -> None:
    own = launch_offers.settings(**LAB)
    with pytest.raises(RequestRefused) as caught:
        make_offer(own, own.discover_nodes(), images, groups)
    assert str(caught.value) == message


SHARED = replace(
    PYTHON,
    slug="alice/torch:1",
    name="alice/torch:1",
    default=False,
    owner="alice",
    users=("bob",),
    under=PYTHON,
    digest="sha256:abc",
)


def offered(*images: Image, user: str = "bob") -> Offer:
    return offer(("default",), images=(PYTHON, *images), user=user)


@pytest.mark.parametrize("accept", [None, "", "yes", True, "sha256:abd", ["sha256:abc"]])
@pytest.mark.parametrize("path", [by_form, by_link, by_api])
def test_other_users_image_must_be_accepted_by_digest(
    path: Callable[[Mapping[str, object]], dict[str, object]], accept: object
) -> None:
    raw = path({"image": SHARED.slug} | ({} if accept is None else {"accept_image": accept}))
    with pytest.raises(RequestRefused) as refused:
        parse_to_start(raw, offered(SHARED))
    (refusal,) = refused.value.refusals
    assert (refusal.field, refusal.code, refusal.nearest) == ("image", "not_accepted", "sha256:abc")
    assert form.refusal_words(refused.value) == [
        "Image: another user's image: tick the box below it to accept it"
    ]
    assert refusal.message == (
        "image: alice/torch:1 is alice's, and its programs run as you, with your files; if you trust alice, accept it"
        " with accept_image=sha256:abc"
    )


def test_accepted_image_is_not_asked_again_until_it_changes() -> None:
    wanted, accepted = parse_to_start({"image": SHARED.slug, "accept_image": "sha256:abc"}, offered(SHARED))
    assert (wanted.image, accepted) == (SHARED.slug, "sha256:abc")
    # Nothing of it stays in the options, with which a server may be started again.
    assert "accept_image" not in wanted.as_options()
    known = replace(SHARED, accepted_by=("bob",))
    assert parse_to_start({"image": SHARED.slug}, offered(known)) == (wanted, "")
    for other in (
        replace(SHARED, digest="sha256:new"),
        replace(SHARED, digest=""),
        replace(known, accepted_by=("dan",)),
    ):
        for accept in ("", "sha256:ab"):
            with pytest.raises(RequestRefused):
                parse_to_start({"image": SHARED.slug, "accept_image": accept}, offered(other))


def test_own_and_catalogue_images_need_no_acceptance() -> None:
    assert parse_to_start({"image": SHARED.slug}, offered(SHARED, user="alice"))[1] == ""
    assert parse_to_start({"image": "python", "accept_image": "sha256:abc"}, offered(SHARED))[1] == ""


def test_form_asks_to_accept_other_users_images() -> None:
    known = replace(SHARED, slug="alice/known:1", accepted_by=("bob",))
    declined = replace(SHARED, slug="alice/no:1", declined_by=("bob",))
    choice = offered(SHARED, known, declined)
    assert [image.slug for image in choice.shown_images] == ["python", "alice/known:1"]
    page = form_of(choice)
    assert page.select("#fgpu-accept") == []
    assert "An image is offered to you" in page.select("#fgpu-offered")[0].text
    for field in ("image", "image_name"):
        page = form_of(choice, given={field: SHARED.slug, "accept_image": "sha256:abc"})
        (box,) = page.select("[name=accept_image]")
        assert box["value"] == "sha256:abc"
        assert not box.has_attr("checked")
        assert "alice/torch:1 is alice's image. Its programs run as you" in " ".join(
            page.select("#fgpu-accept")[0].text.split()
        )
    assert "accept_image" not in form.first_of({"accept_image": ["sha256:abc"]})


@pytest.mark.parametrize("name", ["x" * 61, "two\x00words", "ab\u202ecd", "zero\u200bwidth", 7])
def test_a_name_that_is_long_or_hides_text_is_refused(name: object) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse({"name": name}, offer())
    (refusal,) = caught.value.refusals
    assert (refusal.field, refusal.limit) == ("name", "60")


def test_sessions_are_named_after_the_request_or_the_image() -> None:
    servers = ["", "gpu-2", "mine"]
    assert parse({}, offer()).names(servers, "pytorch") == ["PyTorch 1", "PyTorch 2", "mine"]
    named = parse({"name": "  <b>train </b> "}, offer())
    assert named.names(servers, "pytorch") == ["<b>train </b>", "<b>train </b> 2", "<b>train </b> 3"]
    assert asks_the_same(named.for_server(""), parse({}, offer()).for_server("", "PyTorch 1"))


ACCOUNTS = {"science": {}, "physics": {"parent": "science", "groups": ["phys"]}, "arts": {"groups": ["arts"]}}


def offer_for(*hub_groups: str, **given: Any) -> Offer:
    return offer(("default",), images=(PYTHON,), hub_groups=hub_groups, **given)


def test_gpu_comes_on_demand_only_where_all_machines_can_park_a_session() -> None:
    own = offer()
    parks = replace(own, parking=frozenset(node.id for node in own.nodes))
    assert not parse({}, parks).on_demand
    asked = parse({"gpu": "on-demand"}, parks)
    assert asked.on_demand
    assert parse(asked.as_options(), parks) == asked
    with pytest.raises(RequestRefused, match="gpu: there is no 'on-demand'; choose one of at-start"):
        parse({"gpu": "on-demand"}, own)


def test_user_of_several_accounts_chooses_one_or_gets_the_first() -> None:
    several = offer_for("arts", "phys", accounts=ACCOUNTS)
    assert parse({}, several).account == "science/physics"
    assert parse({"account": "arts"}, several).account == "arts"
    assert parse(parse({"account": "arts"}, several).as_options(), several).account == "arts"
    assert parse({}, offer_for(accounts=ACCOUNTS)).account == "default"
    assert parse({}, offer_for("phys")).account == ""


@pytest.mark.parametrize(
    ("accounts", "chosen", "line"),
    [
        (ACCOUNTS, "arts", "account: there is no 'arts'; choose one of physics"),
        (ACCOUNTS, "science/physics", "account: there is no 'science/physics'; choose one of physics"),
        (ACCOUNTS, "science", "account: there is no 'science'; choose one of physics"),
        (ACCOUNTS, ["physics"], "account: there is no ['physics']; choose one of physics"),
        ({}, "physics", "account: there are no accounts here; leave it out"),
    ],
)
def test_account_of_others_is_refused(accounts: dict[str, Any], chosen: object, line: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse({"account": chosen}, offer_for("phys", accounts=accounts))
    assert str(refused.value) == line


def test_waiting_request_keeps_its_place_when_accounts_have_changed() -> None:
    before = parse({"account": "arts"}, offer_for("arts", "phys", accounts=ACCOUNTS))
    again, _ = parse_to_start({"account": "arts"}, offer_for("phys"), before.for_server(""))
    assert again.account == ""
    unaware = replace(before, account="")
    assert asks_the_same(unaware, before)
    assert not asks_the_same(before, replace(before, account="science/physics"))


def test_form_has_a_field_for_accounts_only_if_there_is_a_choice() -> None:
    def html(*hub_groups: str) -> BeautifulSoup:
        return form_of(offer_for(*hub_groups, accounts=ACCOUNTS))

    assert [o["value"] for o in html("arts", "phys").select("#fgpu-account option")] == ["physics", "arts"]
    assert html("phys").select("#fgpu-account") == []
