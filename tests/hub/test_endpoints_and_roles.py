"""Access to every endpoint by every role, as one table, and no role reads data of other users."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from filledservice import SECRET, Filled
from servedroutes import methods_of, served
from test_service import now_s

from fgpu_scheduler import PrivateImages
from hubprocess import module_world, until

ROLES = ("nobody", "bare service", "bare token", "carol", "server", "alice", "admin")
"""No user; a service and a token of alice's without rights, or with access to this service only; another user; the
token of alice's server; alice, who owns the session and the image; an administrator.
"""

TABLE = """
GET    static/{id}                         200 200 200 200 200 200 200
GET    health                              200 200 200 200 200 200 200
GET    metrics                             401 403 403 403 403 403 200
GET    oauth_callback                      400 400 400 400 400 400 400
GET                                        302 403 403 200 200 200 200
GET    map                                 302 403 403 200 200 200 200
GET    history                             302 403 403 200 200 200 200
GET    history.csv                         302 403 403 200 200 200 200
GET    sessions.csv                        302 403 403 200 200 200 200
GET    end/{id}                            302 403 403 404 200 200 200
POST   end/{id}                            401 403 403 404 403 303 303
POST   keep/{id}                           401 403 403 404 403 409 409
POST   extend/{id}                         401 403 403 404 403 409 409
POST   park/{id}                            401 403 403 404 403 409 409
POST   wake/{id}                            401 403 403 404 403 409 409
POST   never-park/{id}                      401 403 403 404 403 409 409
POST   may-park/{id}                        401 403 403 404 403 409 409
GET    rename/{id}                          302 403 403 404 403 200 200
POST   rename/{id}                          401 403 403 404 403 400 403
GET    log/{id}                             302 403 403 404 404 404 404
GET    presets/                             302 403 403 200 403 200 200
POST   presets/                             401 403 403 400 403 400 400
GET    resize/{id}                         302 403 403 404 403 200 200
POST   resize/{id}                         401 403 403 404 403 400 400
GET    save/{id}                           302 403 403 404 403 409 200
POST   save/{id}                           401 403 403 404 403 403 409
GET    private-images                      302 403 403 200 403 200 200
POST   private-images/{id}/rename          401 403 403 404 403 409 409
POST   private-images/{id}/share           401 403 403 404 403 303 303
POST   private-images/{id}/answer          401 403 403 404 403 403 403
GET    private-images/{id}/delete          302 403 403 404 403 200 200
POST   private-images/{id}/delete          401 403 403 404 403 303 303
GET    api/v1/openapi.json                 401 403 200 200 200 200 200
GET    api/v1/me                           401 403 200 200 200 200 200
GET    api/v1/images                       401 403 200 200 200 200 200
GET    api/v1/sessions                     401 403 403 200 200 200 200
GET    api/v1/sessions/{id}                401 403 403 404 200 200 200
DELETE api/v1/sessions/{id}                401 403 403 404 403 202 202
PATCH  api/v1/sessions/{id}                401 403 403 404 403 400 400
POST   api/v1/sessions/{id}/keep           401 403 403 404 403 409 409
POST   api/v1/sessions/{id}/extend         401 403 403 404 403 409 409
POST   api/v1/sessions/{id}/park            401 403 403 404 403 409 409
POST   api/v1/sessions/{id}/wake            401 403 403 404 403 409 409
POST   api/v1/sessions/{id}/never-park      401 403 403 404 403 409 409
POST   api/v1/sessions/{id}/may-park        401 403 403 404 403 409 409
GET    api/v1/sessions/{id}/log             401 403 403 404 404 404 404
GET    api/v1/sessions/{id}/setup           401 403 403 404 404 403 403
POST   api/v1/sessions/{id}/image          401 403 403 404 403 403 409
GET    api/v1/sessions/{id}/meter          401 403 403 404 200 200 200
GET    api/v1/sessions/{id}/receipt        401 403 403 404 200 200 200
GET    api/v1/meters                       401 403 403 200 200 200 200
GET    api/v1/history                      401 403 403 200 200 200 200
GET    api/v1/history.csv                  401 403 403 200 200 200 200
GET    api/v1/advice                       401 403 403 200 200 200 200
GET    api/v1/queue                        401 403 403 200 200 200 200
GET    api/v1/capacity                     401 403 403 200 200 200 200
GET    api/v1/forecast                     401 403 403 200 200 200 200
GET    api/v1/events                       401 403 403 200 200 200 200
GET    api/v1/private-images               401 403 403 200 403 200 200
GET    api/v1/private-images/{id}          401 403 403 404 403 200 200
DELETE api/v1/private-images/{id}          401 403 403 404 403 202 202
PUT    api/v1/private-images/{id}/name     401 403 403 404 403 409 409
PUT    api/v1/private-images/{id}/shares   401 403 403 404 403 200 200
PUT    api/v1/private-images/{id}/answer   401 403 403 404 403 403 403
GET    api/v1/private-images/{id}/recipe   401 403 403 404 403 404 404
"""
"""Statuses for each of `ROLES`, by method and path; targets belong to alice. A new endpoint needs a line.

