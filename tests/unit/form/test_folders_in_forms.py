"""Shared folders in a request: by the form, a link, the API and presets only those that the user is offered."""

from __future__ import annotations

import launch_offers
import pytest
from launch_offers import page

from fgpu_scheduler import Session, SessionState
from fgpuspawner.form import page as form
from fgpuspawner.form.offer import LaunchRequest, Offer, RequestRefused
from fgpuspawner.form.options import parse, read_fields

FOLDERS = {
    "data": {"path": "/srv/data", "text": "<b>ImageNet</b>", "always": True},
    "vision": {"path": "/srv/vision", "mode": "read-write", "hub_groups": ["vision"], "at": "work/vision"},
    "free": {"path": "/srv/free"},
}


def offer(*hub_groups: str) -> Offer:
    return launch_offers.offer(folders=FOLDERS, hub_groups=hub_groups)


@pytest.mark.parametrize("given", [["free", "vision"], "vision,free", " free , vision ", ("free", "vision")])
def test_chosen_folders_are_kept_in_the_administrators_order(given: object) -> None:
    wanted = parse({"folders": given}, offer("vision"))
    assert wanted.folders == ("vision", "free")
    again = parse(wanted.as_options(), offer("vision"))
    assert again == wanted


def test_form_gives_each_ticked_folder_and_none_is_none() -> None:
    assert parse(read_fields({"folders": ["vision", "free"]}), offer("vision")).folders == ("vision", "free")
    assert parse(read_fields({}), offer("vision")).folders == ()
    assert parse({"folders": ["data"]}, offer()).folders == (), "what each session has is not chosen"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["vision"], "folders: there is no 'vision'; choose one of data, free"),
        ("../etc", "folders: there is no '../etc'; choose one of data, free"),
        (["free", "free"], "folders: 'free' is named twice; name each folder once: free"),
        ({"free": True}, "folders: {'free': True} is no list of names of folders"),
        ([1], "folders: [1] is no list of names of folders"),
    ],
)
def test_folder_of_another_group_or_of_no_name_is_refused_alike(given: object, line: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse({"folders": given}, offer())
    assert str(refused.value) == line
    assert refused.value.refusals[0].field == "folders"


def test_form_shows_the_offered_folders_with_mode_place_and_text() -> None:
    found = page(offer("vision"), given={"folders": "vision"})
    block = found.find(id="fgpu-folders")
    assert block is not None
    lines = [" ".join(line.get_text().split()) for line in block.find_all("div", recursive=False)[:3]]
    assert lines == [
        "data always, read-only, at ~/data: <b>ImageNet</b>",
        "vision read and write, at ~/work/vision",
        "free read-only, at ~/free",
    ]
    boxes = {box["id"].removeprefix("fgpu-folder-"): box for box in block.find_all("input")}
    assert [(n, b.has_attr("checked"), b.get("name")) for n, b in boxes.items()] == [
        ("data", True, None),
        ("vision", True, "folders"),
        ("free", False, "folders"),
    ]
    assert "vision" not in str(page(offer()))


def test_form_without_folders_has_no_block_and_a_refusal_is_shown_at_it() -> None:
    none = launch_offers.offer()
    assert page(none).find(id="fgpu-folders") is None
    with pytest.raises(RequestRefused) as refused:
        parse({"folders": "free"}, none)
    shown = page(none, given={"folders": "free"}, refusals=refused.value.refusals)
    assert shown.find(id="fgpu-folders-refused").get_text() == "there is no 'free'; leave it out"  # type: ignore[union-attr]


def test_presets_and_last_launches_keep_folders_while_they_are_offered() -> None:
    asked = LaunchRequest("ann", "", "python", "default", 500, 1000, 2048, folders=("vision",))
    last = Session(1, asked.for_server(""), SessionState.TERMINATED, 0)
    presets = [{"name": "Seeing", "folders": ["vision"]}]

    def choices(*groups: str) -> list[str]:
        shown = page(
            offer(*groups), sessions=[last], presets=presets, own_presets={"mine": asked.as_options()}
        )
        return [" ".join(choice.get_text().split()) for choice in shown.find_all(class_="choice")]

    assert len(choices("vision")) == 3
    assert all("folders vision" in words for words in choices("vision"))
    assert choices() == []
    assert first_again(last, "vision") == ["vision"]
    assert first_again(last) == []


def first_again(last: Session, *groups: str) -> list[str]:
    """Return the ticked folders of the form that starts a session again."""
    shown = page(offer(*groups), again=last)
    return [
        box["value"] for box in shown.find_all("input", attrs={"name": "folders"}) if box.has_attr("checked")
    ]


def test_many_chosen_folders_are_all_chosen_again_after_a_refusal() -> None:
    names = [f"{'project' * 5}-{n}" for n in range(20)]
    assert form.first_of({"folders": names})["folders"].split(", ") == names
