"""One of several relays that hold the same objects.

Owns: when it is opened, and how long it is left alone after it did not answer.
Promises: a copy that does not answer rests for a while instead of slowing every call.
Never decides what is written to it (ReplicatedRelay does).
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rose.errors import RelayError, RelayUnreachable
from rose.transfer.relay.embedded import EmbeddedRelay
from rose.transfer.relay.mooncake import MooncakeRelay
from rose.transfer.relay.protocol import Relay
from rose.transfer.relay.url import address_of, parse_relay_url

logger = logging.getLogger(__name__)

REST_S = 2.0
"""How long a copy that did not answer is left alone, at least, while another one does."""
REST_OVER_WAIT = 6
"""And by how much longer than it was waited for: one that hangs costs seconds each time it is asked."""
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
        """Whether it did not answer, and may lack what was written since, until repair() has seen to it."""

    @property
    def is_resting(self) -> bool:
        return time.monotonic() < self._rests_until_s

    def call(self, work: Callable[[Relay], Answer]) -> Answer:
        """Raises: RelayUnreachable, and lets the copy rest; other RelayErrors as they come."""
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
        """Writes to this copy; returns those of `peers` that it handed the object to. Raises: RelayError."""

        def write(relay: Relay) -> list[RelayCopy]:
            if isinstance(relay, EmbeddedRelay):
                reachable = {address_of(peer.url): peer for peer in peers if peer._is_embedded}
                missed = relay.write_with_copies(
                    key, data, is_replacing=is_replacing, copy_to=list(reachable)
                )
                return [peer for address, peer in reachable.items() if address not in missed]
            relay.upsert(key, data) if is_replacing else relay.put(key, data)
            return []

        try:
            return self.call(write)
        except RelayUnreachable:
            raise
        except RelayError:
            # A copy that died after it had handed the object on leaves it behind: that is no second put.
            if is_replacing or self.call(lambda relay: relay.get(key)) != data:
                raise
            return []

    def lacking(self, keys: Sequence[str]) -> set[str]:
        """Those of these keys, of one version, that are not there: of few bytes. Raises: RelayError."""

        def look(relay: Relay) -> set[str]:
            if isinstance(relay, MooncakeRelay):  # which lists everything or nothing
                return set(relay.lacking(keys))
            return set(keys).difference(relay.keys(_common_prefix(keys)))

        return self.call(look) if keys else set()

    def close(self) -> None:
        """Lets go of the connection, if there is one."""
        if self._relay is not None:
            self._relay.close()

    @property
    def _is_embedded(self) -> bool:
        return parse_relay_url(self.url)[0] == "embedded"


def _common_prefix(keys: Sequence[str]) -> str:
    pairs = enumerate(zip(min(keys), max(keys), strict=False))
    return keys[0][: next((at for at, (first, last) in pairs if first != last), None)]
