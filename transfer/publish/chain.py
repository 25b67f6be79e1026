"""One run's objects in the relay: the chain of deltas, its snapshots, and what may be removed.

Owns which objects exist, HEAD and the oldest version from which followers may still start, the run's
announcement, the removal of what nobody needs, and the repair of relay copies that missed writes. HEAD never
names an object that is missing, and is moved before anything that it named is removed. Never encodes weights.
The publisher's thread calls it; the threads that put call make_room() and announce_coming().
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


class VersionChain:
    """The chain of one run. snapshot_every: the number of versions after which a snapshot is due at the
    latest.

    snapshot_share: a snapshot is also due when all deltas since the last one exceed this share of its size.
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
        """Whether followers may be on this chain. It is False again when the relay came back empty."""
        self._head: tuple[int, StateHash] | None = None
        self._coming: int | None = None
        self._lock = threading.Lock()

    def open(self, others_write: tuple[str, ...] = ()) -> None:
        """Puts what precedes all versions, also when the relay came back empty, and repairs the relay's
        copies.

        others_write: prefixes under which other trainer ranks may have begun to write. Raises: RelayError.
        """
        if self._relay.get(keys.head_key(self._run_id)) is None:
            self._relay.upsert(keys.layout_key(self._run_id), pack_body(LayoutBody.of(self._layout)))
            self.is_announced = False
        else:
            prefix = keys.run_prefix(self._run_id)
            written = {key for names in self._objects.values() for key in names}
            last = max((version for version, _ in self._objects), default=None)
            newest = [
                key for (version, _), names in self._objects.items() if version == last for key in names
            ]
            self._relay.repair(prefix, written, newest, others_write)

    def start(self, version: int, base: int | None) -> list[str]:
        """Removes what an aborted attempt left; returns the list to which the version's keys are to be
        added.
        """
        self._relay.remove(self._objects.pop((version, base), []))
        return self._objects.setdefault((version, base), [])

    def forget(self) -> None:
        """Leaves what was committed to the leader of several trainer ranks, who removes it when it is due."""
        self._objects.clear()

    def add_snapshot(self, version: int, num_bytes: int) -> None:
        """Records that a snapshot is in the relay. Frames that it shares with a delta stay as long as it
        does.
        """
        delta, kept = (version, version - 1), set(self._objects[version, None])
        if delta in self._objects:
            self._objects[delta] = [key for key in self._objects[delta] if key not in kept]
        self._snapshots = [*self._snapshots[-1:], version]
        self._snapshot_bytes = num_bytes
        self._chain_bytes = 0

    def needs_snapshot(self, version: int, num_bytes: int) -> bool:
        """Returns whether a snapshot should follow a delta of this size.

        Late joiners walk the chain from the snapshot, so it may be neither long nor nearly as big as the
        snapshot.
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
            with suppress(RelayFull):  # the put that comes next waits for room, or reports that there is none
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
        """Returns the last acknowledgement of each worker of this run. Raises: RelayError."""
        bodies = self._relay.get_all(keys.ack_prefix(self._run_id))
        acks = [unpack_body(data, Ack, key) for key, data in bodies.items()]
        return {ack.worker: ack for ack in acks}

    def _choose_oldest_base(self) -> int:
        """Returns the latest snapshot once all workers are past it, else the one before it, for workers that
        lag.

        A worker that falls two snapshots behind may be dead and is not waited for: it starts over.
        """
        latest = self._snapshots[-1]
        if latest == self._oldest_base or all(ack.version >= latest for ack in self.acks().values()):
            return latest
        return max(self._snapshots[0], self._oldest_base)


def claim_run(relay: Relay, run_id: str, relay_url: str) -> None:
    """Checks that nobody published under this run id, and removes what a run without HEAD left.

    What trainer ranks announced that they hold stays, because some may already have done so. Raises:
    RelayError.
    """
    if relay.get(keys.head_key(run_id)) is not None:
        raise RelayError(f"run {run_id} is in relay {relay_url} already; choose another run id")
    left = relay.keys(keys.run_prefix(run_id))
    relay.remove(key for key in left if not key.startswith(keys.rank_prefix(run_id)))
