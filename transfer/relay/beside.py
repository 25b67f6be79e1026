"""Work that a relay's own process does in a thread, whenever objects were written.

Owns the thread, and when it looks. A failure is logged once and tried again; none ends the thread. Never
reads or writes an object itself.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from rose.errors import RoseError
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)

PREFIX = "rose/"
_WAIT_S = 1.0
_RETRY_S = 0.5


class BesideRelay(ABC):
    """A context in which a thread runs step() again and again. watched: the relay whose changes matter.

    what: the name of the work in logs. look_every_s: the pause between two looks at a store that can't report
    what was written.
    """

    def __init__(self, watched: Relay, what: str, look_every_s: float = 0.0) -> None:
        self._watched = watched
        self._what = what
        self._look_every_s = look_every_s
        self.closing = threading.Event()
        """Set when the process stops: long work ends early."""
        self._thread = threading.Thread(target=self._run, name=f"rose-{what}", daemon=True)

    @abstractmethod
    def step(self, written: Sequence[str] | None) -> int:
        """Does what there is to do and returns how much that was. Raises: RoseError.

        written: the keys written since the last call; None: any may have been.
        """

    def _run(self) -> None:
        seen: str | None = None
        is_late = False
        while not self.closing.is_set():
            try:
                changes = self._watched.wait([PREFIX], seen, _WAIT_S)
                seen = changes.seen
                self.step(changes.keys if not is_late else None)
                is_late = False
                if changes.keys is None:
                    self.closing.wait(self._look_every_s)
            except Exception as error:  # a thread that ended would leave all runs without it
                if not is_late:  # the other store may be gone for hours: warn once
                    is_known = isinstance(error, RoseError)
                    logger.warning(
                        "%s failed beside the relay, tries again: %s",
                        self._what,
                        error,
                        exc_info=not is_known,
                    )
                is_late = True
                self.closing.wait(_RETRY_S)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self.closing.set()
        self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
