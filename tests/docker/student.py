"""What a student's browser does, as a program: log in, fill in the form, wait, run a cell, and print what it gives.

student.py URL CERTIFICATE USER PASSWORD CODE
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid

import requests
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

READY_WITHIN_S = 600


def main(url: str, certificate: str, user: str, password: str, code: str) -> None:
    """Do it, and say where it fails."""
    browser = requests.Session()
    browser.verify = certificate
    browser.get(f"{url}/hub/login", timeout=60)
    form = {"username": user, "password": password, "_xsrf": browser.cookies.get("_xsrf", path="/hub/")}
    page = browser.post(f"{url}/hub/login?next=/hub/spawn", data=form, timeout=60)
    if 'name="fgpu"' not in page.text:
        sys.exit(f"no form: {page.status_code} {page.url}\n{page.text[:2000]}")
    proof = {"_xsrf": browser.cookies.get("_xsrf", path="/hub/")}
    page = browser.post(
        f"{url}/hub/spawn", params=proof, data={"image": "python", "fgpu": "0.5"}, timeout=120
    )
    if not page.ok:
        sys.exit(f"the form was refused: {page.status_code}\n{page.text[:2000]}")
    ends = time.monotonic() + READY_WITHIN_S
    while not (page := browser.get(f"{url}/user/{user}/lab", timeout=60)).url.endswith("/lab") or not page.ok:
        if time.monotonic() > ends:
            sys.exit(f"JupyterLab does not open: {page.status_code} {page.url}\n{page.text[:2000]}")
        time.sleep(1)
    server = f"{url}/user/{user}/"
    token = browser.cookies.get("_xsrf", path=f"/user/{user}/")
    kernel = browser.post(f"{server}api/kernels", headers={"X-XSRFToken": token}, timeout=120)
    if not kernel.ok:
        sys.exit(f"no kernel: {kernel.status_code}\n{kernel.text[:2000]}")
    cookies = "; ".join(f"{c.name}={c.value}" for c in browser.cookies if c.path in ("/", f"/user/{user}/"))
    print(asyncio.run(run(f"{server}api/kernels/{kernel.json()['id']}/channels", certificate, cookies, code)))


async def run(url: str, certificate: str, cookies: str, code: str) -> str:
    """Return what an expression gives in a kernel."""
    request = HTTPRequest(url.replace("http", "ws", 1), ca_certs=certificate, headers={"Cookie": cookies})
    connection = await websocket_connect(request)
    asked = uuid.uuid4().hex
    header = {
        "msg_id": asked,
        "msg_type": "execute_request",
        "session": asked,
        "username": "",
        "version": "5.3",
    }
    content = {"code": code, "silent": False}
    await connection.write_message(
        json.dumps(
            {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        )
    )
    async with asyncio.timeout(120):
        while True:
            said = json.loads(await connection.read_message() or "null")
            if said["parent_header"].get("msg_id") == asked and said["msg_type"] in (
                "execute_result",
                "error",
            ):
                return json.dumps(said["content"].get("data", said["content"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
