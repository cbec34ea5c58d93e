"""After a line on stdin, opens the database, requests the servers in turn, and prints which it got."""

from __future__ import annotations

import sys

from store_worlds import ask

from fgpu_scheduler.errors import SessionExists
from fgpu_scheduler.store.store import Store


def main(url: str, servers: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    store = Store(url)
    store.open()
    for number in range(int(servers)):
        try:
            store.submit([ask("alice", f"server{number}")], now_s=0)
        except SessionExists:
            continue
        print(number, flush=True)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
