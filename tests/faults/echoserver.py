"""A session's server for tests, with a websocket at ``echo``: it says back what it is told, and which session it is.

Takes from the environment what jupyterhub-singleuser takes: where to listen, and below which prefix.
"""

import asyncio
import os
import signal
from urllib.parse import urlparse

from tornado.web import Application, RequestHandler
from tornado.websocket import WebSocketHandler


class Answer(RequestHandler):
    def get(self):
        self.set_header("X-JupyterHub-Version", "6.1.1")
        self.write({})


class Echo(WebSocketHandler):
    def check_origin(self, origin):
        return True

    def on_message(self, message):
        self.write_message(f"{os.environ['FGPU_SESSION_ID']}: {message}")


async def serve():
    signal.signal(signal.SIGTERM, lambda *args: os._exit(0))
    where = urlparse(os.environ["JUPYTERHUB_SERVICE_URL"])
    Application([(r".*/echo", Echo), (r".*", Answer)]).listen(where.port, where.hostname or "0.0.0.0")
    await asyncio.Event().wait()


asyncio.run(serve())
