"""One of several relays that hold the same objects.

Owns when the copy is opened, and for how long it is not called after it failed to answer, so that it does not
slow down every call. Never decides what is written to it; ReplicatedRelay does.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rose.errors import RelayError, RelayUnreachable
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)

REST_S = 2.0
"""The shortest time for which a copy that did not answer is left alone while another one answers."""
REST_OVER_WAIT = 6
"""A copy rests this many times as long as it was waited for: one that hangs costs seconds at each call."""
Answer = TypeVar("Answer")


class RelayCopy:
    """One relay, opened at its first use."""

    def __init__(self, url: str, open_copy: Callable[[], Relay]) -> None:
        self.url = url
        self._open = open_copy
        self._relay: Relay | None = None
        self._opening = threading.Lock()
        self._rests_until_s = 0.0
        self.is_behind = False
        """Whether it failed to answer and may lack what was written since then; repair() clears this."""

    @property
    def is_resting(self) -> bool:
        return time.monotonic() < self._rests_until_s

    def call(self, work: Callable[[Relay], Answer]) -> Answer:
        """Runs `work` on the relay. Raises: RelayUnreachable, and then the copy rests; other RelayErrors
        unchanged.
        """
        asked_s = time.monotonic()
        try:
            with self._opening:
                if self._relay is None:
                    self._relay = self._open()
            answer = work(self._relay)
        except RelayUnreachable as error:
            logger.warning("relay copy does not answer: url=%s error=%s", self.url, error)
            self.is_behind = True
            now_s = time.monotonic()
            self._rests_until_s = now_s + max(REST_S, REST_OVER_WAIT * (now_s - asked_s))
            raise
        self._rests_until_s = 0.0
        return answer

    def write(
        self, key: str, data: bytes, peers: "list[RelayCopy]", *, is_replacing: bool
    ) -> "list[RelayCopy]":
        """Writes to this copy. Returns the `peers` that it handed the object on to. Raises: RelayError."""

        urls = [peer.url for peer in peers]
        try:
            taken = self.call(
                lambda relay: relay.put_with_copies(key, data, is_replacing=is_replacing, copy_to=urls)
            )
            return [peer for peer in peers if peer.url in taken]
        except RelayUnreachable:
            raise
        except RelayError:
            # Another copy may have handed the object on to this one before it died: that is no second put.
            if is_replacing or self.call(lambda relay: relay.get(key)) != data:
                raise
            return []

    def lacking(self, keys: Sequence[str]) -> set[str]:
        """Returns the keys that this copy has no object for, as Relay.lacking() does. Raises: RelayError."""
        return self.call(lambda relay: relay.lacking(keys))

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._relay is not None:
            self._relay.close()
