"""Private images in the store: requests, names, quotas, sharing, and refusals while they are in use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from store_worlds import S, ask, end, node, run

from fgpu_scheduler.core.model import EndCause
from fgpu_scheduler.errors import (
    BadImageName,
    ImageNameTaken,
    ImageRefused,
    OverImageQuota,
    UnknownImage,
    UnknownSession,
)
from fgpu_scheduler.store.private_image import (
    MIB,
    ImageInUse,
    ImageQuota,
    ImageState,
    PrivateImage,
    in_use_words,
)
from fgpu_scheduler.store.private_images import PrivateImages
from fgpu_scheduler.store.store import Store

FREE = ImageQuota()


@pytest.fixture
def images(store: Store) -> PrivateImages:
    """A store in which session 1 of alice, 2 of bob and 3 of alice run."""
    store.set_nodes([node(devices=4)], now_s=1)
    for asked in (ask("alice"), ask("bob"), ask("alice", "two")):
        run(store, asked, now_s=2)
    return PrivateImages(store)


def requested(
    images: PrivateImages, session_id: int = 1, name: str = "torch", **more: object
) -> PrivateImage:
    given = {"asked_by": "alice", "quota": FREE, "now_s": 5, **more}
    return images.request(session_id, name=name, **given)  # type: ignore[arg-type]


def make(
    images: PrivateImages,
    found: PrivateImage,
    *,
    mib: int = 1,
    quota: ImageQuota = FREE,
    digest: str = "sha256:0",
    server_kept: bool = True,
) -> PrivateImage:
    assert images.begin(found.id, facts='{"python": "3.11"}', now_s=6)
    return images.made(
        found.id,
        engines_id=digest,
        size_bytes=mib * MIB,
        recipe="FROM x",
        server_kept=server_kept,
        quota=quota,
        now_s=9,
    )


def test_image_requested_by_an_administrator_belongs_to_the_session_owner(
    store: Store, images: PrivateImages
) -> None:
    found = requested(images, 2, asked_by="admin")
    assert (found.owner, found.name, found.asked_by) == ("bob", "bob/torch:1", "admin")
    assert found.reference == f"fgpu-{store.installation_id}/bob/torch:1"
    assert (found.state, found.node_id, found.session_id) == (ImageState.WISHED, "n1", 2)
    assert (found.made_from, found.base) == (ask("bob").image,) * 2
    assert images.all() == (found,)
    assert images.by_name("bob/torch:1") == found
    assert store.events()[-1].kind == "images"


def test_tag_is_given_or_the_next_number(images: PrivateImages) -> None:
    first = make(images, requested(images))
    assert (first.name, first.has_recipe, images.recipe(first.id)) == ("alice/torch:1", True, "FROM x")
    assert make(images, requested(images, tag="7")).name == "alice/torch:7"
    assert make(images, requested(images, tag="v1")).name == "alice/torch:v1"
    assert requested(images).name == "alice/torch:8"
    assert requested(images, 3, "other").name == "alice/other:1"


def test_impossible_image_requests_are_refused(store: Store, images: PrivateImages) -> None:
    make(images, requested(images, tag="1"))
    with pytest.raises(ImageNameTaken, match="there is an image alice/torch:1 already"):
        requested(images, tag="1")
    with pytest.raises(UnknownSession):
        requested(images, 99)
    requested(images, name="second")
    with pytest.raises(ImageRefused, match="session 1 is being saved already"):
        requested(images, name="third")
    end(store, 3, now_s=6)
    with pytest.raises(ImageRefused, match="session 3 is TERMINATED; only a running one"):
        requested(images, 3)


def test_failed_image_has_a_reason_and_frees_its_name(images: PrivateImages) -> None:
    failed = requested(images, tag="1")
    assert (failed.has_recipe, images.recipe(failed.id), images.recipe(99)) == (False, None, None)
    images.begin(failed.id, facts="", now_s=6)
    images.note(failed.id, "writing 20 MiB", now_s=6)
    assert images.get(failed.id).message == "writing 20 MiB"
    images.fail(failed.id, "the disk is full", now_s=7)
    found = images.get(failed.id)
    assert (found.state, found.message) == (ImageState.FAILED, "the disk is full")
    again = requested(images, tag="1", quota=ImageQuota(images=1))
    assert [i.id for i in images.all()] == [again.id]
    assert images.begin(failed.id, facts="", now_s=8) is None


def test_only_the_newest_failed_images_are_kept(images: PrivateImages) -> None:
    for number in range(14):
        images.fail(requested(images, name=f"torch{number}").id, "no", now_s=6)
    images.fail(requested(images, 2).id, "no", now_s=6)
    own = [i.name for i in images.all() if i.owner == "alice"]
    assert own == [f"alice/torch{number}:1" for number in range(3, 14)]
    assert len(images.all()) == len(own) + 1


def test_image_quota_counts_finished_and_requested_images(images: PrivateImages) -> None:
    make(images, requested(images))
    requested(images, 2)
    requested(images)
    with pytest.raises(OverImageQuota, match="alice has 2 private images of the 2"):
        requested(images, 3, quota=ImageQuota(images=2))
    assert requested(images, 3, quota=ImageQuota(images=3))


def test_size_quota_is_checked_before_and_after_saving(images: PrivateImages) -> None:
    quota = ImageQuota(mib=10)
    make(images, requested(images, quota=quota), mib=6, quota=quota)
    second = requested(images, quota=quota)
    with pytest.raises(
        OverImageQuota, match="would have 5 MiB, and alice's other images have 6 of the 10 MiB"
    ):
        make(images, second, mib=5, quota=quota)
    assert images.get(second.id).state is ImageState.COMMITTING
    assert make(images, second, mib=4, quota=quota).state is ImageState.READY
    with pytest.raises(OverImageQuota, match="have 10 of the 10 MiB"):
        requested(images, quota=quota)
    assert requested(images, 2, quota=quota), "another's count by themselves"


def test_rename_changes_the_name_and_the_worker_changes_the_reference(
    store: Store, images: PrivateImages
) -> None:
    first = make(images, requested(images))
    found = images.rename(first.id, name="vision", tag=None, now_s=9)
    assert (found.name, found.reference) == ("alice/vision:1", first.reference)
    assert images.wanted_reference(found).endswith("/alice/vision:1")
    with pytest.raises(ImageNameTaken):
        # The engines still have the other image under this reference.
        requested(images, tag="1")
    images.tagged(found.id, images.wanted_reference(found), now_s=9)
    assert images.get(found.id).reference.endswith("/alice/vision:1")
    assert make(images, requested(images, tag="1"))
    with pytest.raises(ImageNameTaken):
        images.rename(found.id, name="torch", tag="1", now_s=9)
    with pytest.raises(BadImageName):
        images.rename(found.id, name="Torch", tag=None, now_s=9)
    assert images.rename(found.id, name="vision", tag="v2", now_s=9).name == "alice/vision:v2"
    assert images.rename(found.id, name="vision", tag="v2", now_s=9).name == "alice/vision:v2"


def test_image_in_use_is_not_renamed_or_deleted_and_only_admins_see_its_users(
    store: Store, images: PrivateImages
) -> None:
    found = make(images, requested(images))
    store.submit([ask("alice", "four", image=found.name), ask("bob", "five", image=found.name)], now_s=9)
    for refused in (
        lambda: images.delete(found.id, now_s=9),
        lambda: images.rename(found.id, name="b", tag=None, now_s=9),
    ):
        with pytest.raises(ImageInUse) as caught:
            refused()
        sessions = caught.value.sessions
        assert [s.request.server_name for s in sessions] == ["four", "five"]
        assert in_use_words(found.name, sessions, user=None, admin=True) == (
            "alice/torch:1 is in use: alice/four (PENDING, 4), bob/five (PENDING, 5)"
        )
        told = in_use_words(found.name, sessions, user="alice", admin=False)
        assert told.startswith("alice/torch:1 is in use by 1 of your sessions and 1 of other users' sessions")
        assert "bob" not in told + str(caught.value)
    for session_id in (4, 5):
        store.move(session_id, S.CANCELLED, cause=EndCause.USER, now_s=10)
    deleting = images.delete(found.id, now_s=10)
    assert deleting is not None
    assert deleting.state is ImageState.DELETING
    images.removed(found.id, now_s=10)
    assert images.all() == ()


def test_requested_image_is_deleted_at_once_but_not_one_being_made(images: PrivateImages) -> None:
    assert images.delete(requested(images).id, now_s=6) is None
    assert images.all() == ()
    found = requested(images)
    images.begin(found.id, facts="", now_s=6)
    with pytest.raises(ImageRefused, match="is being made"):
        images.delete(found.id, now_s=6)
    with pytest.raises(ImageRefused, match="only a READY image"):
        images.rename(found.id, name="b", tag=None, now_s=6)
    with pytest.raises(UnknownImage):
        images.delete(99, now_s=6)


def test_shared_image_is_visible_only_to_named_users_and_groups(images: PrivateImages) -> None:
    found = make(images, requested(images))
    assert found.is_visible_to("alice", ())
    assert not found.is_visible_to("bob", ("class",))
    shared = images.share(found.id, users=["bob", "alice", "bob"], groups=["class"], now_s=9)
    assert (shared.shared_users, shared.shared_groups) == (("bob",), ("class",))
    assert shared.is_visible_to("bob", ())
    assert shared.is_visible_to("carol", ("class",))
    assert not shared.is_visible_to("carol", ("other",))
    assert not images.share(found.id, users=[], groups=[], now_s=9).is_visible_to("bob", ("class",))
    for bad in (["\n"], [""], ["a" * 256], ["a"] * 101):
        with pytest.raises(BadImageName, match=r"users: .*(no name|at most 100)"):
            images.share(found.id, users=bad, groups=[], now_s=9)


def test_answer_is_stored_per_user_and_image_id_across_renames(store: Store, images: PrivateImages) -> None:
    found = make(images, requested(images))
    images.answer("sha256:0", user="bob", accepted=True, now_s=9)
    images.answer("sha256:0", user="carol", accepted=False, now_s=9)
    images.answer("sha256:another", user="dan", accepted=True, now_s=9)
    assert (images.get(found.id).accepted_by, images.get(found.id).declined_by) == (("bob",), ("carol",))
    version = store.version()
    images.answer("sha256:0", user="bob", accepted=True, now_s=9)
    assert store.version() == version, "what was said already is nothing new"
    renamed = images.rename(found.id, name="vision", tag=None, now_s=10)
    assert images.all() == (renamed,)
    assert renamed.accepted_by == ("bob",)
    images.answer("sha256:0", user="bob", accepted=False, now_s=11)
    assert images.by_name(renamed.name).declined_by == ("bob", "carol")
    # A later image of the same name is another image, and answers to deleted images are deleted.
    images.delete(found.id, now_s=12)
    images.removed(found.id, now_s=13)
    again = make(images, requested(images, name="vision"), digest="sha256:1")
    assert (again.name, again.accepted_by, again.declined_by) == (renamed.name, (), ())
    assert make(images, requested(images, 3)).declined_by == ()


def test_image_with_an_unverified_server_cannot_be_shared(images: PrivateImages) -> None:
    found = make(images, requested(images), server_kept=False)
    with pytest.raises(ImageRefused, match=r"alice/torch:1 cannot be shared: .*without sudo"):
        images.share(found.id, users=["bob"], groups=[], now_s=9)
    assert not replace(found, shared_users=("bob",)).is_visible_to("bob", ())
    assert found.is_visible_to("alice", ())
    assert images.share(found.id, users=[], groups=[], now_s=9) == found


def test_images_saved_from_an_image_inherit_its_base_and_trust(store: Store, images: PrivateImages) -> None:
    first = make(images, requested(images), server_kept=False)
    assert (first.owners_alone, first.server_kept) == (True, False)
    run(store, replace(ask("alice", "of-mine"), image=first.name), now_s=9)
    run(store, replace(ask("bob", "of-hers"), image=first.name), now_s=9)
    mine, theirs = (make(images, requested(images, session)) for session in (4, 5))
    assert (theirs.owner, theirs.made_from, theirs.base) == ("bob", first.name, ask("x").image)
    assert theirs.facts == '{"python": "3.11"}'
    assert (mine.owners_alone, mine.server_kept) == (True, False)
    assert (theirs.owners_alone, theirs.server_kept) == (False, False)
    run(store, replace(ask("bob", "again"), image=theirs.name), now_s=9)
    assert not make(images, requested(images, 6)).owners_alone
    assert make(images, requested(images, 2, name="plain")).owners_alone


def test_session_of_a_renamed_image_cannot_be_saved(store: Store, images: PrivateImages) -> None:
    # A Hub that has not read the new name yet has started a session by the old one.
    rooted = make(images, requested(images), server_kept=False)
    images.rename(rooted.id, name="hidden", tag=None, now_s=9)
    run(store, replace(ask("alice", "of-it"), image=rooted.name), now_s=9)
    with pytest.raises(ImageRefused, match=r"alice/torch:1 of session 4 was renamed or deleted"):
        requested(images, 4, name="clean")


def test_every_image_change_is_a_version_and_no_change_is_none(store: Store, images: PrivateImages) -> None:
    found = make(images, requested(images))
    version = store.version()
    images.share(found.id, users=[], groups=[], now_s=9)
    images.tagged(found.id, found.reference, now_s=9)
    images.note(found.id, "nothing", now_s=9)
    images.removed(found.id, now_s=9)
    assert store.version() == version
    images.share(found.id, users=["bob"], groups=[], now_s=9)
    assert store.version() == version + 1
