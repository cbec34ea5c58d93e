"""Presets and last launches: valid settings, and the form's buttons."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

import pytest
from launch_offers import PYTHON, offer, page, settings

from fgpu_scheduler import BadSettings, Session, SessionState
from fgpuspawner.form.offer import LaunchRequest
from fgpuspawner.form.options import parse, read_fields
from fgpuspawner.form.presets import one_click, with_unknown_image

SMALL = {
    "name": "Small",
    "image": "python",
    "fgpu": "0.2",
    "cpu": 1,
    "memory_mib": 2048,
    "time_limit": "2:30",
}
EXACT = {"name": "Exact", "gpu_memory_mib": 2048}
LAST = LaunchRequest("ann", "", "python", "default", 500, 1000, 2048)


def session(number: int, wanted: LaunchRequest = LAST, server: str = "") -> Session:
    return Session(number, wanted.for_server(server), SessionState.TERMINATED, 0)


@pytest.mark.parametrize(
    ("presets", "message"),
    [
        ([{"fgpu": 1}], r"presets\[0\]: name is None; it must be a text of 1 to 60 letters"),
        ([{"name": "x" * 61, "fgpu": 1}], r"presets\[0\]: name is 'x+'?\.\.\.; it must be"),
        ([SMALL, SMALL], r"presets: 'Small' is there twice; give each another name"),
        ([{"name": "a"}], r"presets: 'a' chooses nothing; add some of image, group, gpu, fgpu"),
        ([{"name": "a", "gpus": 1}], r"presets: 'a' has 'gpus'; use name and image, group, gpu, fgpu"),
        ([{"name": "a", "fgpu": "half"}], r"presets: 'a': fgpu: 'half' is not a number such as 0.5"),
        ([{"name": "a", "fgpu": 0}], r"presets: 'a': fgpu: must be above 0"),
        ([{"name": "a", "cpu": -1}], r"presets: 'a': cpu: -1 is negative"),
        ([{"name": "a", "memory_mib": "2 GiB"}], r"presets: 'a': memory_mib: '2 GiB' is not a whole number"),
        ([{"name": "a", "count": 0}], r"presets: 'a': count: must be above 0"),
        ([{"name": "a", "time_limit": "2h"}], r"presets: 'a': time_limit: '2h' is not hours:minutes"),
        ([{"name": "a", "group": "big"}], r"presets: 'a': group: there is no 'big'; choose one of default"),
        ([{"name": "a", "image": 7}], r"presets: 'a': image: 7 is not a text"),
        (
            [{"name": "a", "fgpu": 1, "gpu_memory_mib": 128}],
            r"presets: 'a': gpu_memory_mib: give this or fgpu",
        ),
        (
            [{"name": "a", "compute_percent": 25}],
            r"presets: 'a': compute_percent: give gpu_memory_mib",
        ),
    ],
    ids=str,
)
def test_invalid_preset_stops_the_hub_with_a_hint(presets: list[dict[str, object]], message: str) -> None:
    with pytest.raises(BadSettings, match=rf"^c\.FGPU\.{message}"):
        settings(presets=presets)


def test_example_presets_are_valid() -> None:
    assert settings(presets=[SMALL, EXACT]).presets == [SMALL, EXACT]


def test_preset_fields_and_link_agree() -> None:
    small, exact = one_click(offer(), [SMALL, EXACT], ())["presets"]
    assert (small["title"], small["words"]) == ("Small", "Python 3.11, 0.2 fGPU, 1 CPU, 2 GiB, 2:30 hours")
    assert json.loads(small["fields"]) == {
        "image": "python",
        "fgpu": "0.2",
        "cpu": "1",
        "memory_gib": "2",
        "time_limit": "2:30",
        "gpu_by": "fgpu",
    }
    linked = {name.removeprefix("opt-"): [value] for name, value in parse_qsl(small["link"][1:])}
    assert parse(read_fields(linked), offer()) == LaunchRequest(
        "ann", "", "python", "default", 200, 1000, 2048, time_limit_s=9000
    )
    # Memory alone: a compute that was typed before is not meant.
    assert json.loads(exact["fields"]) == {
        "gpu_memory_mib": "2048",
        "compute_percent": "",
        "gpu_by": "memory",
    }


@pytest.mark.parametrize(
    ("preset", "given"),
    [
        (SMALL | {"image": "secret"}, {}),
        (SMALL, {"quotas": [{"user": "*", "max_fgpu": "0.1"}]}),
        (SMALL | {"fgpu": "5"}, {}),
    ],
    ids=["an image of others", "above the quota", "above every GPU"],
)
def test_forbidden_preset_is_not_shown(preset: dict[str, object], given: dict[str, Any]) -> None:
    assert one_click(offer(**given), [preset], ())["presets"] == []


def test_image_only_preset_takes_the_images_amounts() -> None:
    (alone,) = one_click(offer(), [{"name": "Course", "image": "python"}], ())["presets"]
    assert alone["words"] == "Python 3.11"
    # With an image that is shown its amounts are the form's to choose; of a hidden one it knows nothing.
    assert json.loads(alone["fields"]) == {"image": "python", "gpu_by": "fgpu"}
    hidden = replace(
        PYTHON,
        slug="exam",
        name="Exam",
        default=False,
        hidden=True,
        recommended_fgpu_milli=700,
        min_memory_mib=9000,
    )
    found = offer(PYTHON, hidden)
    (exam,) = one_click(found, [{"name": "Exam", "image": "exam", "cpu": 3}], ())["presets"]
    assert exam["words"] == "Exam, 3 CPU"
    assert json.loads(exam["fields"]) == {
        "image": "exam",
        "fgpu": "0.7",
        "cpu": "3",
        "memory_gib": "8.7891",
        "gpu_by": "fgpu",
    }
    assert parse({"image": "exam", "cpu": 3}, found) == LaunchRequest(
        "ann", "", "exam", "default", 700, 3000, 9000
    )


def test_last_launches_are_the_newest_five_distinct_startable_ones() -> None:
    amounts = [replace(LAST, fgpu_milli=100 * n) for n in range(1, 8)]
    gone = replace(LAST, image="gone")
    sessions = [session(n, wanted) for n, wanted in enumerate([*amounts, gone, amounts[0]], start=1)]
    # The sessions of one submission differ in their servers only.
    sessions.append(session(20, amounts[6], "gpu-2"))
    shown = one_click(offer(), (), sessions)["launches"]
    assert [launch["words"].split(" fGPU")[0] for launch in shown] == ["0.7", "0.1", "0.6", "0.5", "0.4"]
    assert {launch["title"] for launch in shown} == {"Python 3.11"}


def test_launch_fills_in_or_empties_every_field() -> None:
    wanted = replace(LAST, fgpu_milli=0, gpu_memory_mib=2048, compute_percent=25, time_limit_s=5400)
    (launch,) = one_click(offer(), (), [session(1, wanted)])["launches"]
    assert launch["words"] == "2 GiB + 25 %, 1 CPU, 2 GiB, 1:30"
    fields = json.loads(launch["fields"])
    assert fields == {
        "image": "python",
        "group": "default",
        "fgpu": "",
        "gpu_memory_mib": "2048",
        "compute_percent": "25",
        "gpu_models": "",
        "cpu": "1",
        "memory_gib": "2",
        "count": "1",
        "time_limit": "1:30",
        "name": "",
        "folders": "",
        "setup": "",
        "variables": "",
        "script": "",
        "priority": "",
        "gpu_by": "memory",
    }
    assert parse(read_fields({name: [value] for name, value in fields.items()}), offer()) == wanted


def test_hostile_names_are_escaped_in_the_form() -> None:
    hostile = "<script>alert(1)</script>\"'\N{RIGHT-TO-LEFT OVERRIDE}"
    shown = page(offer(), presets=[{"name": hostile, "fgpu": "0.5"}], sessions=[session(1)])
    assert len(shown.select("script")) == 1
    assert [e.text for e in shown.select(".choice-title")] == [hostile, "Python 3.11"]
    # Without scripts there are links that fill them in.
    links = shown.select("#fgpu-quick-links a")
    assert links[0]["href"] == "?opt-fgpu=0.5"
    assert links[0].text == hostile


def test_preset_with_unknown_image_is_reported() -> None:
    presets = [SMALL, SMALL | {"name": "Typo", "image": "pyhton"}, {"name": "Own", "image": "ann/torch:2"}]
    (line,) = with_unknown_image(presets, [], {"python"})
    assert line.startswith("c.FGPU.presets: 'Typo' has the image 'pyhton', which is not in the catalogue")
