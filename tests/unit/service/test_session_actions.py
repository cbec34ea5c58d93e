"""An administrator ends other users' sessions: message, audit log and errors if the Hub or the database fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import select
from worlds import Build, node

from fgpu_scheduler import (
    FOR_GOOD_S,
    AllRules,
    Audit,
    EndCause,
    ImageState,
    InvalidTransition,
    NodeState,
    PrivateImage,
    Rules,
    Session,
    SessionState,
    Setups,
    Store,
    StoreUnavailable,
)
from fgpu_scheduler.store.schema import end_messages
from fgpuspawner.isolation.choice import StoredChoice
from fgpuspawner.service.admin import nodes
from fgpuspawner.service.api import images as private_images
from fgpuspawner.service.handler import Handler, Service
from fgpuspawner.service.hub import Hub, HubAnswer, HubSilent, HubUnreachable
from fgpuspawner.service.model import Viewer, World
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.session_actions import end_message, end_session, grant_wish, session_log

WORLD = Build(node(state=NodeState.CORDONED)).running("bob", 500).running("carol", 500).running("dave", 500)
(BOBS, *_) = WORLD.world().snapshot.sessions
NO_RULES = AllRules()
PAST = replace(BOBS, id=99, state=SessionState.TERMINATED, ended_at_s=120)


class Asking(Handler):
    token = "token"


def asking(store: Store, viewer: Viewer | None = None, *, rules: AllRules = NO_RULES, **hub: Any) -> Handler:
    """Return an administrator's handler with a store that can be written."""

    async def change(write: Callable[[Store, int], Any]) -> Any:
        return write(store, 100)

    async def session(session_id: int) -> Session | None:
        return PAST if session_id == PAST.id else WORLD.world().session(session_id)

    async def world() -> World:
        choice = StoredChoice("n1", "libfgpu", "", "")
        return replace(WORLD.world(), rules=rules, isolation=(choice,))

    found = Asking.__new__(Asking)
    found.viewer = viewer or Viewer("root", admin=True)
    found.current_user = {"name": "root"}
    found.service = cast(
        Service,
        SimpleNamespace(
            reader=SimpleNamespace(change=change, session=session, world=world),
            hub=SimpleNamespace(**hub),
            settings=SimpleNamespace(keep_s=lambda group: 60),
        ),
    )
    return found


def written(store: Store) -> tuple[list[str], list[str]]:
    """Return the stored messages to owners, and the details of the audit log."""
    with store.reading() as connection:
        words = [str(row.message) for row in connection.execute(select(end_messages))]
    return words, [line.details for line in Audit(store).lines(before_id=None, limit=9)]


@pytest.mark.parametrize(
    ("failure", "kept", "details"),
    [
        (HubSilent("no answer"), 1, ["repair; JupyterHub had not answered"]),
        (HubUnreachable("it is not there"), 0, []),
        (Problem(403, "forbidden", "not you"), 0, []),
    ],
)
def test_message_stays_if_the_hub_may_still_end_the_session(
    store: Store, failure: Exception, kept: int, details: list[str]
) -> None:
    async def end() -> None:
        async with end_message(asking(store), BOBS, "repair"):
            raise failure

    with pytest.raises(type(failure)):
        asyncio.run(end())
    words, lines = written(store)
    assert (len(words), lines) == (kept, details)


