"""A program that starts two processes which take no SIGTERM, prints their pids, and waits to be killed.

python parents.py fork|spawn|forkserver
"""

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from rose.engine.hooks import parent

WAIT_S = 600.0


def child(told: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.GRACE_S = 0.1
    parent.end_with_parent()
    told.send(os.getpid())
    time.sleep(WAIT_S)


def main(method: str) -> None:
    context = multiprocessing.get_context(method)
    heard, told = context.Pipe(duplex=False)
    for _ in range(2):
        context.Process(target=child, args=(told,), daemon=True).start()  # type: ignore[attr-defined]
    print(heard.recv(), heard.recv(), flush=True)
    time.sleep(WAIT_S)


if __name__ == "__main__":
    main(sys.argv[1])