Only administrators may use endpoints below admin/: test_group_administrators.py has the statuses of these.
"""

BODIES = {
    "api/v1/sessions/{id}/image": {"name": "other"},
    "api/v1/private-images/{id}/name": {"name": "other"},
    "api/v1/private-images/{id}/shares": {"users": [], "groups": []},
    "api/v1/private-images/{id}/answer": {"accepted": True},
    "api/v1/admin/sessions/{id}/priority": {"priority": 7},
    "api/v1/admin/nodes/{id}": {"action": "uncordon"},
    "api/v1/admin/banner": {"text": "hello"},
}
"""What is sent to an endpoint of the API that wants something."""


def is_admins(path: str) -> bool:
    return path.startswith(("admin/", "api/v1/admin/"))


def expected() -> dict[tuple[str, str], list[int]]:
    """Return the table, by method and path; without a status of administrators for endpoints below admin/."""
    found = {}
    for line in TABLE.strip().splitlines():
        words = line.split()
        method, *path = words[: -len(ROLES)]
        found[method, path[0] if path else ""] = [int(word) for word in words[-len(ROLES) :]]
    for path, handler in served():
        for method in sorted(methods_of(handler)) if is_admins(path) else ():
            page = method.upper() == "GET" and not path.startswith("api/")
            found[method.upper(), path] = [302 if page else 401, *[403] * 5]
    return found


EXPECTED = expected()
READS = [path for method, path in EXPECTED if method == "GET" and path != "api/v1/events"]
OF_ONE = [
    key for key in EXPECTED if "{id}" in key[1] and not key[1].startswith("static/") and not is_admins(key[1])
]
WRITES = [key for key in EXPECTED if key[0] != "GET"]


filled = module_world(Filled, "service")


def token_of(world: Filled, role: str) -> str | None:
    tokens = {
        "nobody": None,
        "bare service": f"{world.hub.token}-bare",
        "bare token": world.only_access,
        "carol": world.carol,
        "server": world.alices_server,
        "alice": world.alice,
        "admin": world.admin,
    }
    return tokens[role]


def target_of(world: Filled, path: str) -> str:
    """Return the path with what is alice's, or what everybody may see, in it."""
    if path.startswith("static/"):
        return path.replace("{id}", "fgpu.css")
    if path.startswith("admin/images/"):
        return path.replace("{id}", "python")
    if path == "admin/nodes/{id}":
        return path.replace("{id}", "drain?node=local")
    if path == "api/v1/admin/nodes/{id}":
        return path.replace("{id}", "local")
    if path == "api/v1/admin/quotas":
        return f"{path}?user=somebody"
    image = str(world.alices_image())
    if "private-images/{id}" in path:
        return path.replace("{id}", image)
    return path.replace("{id}", str(world.alice_runs.id))


def with_more(target: str, more: str) -> str:
    return f"{target}{'&' if '?' in target else '?'}{more}"