def test_silent_hub_differs_from_unreachable_hub() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(deaf, "127.0.0.1", 0)
        hub = Hub(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            with pytest.raises(HubSilent):
                await hub.stop_server("bob", "", session_id=7, token="token")
            server.close()
            await server.wait_closed()
            with pytest.raises(HubUnreachable) as there_is_none:
                await hub.stop_server("bob", "", session_id=7, token="token")
            assert not isinstance(there_is_none.value, HubSilent)
        finally:
            hub.close()

    asyncio.run(ask())


@pytest.mark.parametrize("status", [403, 404])
@pytest.mark.parametrize(
    ("viewer", "codes"),
    [
        (Viewer("root", admin=True), {403: "forbidden", 404: "hub_refused"}),
        (Viewer("bob"), {403: "forbidden", 404: "hub_refused"}),
        (Viewer("carol"), {403: "no_such_session", 404: "no_such_session"}),
    ],
)
def test_refused_end_is_explained_only_to_viewers_of_the_session(
    store: Store, viewer: Viewer, codes: dict[int, str], status: int
) -> None:
    async def refuse(*_: Any, session_id: int, token: str) -> HubAnswer:
        return HubAnswer(status, "no")

    with pytest.raises(Problem) as refused:
        asyncio.run(end_session(asking(store, viewer, stop_server=refuse), str(BOBS.id)))
    assert refused.value.code == codes[status]
    assert written(store) == ([], [])


@pytest.mark.parametrize(
    ("viewer", "code"),
    [
        (Viewer("bob"), "already_ended"),
        (Viewer("root", admin=True), "already_ended"),
        (Viewer("carol"), "no_such_session"),
    ],
)
def test_ended_sessions_of_others_stay_unknown(store: Store, viewer: Viewer, code: str) -> None:
    with pytest.raises(Problem) as refused:
        asyncio.run(end_session(asking(store, viewer), str(PAST.id)))
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("viewer", "code"),
    [
        (Viewer("bob"), "already_ended"),
        (Viewer("root", admin=True), "already_ended"),
        (Viewer("carol"), "no_such_session"),
    ],
)
def test_end_never_hits_the_servers_next_session(store: Store, viewer: Viewer, code: str) -> None:
    asked = []

    async def stop(*server: str, session_id: int, token: str) -> HubAnswer:
        asked.append(server)
        return HubAnswer(204, "")

    looks = iter([BOBS, replace(BOBS, state=SessionState.TERMINATED, ended_at_s=120)])

    async def session(_: int) -> Session:
        return next(looks)

    handler: Any = asking(store, viewer, stop_server=stop)
    handler.service.reader.session = session
    with pytest.raises(Problem) as refused:
        asyncio.run(end_session(handler, str(BOBS.id), message="repair"))
    assert refused.value.code == code
    assert asked == []
    assert written(store) == ([], [])


def test_drain_continues_after_one_failed_end_and_reports_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def end(handler: Handler, session_id: str, *, message: str = "") -> None:
        asked.append(int(session_id))
        if session_id == str(BOBS.id):
            raise StoreUnavailable("sqlite:////secret/path is locked")

    monkeypatch.setattr(nodes, "end_session", end)
    found = asyncio.run(nodes.drain(asking(store), "n1", "repair"))
    assert sorted(asked) == [s.id for s in WORLD.world().snapshot.sessions]
    assert found["text"] == "takes no new sessions; 2 of 3 sessions are being ended"
    (failed,) = found["failed"]
    assert failed["session_id"] == BOBS.id
    assert "secret" not in failed["message"]


