"""Edits of the image catalogue are stored and logged."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler.store.administration import Audit, ImageEdit, ImageEdits
from fgpu_scheduler.store.store import Store

TORCH = ImageEdit("torch", None, {"enabled": False, "description": None, "minimum": {"fgpu": "0.5"}}, 3)
FOUND = ImageEdit("found", {"slug": "found", "name": "Ünseen", "kernels": ["a", "b"]})


def reasons(store: Store) -> list[str | None]:
    return [event.reason for event in store.events() if event.kind == "images"]


def test_edit_is_read_back_with_its_author_and_time(store: Store) -> None:
    edits = ImageEdits(store)
    assert edits.all() == ()
    edits.put([TORCH, FOUND], by="root", now_s=50)
    known = {"changed_by": "root", "changed_at_s": 50}
    assert edits.all() == (replace(FOUND, **known), replace(TORCH, **known))
    assert reasons(store) == ["torch: edited by root", "found: edited by root"]


def test_edit_replaces_only_the_last_edit_of_the_same_image(store: Store) -> None:
    edits = ImageEdits(store)
    edits.put([TORCH, FOUND], by="root", now_s=50)
    edits.put([replace(TORCH, position=1), replace(FOUND, changes={"name": "Seen"})], by="eve", now_s=60)
    found, torch = edits.all()
    assert (found.changes, found.entry, found.changed_by) == ({"name": "Seen"}, FOUND.entry, "eve")
    assert (torch.position, torch.changes) == (1, TORCH.changes)
    assert reasons(store)[2:] == ["torch: moved by eve", "found: edited by eve"]


def test_unchanged_edit_writes_nothing(store: Store) -> None:
    edits = ImageEdits(store)
    edits.put([TORCH], by="root", now_s=50)
    before = store.version()
    edits.put([TORCH], drop=["unknown"], by="eve", now_s=60)
    assert store.version() == before
    assert edits.all()[0].changed_by == "root"


def test_audit_log_has_the_difference_of_each_edit(store: Store) -> None:
    edits = ImageEdits(store)
    edits.put([TORCH], by="root", now_s=50)
    edits.put([replace(TORCH, changes={"enabled": True, "name": "Füße"})], by="eve", now_s=60)
    edits.put([], drop=["torch", "unknown"], by="eve", now_s=70)
    assert [(line.actor, line.action, line.target, line.details) for line in Audit(store).lines(limit=9)] == [
        ("eve", "image.back", "image torch", ""),
        (
            "eve",
            "image.edit",
            "image torch",
            "enabled: yes, name: Füße, description: as in the file, minimum: as in the file",
        ),
        (
            "root",
            "image.edit",
            "image torch",
            "enabled: no, description: none, minimum: fgpu 0.5, its place",
        ),
    ]
