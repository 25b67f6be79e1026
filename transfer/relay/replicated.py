"""Several relays that hold the same objects, so that nothing is lost when one of them dies.

Owns the choice of the copy to talk to, writing to all copies, and repairing a copy that missed writes. An
object counts as written when every copy that answers has it, and at least one does. Any copy can be read. An
embedded relay hands objects on to its peers, so that they cross the trainer's link once. A Mooncake store
beside another one copies its frames (nearby_copies.py), and their arrival is checked before their version
counts (owed_frames.py). All other copies are written one by one. A copy that does not answer is not called
for a while. Never decides which objects are needed: the publisher passes them to repair().

A copy that comes back may still hold an older HEAD. Followers never go back within a run (follower.py), and
the next publish repairs the copy.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import TypeVar

from rose.errors import RelayUnreachable
from rose.transfer.format import manifest
from rose.transfer.relay.copies import RelayCopy
from rose.transfer.relay.owed_frames import MOST_OWED_BYTES, pair_up
from rose.transfer.relay.protocol import Relay, RelayChanges
from rose.types import BytesLike

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class ReplicatedRelay(Relay):
    """Copies of one relay; see rose.transfer.relay.protocol.Relay.

    copies: (URL, function that opens it), in order of preference. Raises: RelayUnreachable when none answers.
    """

    def __init__(self, copies: Iterable[tuple[str, Callable[[], Relay]]]) -> None:
        self._copies = [RelayCopy(url, open_copy) for url, open_copy in copies]
        self._owed = pair_up(self._copies)
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
            # A copy that came back empty says nothing about what the others hold.
            if data is not None:
                return data
        if len(failures) == len(self._copies):
            raise failures[0]
        return None

    def get_several(self, keys: Sequence[str]) -> list[BytesLike | None]:
        found = self._first(lambda relay: relay.get_several(keys))
        if found[0] is None:
            return [self.get(keys[0])]
        return list(takewhile(lambda data: data is not None, found))

    def remove(self, keys: Iterable[str]) -> None:
        names = list(keys)
        for owed in self._owed:
            owed.drop(names)
        self._all(lambda relay: relay.remove(names))

    def keys(self, prefix: str) -> list[str]:
        return sorted({name for names in self._all(lambda relay: relay.keys(prefix)) for name in names})

    def get_all(self, prefix: str) -> dict[str, bytes]:
        merged: dict[str, bytes] = {}
        for found in reversed(self._all(lambda relay: relay.get_all(prefix))):
            merged.update(found)  # as with get(), the copy that comes first in order decides
        return merged

    def lacking(self, keys: Sequence[str]) -> set[str]:
        """Returns the keys that a copy which answers does not have."""
        return set().union(*self._all(lambda relay: relay.lacking(keys)))

    def wait(self, prefixes: Sequence[str], seen: str | None, timeout_s: float) -> RelayChanges:
        """Waits at the copy that get() asks first. Another copy does not know `seen`, so the wait ends at
        once there.
        """
        return self._first(lambda relay: relay.wait(prefixes, seen, timeout_s))

    def close(self) -> None:
        for copy in self._copies:
            copy.close()

    def repair(
        self, prefix: str, versions: Iterable[str], newest: Sequence[str], spared: tuple[str, ...] = ()
    ) -> None:
        """Gives every copy in use the objects of `versions`, and all that any copy has beside versions.

        Where all copies have `newest` and never failed to answer, nothing is missing, and listings, which
        grow with the chain, need not cross the link.
        """
        if not any(self._is_behind(copy, newest) for copy in self._copies):
            return
        held: dict[RelayCopy, set[str]] = {}
        followed: dict[RelayCopy, bytes | None] = {}
        for copy in self._copies:
            if not copy.is_resting:  # a resting copy stays behind, and the next publish repairs it
                with suppress(RelayUnreachable):
                    followed[copy] = copy.call(lambda relay: relay.get(manifest.HEAD_RUN_KEY))
                    held[copy] = set(copy.call(lambda relay: relay.keys(prefix)))
        others = {name for names in held.values() for name in names if not manifest.is_version_key(name)}
        wanted = {*versions, *others}
        newest_run = next((run for run in followed.values() if run is not None), None)
        for copy, names in held.items():
            with suppress(RelayUnreachable):
                missing = wanted - names
                fetched = {name for name in missing if self._fetches(copy, name)}
                # A relay folds when FOLD arrives, so the frames have to be there first.
                for name in sorted(
                    missing - fetched, key=lambda name: (manifest.fold_of(name) is not None, name)
                ):
                    self._give(copy, name, self.get(name))
                surplus = sorted(name for name in names - wanted if not name.startswith(spared))
                copy.call(lambda relay, surplus=surplus: relay.remove(surplus))  # type: ignore[misc]
                if followed[copy] != newest_run:
                    self._give(copy, manifest.HEAD_RUN_KEY, newest_run)
                copy.is_behind = bool(fetched)  # the next publish looks again, until they have arrived

    @staticmethod
    def _is_behind(copy: RelayCopy, newest: Sequence[str]) -> bool:
        if copy.is_resting:
            return False
        with suppress(RelayUnreachable):
            return copy.is_behind or bool(copy.lacking(newest))
        return False

    def _fetches(self, copy: RelayCopy, name: str) -> bool:
        """Returns whether the copy fetches this object from another copy by itself."""
        is_frame = manifest.bucket_of(name) is not None
        return is_frame and any(owed.copy is copy and owed.is_fetching for owed in self._owed)

    @staticmethod
    def _give(copy: RelayCopy, name: str, data: bytes | None) -> None:
        if data is not None:
            logger.info("relay copy receives an object that it missed: url=%s key=%s", copy.url, name)
            copy.call(lambda relay: relay.upsert(name, data))

    def _first(self, work: Callable[[Relay], Answer]) -> Answer:
        """Returns the answer of the first copy that answers. Raises: RelayUnreachable when none does."""
        failures: list[RelayUnreachable] = []
        for copy in self._in_order():
            try:
                return copy.call(work)
            except RelayUnreachable as error:
                failures.append(error)
        raise failures[0]

    def _in_order(self) -> list[RelayCopy]:
        """Returns the copies with the resting ones last: those are asked only when no other can answer."""
        return sorted(self._copies, key=lambda copy: copy.is_resting)

    def _all(self, work: Callable[[Relay], Answer]) -> list[Answer]:
        """Returns the answers of all copies that answer. Raises: RelayUnreachable when none does."""
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
        """Writes to every copy; an object that follows a version's frames waits until every copy has them.

        It waits before anything is written, so a full copy makes only this first attempt fail.
        """
        is_frame = manifest.bucket_of(key) is not None
        if manifest.is_version_key(key):
            for owed in self._owed:
                owed.settle(MOST_OWED_BYTES if is_frame else 0)
        failures: list[RelayUnreachable] = []
        is_written = False
        pending = self._in_order()
        while pending:
            copy = pending.pop(0)
            if copy.is_resting and is_written:
                continue
            peers = [peer for peer in pending if not peer.is_resting]
            try:
                done = copy.write(key, data, peers, is_replacing=is_replacing)
            except RelayUnreachable as error:
                failures.append(error)
                continue
            is_written = True
            if is_frame:
                done += self._leave_to_them(copy, key, data)
            pending = [peer for peer in pending if peer not in done]
        if not is_written:
            raise failures[0]

    def _leave_to_them(self, written: RelayCopy, key: str, data: bytes) -> list[RelayCopy]:
        """Returns the copies that fetch this frame themselves from the copy that has it."""
        fetching = [owed for owed in self._owed if owed.source is written and owed.is_fetching]
        for owed in fetching:
            owed.add(key, data)
        return [owed.copy for owed in fetching]