def sent(method: str, path: str) -> dict[str, Any]:
    if (method, path) == ("PUT", "api/v1/admin/quotas"):
        return {"json": {"user": "nobody", "max_sessions": 9}}
    return {"json": BODIES.get(path, {})} if method != "GET" and path.startswith("api/") else {}


def test_every_endpoint_is_in_the_table() -> None:
    found = {(method.upper(), path) for path, handler in served() for method in methods_of(handler)}
    assert set(EXPECTED) == found, "see TABLE above"


@pytest.mark.parametrize(("method", "path"), EXPECTED, ids=[" ".join(key) for key in EXPECTED])
def test_each_role_gets_the_status_of_the_table(filled: Filled, method: str, path: str) -> None:
    found = []
    roles = ROLES[: len(EXPECTED[method, path])]
    for role in roles:
        # A permitted role changes the target, so each role gets a new one.
        target, token = target_of(filled, path), token_of(filled, role)
        with filled.hub.ask(method, target, token, stream=True, **sent(method, path)) as answer:
            found.append(answer.status_code)
            if role != "admin" and path != "api/v1/events":
                assert SECRET not in answer.text, f"{role} learns of what is bob's"
    assert dict(zip(roles, found, strict=True)) == dict(zip(roles, EXPECTED[method, path], strict=True))


@pytest.mark.parametrize(("method", "path"), OF_ONE, ids=[" ".join(key) for key in OF_ONE])
def test_sessions_of_others_are_not_found_and_not_changed(filled: Filled, method: str, path: str) -> None:
    theirs = filled.bobs_image if "private-images/{id}" in path else filled.bob_runs.id
    before = filled.store.session(filled.bob_runs.id), PrivateImages(filled.store).get(filled.bobs_image)
    for role in ("alice", "carol", "server"):
        answer = filled.hub.ask(
            method, path.replace("{id}", str(theirs)), token_of(filled, role), **sent(method, path)
        )
        assert answer.status_code in (403, 404), role
        assert SECRET not in answer.text
    assert (
        filled.store.session(filled.bob_runs.id),
        PrivateImages(filled.store).get(filled.bobs_image),
    ) == before


ENDS = [
    key
    for key in OF_ONE
    if key[1] in ("end/{id}", "keep/{id}", "extend/{id}", "resize/{id}")
    or key[1].startswith("api/v1/sessions/{id}")
]


@pytest.mark.parametrize(("method", "path"), ENDS, ids=[" ".join(key) for key in ENDS])
def test_ended_session_of_another_user_is_not_found(filled: Filled, method: str, path: str) -> None:
    for token in (filled.carol, filled.alice, filled.alices_server):
        told = []
        for number in (filled.bobs_past.id, 999_999):
            answer = filled.hub.ask(method, path.replace("{id}", str(number)), token, **sent(method, path))
            told.append((answer.status_code, answer.text.replace(f"session {number}", "session N")))
        assert told[0] == told[1]


MORE = ("all=1", "user=bob", "show=all", "ended=1", "ended=1&all=1&user=bob&show=all&scope=all&owner=bob")


@pytest.mark.parametrize("path", READS)
def test_no_argument_shows_sessions_of_others(filled: Filled, path: str) -> None:
    for more in MORE:
        for role in ("alice", "server"):
            answer = filled.hub.ask("GET", with_more(target_of(filled, path), more), token_of(filled, role))
            assert answer.status_code < 500, answer.text
            assert SECRET not in answer.text, f"{role} with {more}"


def test_names_are_visible_to_permitted_roles(filled: Filled) -> None:
    """Else the tests above would show nothing."""
    seen = [
        path
        for path in READS
        if SECRET
        in filled.hub.ask("GET", with_more(target_of(filled, path), "all=1&ended=1"), filled.admin).text
    ]
    assert {"api/v1/sessions", "api/v1/history", "api/v1/history.csv", "api/v1/private-images", ""} <= set(
        seen
    )
    own = filled.hub.ask("GET", f"api/v1/sessions/{filled.bob_runs.id}/meter", filled.bob)
    assert SECRET in own.text


