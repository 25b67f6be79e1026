"""Several relays that hold the same objects: one may die, and nothing is lost.

Owns: the choice of the copy to talk to, writing to all of them, bringing one up to date that missed writes.
Promises: an object is written when every copy that answers has it, and at least one does; it is read from
any. An embedded relay hands objects on to its peers itself, so that they cross the link from the trainer
once; so does a Mooncake store that another one stands beside, which copies its frames (nearby_copies.py).
Other copies are written one by one. A copy that does not answer rests for a while instead of
slowing every call.
Never decides which objects are needed: the publisher says so in repair().

A copy that comes back may still hold an older HEAD. Followers never go back within a run (follower.py), and
the next publish brings it up to date.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from rose.errors import RelayError, RelayUnreachable
from rose.transfer import manifest
from rose.transfer.embedded_relay import EmbeddedRelay
from rose.transfer.mooncake_relay import MooncakeRelay
from rose.transfer.relay import Changes, Relay, address_of, beside_of

logger = logging.getLogger(__name__)

REST_S = 2.0
"""How long a copy that did not answer is left alone, at least, while another one does."""
REST_OVER_WAIT = 6
"""And by how much longer than it was waited for: one that hangs costs seconds each time it is asked."""
_FETCH_S = 2.0
_FETCH_BYTES_PER_S = 20e6
_FETCH_POLL_S = 0.01
Answer = TypeVar("Answer")


class _Copy:
    """One relay, opened at its first use."""

    def __init__(self, url: str, open_copy: Callable[[], Relay]) -> None:
        self.url = url
        self._open = open_copy
        self._relay: Relay | None = None
        self._opening = threading.Lock()
        self._rests_until_s = 0.0
        self._fetches_from_s = 0.0

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
            now_s = time.monotonic()
            self._rests_until_s = now_s + max(REST_S, REST_OVER_WAIT * (now_s - asked_s))
            raise
        self._rests_until_s = 0.0
        return answer

    def is_beside(self, other: "_Copy") -> bool:
        """Whether this copy's own process copies frames from the other one, as far as we know."""
        return beside_of(self.url) == address_of(other.url) and time.monotonic() >= self._fetches_from_s

    def fetches(self, key: str, num_bytes: int) -> bool:
        """Waits until it holds a frame that the copy beside it has; False when that takes too long."""

        def holds(relay: Relay) -> bool:
            return isinstance(relay, MooncakeRelay) and relay.holds(key)

        deadline_s = time.monotonic() + _FETCH_S + num_bytes / _FETCH_BYTES_PER_S
        with suppress(RelayUnreachable):
            while time.monotonic() < deadline_s:
                if self.call(holds):
                    return True
                time.sleep(_FETCH_POLL_S)
        logger.warning("relay copy does not fetch from the one beside it: url=%s key=%s", self.url, key)
        self._fetches_from_s = time.monotonic() + REST_OVER_WAIT * _FETCH_S
        return False

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()


