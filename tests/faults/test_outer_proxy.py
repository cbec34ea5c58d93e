"""The proxy outside the Hub: open notebooks stay connected while the Hub is killed, and routes outlive either."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import pytest
import requests

from hubprocess import HubProcess, until
from launched import launched
from notebooks import Kernel, run
from servers import ON_ONE_ENGINE

ONE = {"fgpu": "1", "cpu": "0.5", "memory_mib": 512}


@pytest.mark.timeout(600)
def test_an_open_notebook_computes_on_while_the_hub_is_killed_and_comes_back(
    make_hub: Callable[..., HubProcess], kind: str
) -> None:
    hub = make_hub(server=None, outer_proxy=True).start()
    token = hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    until(lambda: hub.ready("alice"))
    session, before = hub.sessions()["alice/"], hub.routes()
    kernel = Kernel(hub, "alice", token)
    assert kernel.run("41") == "41"

    hub.kill()
    assert kernel.run("6 * 7") == "42", "while there is no Hub"
    page = requests.get(f"{hub.url}/hub/home", timeout=60)
    assert page.status_code == 503
    assert "JupyterHub is restarting" in page.text
    assert "keep their place" in page.text
    assert hub.routes() == before, "nobody has touched the routes"

    hub.start()
    until(lambda: hub.ready("alice"), what="the session is adopted")
    assert kernel.run("40 + 3") == "43", "over the connection of before"
    assert hub.routes() == before
    again = kernel.connected()
    assert run(again, "44") == "44", "and over a new one"
    again.close()
    kernel.close()
    assert (hub.sessions()["alice/"].id, set(launched(hub, kind))) == (session.id, {session.id})

    assert hub.stop("alice").status_code in (202, 204)
    hub.reach({})
    until(lambda: launched(hub, kind) == {}, what="nothing of the session runs")
    until(lambda: "/user/alice" not in (hub.routes() or {}), what="its route is gone")


@ON_ONE_ENGINE
def test_restarted_proxy_gets_its_routes_again(make_hub: Callable[..., HubProcess], kind: str) -> None:
    hub = make_hub(outer_proxy=True).start()
    hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    until(lambda: hub.ready("alice"))
    before = hub.routes()
    assert before is not None
    assert "/user/alice" in before
    assert hub.proxy is not None
    hub.proxy.kill()
    hub.proxy.wait(30)
    hub.start_proxy()
    until(lambda: hub.routes() == before, what="the new proxy has the routes of the old one")
    assert requests.get(f"{hub.url}/user/alice/api", timeout=60).status_code == 200


@ON_ONE_ENGINE
def test_another_token_for_hub_and_proxy_ends_no_session(
    make_hub: Callable[..., HubProcess], kind: str
) -> None:
    hub = make_hub(outer_proxy=True).start()
    hub.add_user("alice")
    hub.spawn("alice", options=ONE)
    until(lambda: hub.ready("alice"))
    session = hub.sessions()["alice/"]
    hub.terminate()
    assert hub.proxy is not None
    hub.proxy.kill()
    hub.proxy.wait(30)

    old, hub.token, hub.proxy = hub.token, secrets.token_hex(16), None
    hub.start()
    until(lambda: hub.ready("alice"), what="the session is adopted")
    until(lambda: "/user/alice" in (hub.routes() or {}), what="its route is there")
    assert requests.get(f"{hub.url}/user/alice/api", timeout=60).status_code == 200
    api = f"http://127.0.0.1:{hub.port + 2}/api/routes"
    assert requests.get(api, headers={"Authorization": f"token {old}"}, timeout=10).status_code == 403
    assert (hub.sessions()["alice/"].id, set(launched(hub, kind))) == (session.id, {session.id})
