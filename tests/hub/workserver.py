"""A session's server for tests that tells what its kernels do: as a file says, read at every question.

The file is ``$WORK_DIR/USER-SERVER.json``: ``{"kernels": [{"execution_state": ..., "last_activity": ...}], ...}``.
The token of the last question is written beside it.
"""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

NAME = f"{os.environ['JUPYTERHUB_USER']}-{os.environ.get('JUPYTERHUB_SERVER_NAME', '')}"
FILE = Path(os.environ["WORK_DIR"]) / f"{NAME}.json"
LONG_AGO = "2020-01-01T00:00:00Z"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        kernels = json.loads(FILE.read_text()) if FILE.exists() else []
        path = urlparse(self.path).path
        body = {"last_activity": LONG_AGO} if path.endswith("/api/status") else {}
        if path.endswith("/api/kernels"):
            FILE.with_suffix(".token").write_text(self.headers.get("Authorization", ""))
            body = kernels
        # It notes no input, as a server without our extension.
        self.send_response(404 if path.endswith("/fgpu/api/input") else 200)
        self.send_header("X-JupyterHub-Version", "6.1.1")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *args: os._exit(0))
    where = urlparse(os.environ["JUPYTERHUB_SERVICE_URL"])
    print("workserver for session", os.environ.get("FGPU_SESSION_ID"), file=sys.stderr, flush=True)
    ThreadingHTTPServer((where.hostname or "0.0.0.0", where.port), Answer).serve_forever()
