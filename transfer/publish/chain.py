"""One run's objects in the relay: the chain of deltas, its snapshots, and what may go.

Owns: which objects exist, HEAD and the oldest version that followers may still come from, the run's
announcement, removal of what nobody needs, and relay copies that missed writes.
Promises: HEAD never names an object that is not there, and is moved before anything it named is removed.
Never encodes weights. Called by the publisher's thread; make_room() and announce_coming() by those that put.
"""

import threading
import uuid
from contextlib import suppress

from rose.errors import RelayError, RelayFull
from rose.transfer.format import manifest as keys
from rose.transfer.format.layout import Layout
from rose.transfer.format.manifest import Ack, Head, HeadRun, LayoutBody, pack_body, unpack_body
from rose.transfer.format.state_hash import StateHash
from rose.transfer.relay.protocol import Relay
from rose.transfer.relay.replicated import ReplicatedRelay


class VersionChain:
    """snapshot_every: versions after which a snapshot is due at the latest.

    snapshot_share: what all deltas since the last one may come to, over its size.
    """

    def __init__(
        self, relay: Relay, run_id: str, layout: Layout, snapshot_every: int, snapshot_share: float
    ) -> None:
        self._relay = relay
        self._run_id = run_id
        self._layout = layout
        self._snapshot_every = snapshot_every
        self._snapshot_share = snapshot_share
        self._writer = uuid.uuid4().hex
        self._objects: dict[tuple[int, int | None], list[str]] = {}
        self._snapshots: list[int] = []
        self._oldest_base = 0
        self._snapshot_bytes = 0
        self._chain_bytes = 0
        self.is_announced = False
        """Whether followers may be under way on this chain; not after the relay came back empty."""
        self._head: tuple[int, StateHash] | None = None
        self._coming: int | None = None
        self._lock = threading.Lock()

    def open(self, others_write: tuple[str, ...] = ()) -> None:
        """Puts what precedes all versions, again when the relay came back empty, and mends its copies.

        others_write: prefixes under which other trainer ranks may have begun. Raises: RelayError.
        """
        if self._relay.get(keys.head_key(self._run_id)) is None:
            self._relay.upsert(keys.layout_key(self._run_id), pack_body(LayoutBody.of(self._layout)))
            self.is_announced = False
        elif isinstance(self._relay, ReplicatedRelay):
            prefix = keys.run_prefix(self._run_id)
            written = {key for names in self._objects.values() for key in names}
            last = max((version for version, _ in self._objects), default=None)
            newest = [
                key for (version, _), names in self._objects.items() if version == last for key in names
            ]
            self._relay.repair(prefix, written, newest, others_write)

    def start(self, version: int, base: int | None) -> list[str]:
        """The list in which a version's keys are to be noted; first removes what an aborted attempt left."""
        self._relay.remove(self._objects.pop((version, base), []))
        return self._objects.setdefault((version, base), [])

    def forget(self) -> None:
        """Leaves what was committed to the leader of several trainer ranks, who removes it in time."""
        self._objects.clear()

    def add_snapshot(self, version: int, num_bytes: int) -> None:
        """A snapshot is in the relay. Frames that it shares with a delta stay as long as it does."""
        delta, kept = (version, version - 1), set(self._objects[version, None])
        if delta in self._objects:
            self._objects[delta] = [key for key in self._objects[delta] if key not in kept]
        self._snapshots = [*self._snapshots[-1:], version]
        self._snapshot_bytes = num_bytes
        self._chain_bytes = 0

    def needs_snapshot(self, version: int, num_bytes: int) -> bool:
        """Whether a delta of so many bytes is to be followed by a snapshot.

        Late joiners walk the chain: it may be neither long nor about as big as what it saves.
        """
        self._chain_bytes += num_bytes
        latest = self._snapshots[-1]
        if latest == version or not self.is_announced:
            return latest != version
        max_bytes = self._snapshot_bytes * self._snapshot_share
        return version - latest >= self._snapshot_every or self._chain_bytes > max_bytes

    def announce_coming(self, version: int) -> None:
        """Tells followers that are up to date to fetch this version's frames while they arrive."""
        if self.is_announced:
            self._coming = version
            with suppress(RelayFull):  # what comes next waits for room, or says that there is none
                self.make_room()

    def move_head(self, version: int, state_hash: StateHash) -> None:
        """Points followers at the newest version, then removes what nobody needs any more."""
        self._coming = None
        self._head = (version, state_hash)
        self.make_room()
        if not self.is_announced:
            self._relay.upsert(keys.HEAD_RUN_KEY, pack_body(HeadRun(run_id=self._run_id)))
            self.is_announced = True

    def make_room(self) -> None:
        """Removes what nobody needs now that workers have acknowledged more. Raises: RelayError."""
        with self._lock:
            if self._head is None:
                return
            version, state_hash = self._head
            self._oldest_base = self._choose_oldest_base()
            head = Head(
                writer=self._writer,
                version=version,
                snapshot=self._snapshots[-1],
                oldest_base=self._oldest_base,
                state_hash=str(state_hash),
                coming=self._coming,
            )
            self._relay.upsert(keys.head_key(self._run_id), pack_body(head))
            for number, base in list(self._objects):
                if (base if base is not None else number) < self._oldest_base:
                    self._relay.remove(self._objects.pop((number, base)))

    def acks(self) -> dict[str, Ack]:
        """What each worker of this run acknowledged last. Raises: RelayError."""
        found: dict[str, Ack] = {}
        for key in self._relay.keys(keys.ack_prefix(self._run_id)):
            data = self._relay.get(key)
            if data is not None:
                ack = unpack_body(data, Ack, key)
                found[ack.worker] = ack
        return found

    def _choose_oldest_base(self) -> int:
        """The latest snapshot once all workers are past it; the one before it for workers that lag.

        A worker that falls two snapshots behind, perhaps dead, is not waited for: it starts over.
        """
        latest = self._snapshots[-1]
        if latest == self._oldest_base or all(ack.version >= latest for ack in self.acks().values()):
            return latest
        return max(self._snapshots[0], self._oldest_base)


def claim_run(relay: Relay, run_id: str, relay_url: str) -> None:
    """Makes sure that nobody published under this id, and clears what a run without HEAD left.

    What trainer ranks say they hold stays: some may have been quicker. Raises: RelayError.
    """
    if relay.get(keys.head_key(run_id)) is not None:
        raise RelayError(f"run {run_id} is in relay {relay_url} already; choose another run id")
    left = relay.keys(keys.run_prefix(run_id))
    relay.remove(key for key in left if not key.startswith(keys.rank_prefix(run_id)))
