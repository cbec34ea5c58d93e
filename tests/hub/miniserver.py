"""A session's server for tests: answers HTTP at its prefix within a few milliseconds, and ends on SIGTERM.

Takes from the environment what jupyterhub-singleuser takes: where to listen.
"""

import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("X-JupyterHub-Version", os.environ.get("MINI_VERSION", "6.1.1"))
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *args: os._exit(0))
    where = urlparse(os.environ["JUPYTERHUB_SERVICE_URL"])
    print("miniserver for session", os.environ.get("FGPU_SESSION_ID"), file=sys.stderr, flush=True)
    ThreadingHTTPServer((where.hostname or "0.0.0.0", where.port), Answer).serve_forever()
