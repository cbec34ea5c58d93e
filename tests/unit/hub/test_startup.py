"""Clean-up of the Hub's database when it starts, and its limit on open files."""

from __future__ import annotations

import resource

import pytest
from jupyterhub import orm
from jupyterhub.scopes import define_custom_scopes, get_scopes_for

from fgpu_scheduler import Request, Session, SessionState
from fgpuspawner.hub.startup import (
    MOST_AT_ONCE,
    open_more_files,
    remove_unknown_scopes,
    remove_waiting_servers,
    revoke_older_tokens,
)
from fgpuspawner.scopes import QUEUE_READ, admin_of, custom

S = SessionState


def with_server(db: orm.Session, user: orm.User, name: str) -> orm.Spawner:
    client = orm.OAuthClient(identifier=f"client-{user.name}-{name}", secret="", redirect_uri="")
    spawner = orm.Spawner(name=name, user=user, server=orm.Server(base_url=f"/user/{user.name}/{name}"))
    spawner.oauth_client = client
    db.add_all([client, spawner])
    return spawner


def session(number: int, user: str, name: str, state: SessionState) -> Session:
    return Session(number, Request(user, name, "python", "default", 1000, 1000, 1024), state, 0)


def test_only_records_of_waiting_servers_are_removed() -> None:
    db = orm.new_session_factory("sqlite://")()
    users = {name: orm.User(name=name) for name in ("alice", "bob")}
    db.add_all(users.values())
    waits = [with_server(db, users["alice"], f"w{n}") for n in range(MOST_AT_ONCE + 2)]
    stay = [with_server(db, users["bob"], name) for name in ("", "runs", "ends", "w1", "unknown")]
    db.commit()
    sessions = [session(n, "alice", f"w{n}", S.PENDING) for n in range(len(waits))]
    sessions += [session(1000, "bob", "runs", S.RUNNING), session(1001, "bob", "ends", S.TERMINATING)]
    sessions += [session(1002, "bob", "", S.PREPARING)]
    remove_waiting_servers(db, sessions)
    assert all((s.server, s.oauth_client, s.started) == (None, None, None) for s in waits)
    assert all(s.server is not None and s.oauth_client is not None for s in stay)
    assert db.query(orm.Server).count() == db.query(orm.OAuthClient).count() == len(stay)
    db.close()


def test_only_the_latest_token_of_the_service_remains() -> None:
    db = orm.new_session_factory("sqlite://")()
    service, another = orm.Service(name="fgpu"), orm.Service(name="another")
    db.add_all([service, another, orm.OAuthClient(identifier="jupyterhub")])
    db.commit()
    former, theirs, latest = (
        s.new_api_token(note="generated at startup") for s in (service, another, service)
    )
    given = service.new_api_token(note="from config")
    revoke_older_tokens(db, latest)
    assert [orm.APIToken.find(db, t) is not None for t in (former, theirs, latest, given)] == [
        False,
        True,
        True,
        True,
    ]
    db.close()


def test_token_works_after_its_resource_group_was_removed() -> None:
    define_custom_scopes(custom(["stays"]))
    db = orm.new_session_factory("sqlite://")()
    client, user = orm.OAuthClient(identifier="fgpu"), orm.User(name="tina")
    stays, gone = admin_of("stays"), admin_of("gone")
    own = ([QUEUE_READ, gone, f"{gone}!user=tina", stays], [QUEUE_READ, stays], ["inherit"])
    tokens = [
        orm.APIToken(hashed=str(n), prefix=str(n), user=user, oauth_client=client, scopes=scopes)
        for n, scopes in enumerate(own)
    ]
    db.add_all(tokens)
    db.commit()
    remove_unknown_scopes(db)
    db.expire_all()
    assert [token.scopes for token in tokens] == [[QUEUE_READ, stays], [QUEUE_READ, stays], ["inherit"]]
    # What the Hub asks of a token in every request.
    assert all(isinstance(get_scopes_for(token), frozenset | set) for token in tokens)
    db.close()


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((1024, 4096), [(4096, 4096)]), ((1024, -1), [(65_536, -1)]), ((100_000, 100_000), [])],
)
def test_limit_on_open_files_is_raised(
    limits: tuple[int, int], raised: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: found.append(wanted))
    open_more_files()
    assert found == raised