def test_meter_of_a_session_that_was_never_measured_is_unknown(filled: Filled) -> None:
    meter = filled.hub.ask("GET", f"api/v1/sessions/{filled.bobs_secret.id}/meter", filled.bob).json()
    assert (meter["now"], meter["points"], meter["processes"]) == (None, [], [])


def test_events_hide_sessions_of_others(filled: Filled) -> None:
    for token, learns in ((filled.alice, False), (filled.alices_server, False), (filled.bob, True)):
        lines = []
        with filled.hub.ask(
            "GET", "api/v1/events", token, stream=True, headers={"Last-Event-ID": "1"}
        ) as answer:
            for line in answer.iter_lines(chunk_size=1, decode_unicode=True):
                lines.append(line)
                if line == "event: queue":
                    break
        assert any(line == "event: change" for line in lines)
        assert (SECRET in "\n".join(lines)) is learns


@pytest.fixture(scope="module")
def browser(filled: Filled) -> requests.Session:
    """A browser in which alice has logged in, also at the service."""
    found = filled.hub.browser("alice")
    filled.hub.page(found)
    return found


@pytest.mark.parametrize(("method", "path"), WRITES, ids=[" ".join(key) for key in WRITES])
def test_writes_from_browsers_need_an_xsrf_token(
    filled: Filled, browser: requests.Session, method: str, path: str
) -> None:
    version = filled.store.version()
    url = f"{filled.hub.url}/services/fgpu/{target_of(filled, path)}"
    answer = browser.request(method, url, allow_redirects=False, timeout=30, **sent(method, path))
    assert answer.status_code == 403
    assert filled.store.version() == version


# --- Asking again ---

UNLIKE = (
    # Nothing here has one.
    "api/v1/private-images/{id}/recipe",
    "api/v1/sessions/{id}/log",
    # For the session's own token alone.
    "api/v1/sessions/{id}/setup",
    # These tell how long something has lasted by now.
    "api/v1/admin/overview",
    "api/v1/admin/queue",
    "api/v1/admin/usage",
    "api/v1/admin/usage.csv",
)
"""Of these there is no second answer that is the same."""


def test_unchanged_answers_are_304(filled: Filled) -> None:
    # A receipt with a fixed time.
    paths = [path for path in READS if path.startswith("api/") and path not in UNLIKE]
    targets = [
        path.replace("{id}", str(filled.alices_past.id))
        if path.endswith("/receipt")
        else target_of(filled, path)
        for path in paths
    ]

    def token(target: str) -> str:
        return filled.admin if target.startswith("api/v1/admin/") else filled.alice

    firsts = {target: filled.hub.ask("GET", target, token(target)) for target in targets}
    for first in firsts.values():
        assert first.status_code == 200
        assert first.headers["Cache-Control"] == "private, no-cache"
    # A clock in the answer would differ at the second request.
    began = now_s()
    until(lambda: now_s() > began + 2)
    for target, first in firsts.items():
        again = filled.hub.ask("GET", target, token(target), headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.text) == (304, ""), target
        other = filled.hub.ask("GET", target, token(target), headers={"If-None-Match": '"other"'})
        assert (other.status_code, other.text) == (200, first.text), target


NO_TEXT = "%ED%A0%80"
"""Half of a pair of surrogates: no text in UTF-8."""


def test_an_argument_that_is_no_text_is_a_bad_request_everywhere(filled: Filled) -> None:
    names = ("part", "show", "group", "image", "by", "before", "user", "ids", "end", "node", "last_event_id")
    failed = []
    for path in READS:
        target = target_of(filled, path)
        for more in (f"part={NO_TEXT}", "&".join(f"{name}={NO_TEXT}" for name in names)):
            with filled.hub.ask("GET", with_more(target, more), filled.admin, stream=True) as answer:
                # Where an error's page fails in turn, it is empty.
                if answer.status_code >= 500 or not answer.text:
                    failed.append(f"{path}?{more}: {answer.status_code}")
    assert failed == []