def test_long_drain_is_answered_and_continues(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def drain() -> None:
        ended, go_on, all_ended = [], asyncio.Event(), asyncio.Event()

        async def end(handler: Handler, session_id: str, *, message: str = "") -> None:
            if session_id == str(BOBS.id):
                await go_on.wait()
            ended.append(int(session_id))
            if len(ended) == 3:
                all_ended.set()

        monkeypatch.setattr(nodes, "end_session", end)
        monkeypatch.setattr(nodes, "ANSWER_AFTER_S", 0.5)
        found = await nodes.drain(asking(store), "n1", "repair")
        assert found["text"] == "takes no new sessions; 2 of 3 sessions are being ended, and 1 follow"
        assert BOBS.id not in ended
        go_on.set()
        await asyncio.wait_for(all_ended.wait(), 30)

    asyncio.run(drain())
    assert written(store)[1] == ["3 sessions: repair"]


def test_failed_audit_write_is_reported_and_logged(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("locked")

    async def end() -> None:
        async with end_message(asking(store), BOBS, "repair"):
            monkeypatch.setattr(Audit, "add", lost)

    with pytest.raises(Problem, match="is under way"):
        asyncio.run(end())
    # It is being ended: its owner is told why.
    assert len(written(store)[0]) == 1
    assert f"session.end by root of session {BOBS.id}" in caplog.text


def saved_as(state: ImageState) -> PrivateImage:
    """Return the image that bob's session is saved as."""
    texts = dict.fromkeys(
        ("owner", "name", "reference", "node_id", "made_from", "base", "facts", "asked_by"), "x"
    )
    rest: dict[str, Any] = {"message": None, "image_id": None, "size_bytes": None, "made_at_s": None}
    return PrivateImage(
        id=7,
        state=state,
        session_id=BOBS.id,
        has_recipe=False,
        shared_users=(),
        shared_groups=(),
        asked_at_s=1,
        **texts,  # type: ignore[arg-type]
        **rest,
    )


@pytest.mark.parametrize(
    ("then", "ended"), [(ImageState.READY, ["bob"]), (ImageState.FAILED, []), (None, [])], ids=str
)
def test_session_ends_only_after_its_image_is_made(
    store: Store, monkeypatch: pytest.MonkeyPatch, then: ImageState | None, ended: list[str]
) -> None:
    monkeypatch.setattr(private_images, "SAVED_LOOK_S", 0.0)
    looks = [ImageState.WISHED, ImageState.COMMITTING, then]
    asked: list[str] = []

    async def images() -> tuple[PrivateImage, ...]:
        state = looks.pop(0)
        return () if state is None else (saved_as(state),)

    async def stop_server(user: str, server_name: str, *, session_id: int, token: str) -> HubAnswer:
        assert not looks, "it is ended before its image is made"
        assert (session_id, token) == (BOBS.id, "token")
        asked.append(user)
        return HubAnswer(202, "")

    handler = asking(store, Viewer("bob"), stop_server=stop_server)
    handler.service.reader.private_images = images  # type: ignore[method-assign]
    asyncio.run(private_images.end_when_saved(handler, str(BOBS.id), 7))
    assert asked == ended


def test_a_session_that_has_changed_before_it_is_kept_says_so() -> None:
    def keep(session_id: int, until_s: int, *, now_s: int) -> Session:
        raise InvalidTransition("it has ended")

    handler = asking(cast(Store, SimpleNamespace(keep=keep)))
    idle = replace(BOBS, ends_cause=EndCause.IDLE)

    async def visible(session_id: str) -> Session:
        return idle

    cast(Any, handler).visible_session = visible
    with pytest.raises(Problem) as refused:
        asyncio.run(grant_wish(handler, str(BOBS.id), "keep"))
    assert (refused.value.status, refused.value.code) == (409, "changed")


@pytest.mark.parametrize(
    ("viewer", "allowed", "code"),
    [
        (Viewer("bob"), True, None),
        (Viewer("bob"), False, "no_choice"),
        (Viewer("carol"), True, "no_such_session"),
    ],
)
@pytest.mark.parametrize(("wish", "until_s"), [("never-park", FOR_GOOD_S), ("may-park", None)])
def test_an_owner_has_a_session_never_parked_where_the_rules_allow_it(
    viewer: Viewer, allowed: bool, code: str | None, wish: str, until_s: int | None
) -> None:
    kept: list[tuple[int, int | None]] = []

    def keep(session_id: int, until_s: int | None, *, now_s: int) -> Session:
        kept.append((session_id, until_s))
        return BOBS

    rules = AllRules(Rules(park_after_s=600, park_opt_out=allowed))
    handler = asking(cast(Store, SimpleNamespace(keep=keep)), viewer, rules=rules)
    found, why = None, ""
    try:
        asyncio.run(grant_wish(handler, str(BOBS.id), wish))
    except Problem as problem:
        found, why = problem.code, str(problem)
    assert found == code
    if code == "no_choice":
        assert why == "Owners have no such choice in resource group default; ask an administrator."
    assert kept == ([(BOBS.id, until_s)] if code is None else [])


async def test_log_whose_values_are_no_longer_saved_is_refused(store: Store) -> None:
    own = replace(PAST, attempt=1, request=replace(PAST.request, setup=1))

    async def session(session_id: int) -> Session:
        return own

    async def log(session_id: int, *, token: str) -> tuple[int, bytes]:
        return 200, b"KEY is s3cret"

    async def read_store(read: Callable[[Store], Any]) -> Any:
        return read(store)

    handler = asking(store, log=log)
    reader: Any = handler.service.reader
    reader.session, reader.read_store = session, read_store
    handler.hub_auth = SimpleNamespace(api_token="")
    with pytest.raises(Problem, match="no longer saved"):
        await session_log(handler, "99", lines=9)
    assert Setups(store).put("bob", {"KEY": "s3cret"}, "", now_s=1) == own.request.setup
    assert await session_log(handler, "99", lines=9) == ["KEY is [masked]"]
