"""A miniature Hub for tests that kill it: takes sessions through their life and prints each committed step."""

from __future__ import annotations

import sys
from itertools import count

from store_worlds import S, ask, end, node, schedule

from fgpu_scheduler.store.store import Store


def main(url: str, prefix: str) -> None:
    store = Store(url)
    store.open()
    store.set_nodes([node(devices=2)], now_s=0)
    for live in store.snapshot(0).sessions:
        # Sessions that an earlier writer left: end each, as reconciliation would.
        if live.state is S.SCHEDULED:
            live = store.move(live.id, S.PREPARING, now_s=0)
        if live.state is S.PREPARING:
            live = store.move(live.id, S.RUNNING, now_s=0)
        if live.state is S.RUNNING:
            end(store, live.id)
        elif live.state is S.TERMINATING:
            store.move(live.id, S.TERMINATED, now_s=0)
    print("ready", flush=True)
    for number in count():
        session = store.submit([ask(f"{prefix}{number}", fgpu_milli=600)], now_s=number)[0]
        print(session.id, session.state, flush=True)
        for placed in schedule(store, now_s=number):
            print(placed.id, placed.state, flush=True)
            for to in (S.PREPARING, S.RUNNING):
                print(placed.id, store.move(placed.id, to, now_s=number).state, flush=True)
        for running in store.snapshot(number).sessions[:-2]:
            if running.state is S.RUNNING:
                print(running.id, end(store, running.id, now_s=number).state, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