class ReplicatedRelay:
    """See rose.transfer.relay.Relay; `copies` are (URL, how to open it) in order of preference.

    Raises: RelayUnreachable when none answers.
    """

    def __init__(self, copies: Iterable[tuple[str, Callable[[], Relay]]]) -> None:
        self._copies = [_Copy(url, open_copy) for url, open_copy in copies]
        self._all(lambda relay: relay.keys("rose/HEAD_RUN"))

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data, is_replacing=False)

    def upsert(self, key: str, data: bytes) -> None:
        self._write(key, data, is_replacing=True)

    def get(self, key: str) -> bytes | None:
        failures: list[RelayUnreachable] = []
        for copy in self._in_order():
            try:
                data = copy.call(lambda relay: relay.get(key))
            except RelayUnreachable as error:
                failures.append(error)
                continue
            # One that came back empty has nothing to say about what the others hold.
            if data is not None:
                return data
        if len(failures) == len(self._copies):
            raise failures[0]
        return None

    def remove(self, keys: Iterable[str]) -> None:
        names = list(keys)
        self._all(lambda relay: relay.remove(names))

    def keys(self, prefix: str) -> list[str]:
        return sorted({name for names in self._all(lambda relay: relay.keys(prefix)) for name in names})

    def wait(self, prefixes: Sequence[str], seen: str | None, timeout_s: float) -> Changes:
        """Waits at the copy that get() asks first; to another one `seen` means nothing, and ends the wait."""
        return self._first(lambda relay: relay.wait(prefixes, seen, timeout_s))

    def close(self) -> None:
        for copy in self._copies:
            copy.close()

    def repair(self, prefix: str, wanted: Iterable[str], spared: tuple[str, ...] = ()) -> None:
        """Gives every copy that is in use the wanted objects, and takes away the others under the prefix.

        spared: prefixes of what others may be writing at this moment; nothing there is taken away.
        """
        names = set(wanted)
        for copy in self._copies:
            if copy.is_resting:
                continue  # still behind when it is back, then mended by the next one
            try:
                held = set(copy.call(lambda relay: relay.keys(prefix)))
                for name in sorted(names - held):
                    self._give(copy, name)
                surplus = sorted(name for name in held - names if not name.startswith(spared))
                copy.call(lambda relay, surplus=surplus: relay.remove(surplus))  # type: ignore[misc]
            except RelayUnreachable:
                continue  # it rests, and will still be behind when it is back

    def _give(self, copy: _Copy, name: str) -> None:
        data = self.get(name)
        if data is not None:
            logger.info("relay copy gets what it missed: url=%s key=%s", copy.url, name)
            copy.call(lambda relay: relay.upsert(name, data))

    def _first(self, work: Callable[[Relay], Answer]) -> Answer:
        """What the first copy that answers says. Raises: RelayUnreachable when none does."""
        failures: list[RelayUnreachable] = []
        for copy in self._in_order():
            try:
                return copy.call(work)
            except RelayUnreachable as error:
                failures.append(error)
        raise failures[0]

    def _in_order(self) -> list[_Copy]:
        """Those that rest come last: they are asked only when nobody else can answer."""
        return sorted(self._copies, key=lambda copy: copy.is_resting)

    def _all(self, work: Callable[[Relay], Answer]) -> list[Answer]:
        """What the copies that answer say. Raises: RelayUnreachable when none does."""
        answers: list[Answer] = []
        failures: list[RelayUnreachable] = []
        for copy in self._in_order():
            if copy.is_resting and answers:
                continue
            try:
                answers.append(copy.call(work))
            except RelayUnreachable as error:
                failures.append(error)
        if not answers:
            raise failures[0]
        return answers

    def _write(self, key: str, data: bytes, *, is_replacing: bool) -> None:
        failures: list[RelayUnreachable] = []
        is_written = False
        pending = self._in_order()
        while pending:
            copy = pending.pop(0)
            if copy.is_resting and is_written:
                continue
            peers = [peer for peer in pending if not peer.is_resting]
            try:
                done = self._write_through(copy, peers, key, data, is_replacing=is_replacing)
            except RelayUnreachable as error:
                failures.append(error)
                continue
            is_written = True
            if not is_replacing and manifest.bucket_of(key) is not None:
                done += [peer for peer in pending if peer.is_beside(copy) and peer.fetches(key, len(data))]
            pending = [peer for peer in pending if peer not in done]
        if not is_written:
            raise failures[0]

    def _write_through(
        self, copy: _Copy, peers: list[_Copy], key: str, data: bytes, *, is_replacing: bool
    ) -> list[_Copy]:
        """Writes to one copy; returns those of `peers` that it handed the object on to."""

        def write(relay: Relay) -> list[_Copy]:
            if isinstance(relay, EmbeddedRelay):
                reachable = {_address(peer.url): peer for peer in peers if _address(peer.url) is not None}
                addresses = [address for address in reachable if address is not None]
                missed = relay.write_with_copies(key, data, is_replacing=is_replacing, copy_to=addresses)
                return [peer for address, peer in reachable.items() if address not in missed]
            relay.upsert(key, data) if is_replacing else relay.put(key, data)
            return []

        try:
            return copy.call(write)
        except RelayUnreachable:
            raise
        except RelayError:
            # A copy that died after it had handed the object on leaves it behind: that is no second put.
            if is_replacing or copy.call(lambda relay: relay.get(key)) != data:
                raise
            return []


def _address(url: str) -> str | None:
    """host:port of an embedded relay, None for another kind."""
    return url.removeprefix("embedded://") if url.startswith("embedded://") else None
