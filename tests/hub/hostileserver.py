"""A session's server for tests that means harm: it answers every request with an error of 100 MB.

How often it was asked is the size of its file in the folder that it is given.
"""

import contextlib
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        with (Path(sys.argv[1]) / os.environ["FGPU_SESSION_ID"]).open("a") as file:
            file.write("x")
        self.send_response(500)
        self.send_header("Content-Length", "100000000")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(100):
                self.wfile.write(b"x" * 1_000_000)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    where = urlparse(os.environ["JUPYTERHUB_SERVICE_URL"])
    ThreadingHTTPServer((where.hostname or "0.0.0.0", where.port), Answer).serve_forever()
