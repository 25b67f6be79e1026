"""Says on stderr, now and then, how long a benchmark has run and in which of its functions it is.

Owns one thread. Benchmarks need to say nothing: what runs is read off the main thread's stack.
"""

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EVERY_S = 30.0
_BENCHMARKS = Path(__file__).parent.parent


@contextmanager
def shown_progress(program: str, every_s: float = EVERY_S) -> Iterator[None]:
    """Prints a line every ``every_s`` seconds inside the context."""
    ended, began_s, main = threading.Event(), time.monotonic(), threading.get_ident()

    def show() -> None:
        while not ended.wait(every_s):
            print(f"{program}: {time.monotonic() - began_s:.0f} s, in {_where(main)}", file=sys.stderr)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _where(thread: int) -> str:
    """Returns the benchmark's functions on a thread's stack, the outermost first."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    own = [each for each in stack if _BENCHMARKS in Path(each.filename).parents]
    named = [each.name for each in own if not each.name.startswith(("<", "main", "run_benchmark"))]
    return " > ".join(dict.fromkeys(named)) or "its own set-up"
