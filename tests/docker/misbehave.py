"""Goes before the miniserver's source: fails in the way that the server's name says, or that a signal asks for.

Runs in a session's container, where it is the child of tini, which passes signals on.
"""

import os
import signal
import subprocess
import sys

EAT = "eaten = bytearray(4 * 2**30)"


def eat(*args):
    exec(EAT)


def let_a_child_eat_and_end_well(*args):
    subprocess.run([sys.executable, "-c", EAT], check=False)
    os._exit(0)


signal.signal(signal.SIGUSR1, eat)
signal.signal(signal.SIGUSR2, let_a_child_eat_and_end_well)
match os.environ.get("JUPYTERHUB_SERVER_NAME"):
    case "exits":
        raise SystemExit("no kernel here")
    case "exits-soon":
        import time

        time.sleep(1)
        raise SystemExit("no kernel here")
    case "writes":
        with open("/tmp/much", "wb") as file:
            while file.write(bytes(2**20)):
                file.flush()
    case "slow":
        import http.server
        import time

        class SlowAtFirst(http.server.ThreadingHTTPServer):
            """Takes its first connection at once, and answers nothing for six seconds."""

            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.ready_at = None

            def process_request_thread(self, *args):
                self.ready_at = self.ready_at or time.monotonic() + 6
                time.sleep(max(0, self.ready_at - time.monotonic()))
                super().process_request_thread(*args)

        http.server.ThreadingHTTPServer = SlowAtFirst
    case "hangs":
        while True:
            signal.pause()
