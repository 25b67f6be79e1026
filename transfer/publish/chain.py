"""One run's objects in the relay: the chain of deltas, its snapshots, and what may be removed.

Owns which objects exist, HEAD, the oldest version from which followers may still start, the time at which the
relay folds deltas into a snapshot, and the run's announcement. Also removes objects that are no longer
needed, and repairs relay copies that missed writes. HEAD never names an object that is missing, and is moved
before anything that it named is removed. Never encodes weights. One thread at a time calls it; beside it, the
threads that put call make_room() and announce_coming().
"""

import logging
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

from pydantic import JsonValue

from rose.errors import RelayError, RelayFull
from rose.signature import Signer
from rose.transfer.format import manifest as keys
from rose.transfer.format.layout import Layout
from rose.transfer.format.leases import ACK_LEASE_S, WatchedSigns
from rose.transfer.format.manifest import (
    Ack,
    AdapterBody,
    Fold,
    Head,
    HeadRun,
    LayoutBody,
    Manifest,
    pack_body,
    sealed,
    unpack_body,
)
from rose.transfer.format.state_hash import StateHash
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)

FOLD_TIMEOUT_S = 300.0
"""After this time the trainer sends a snapshot itself, when the chain has become too long once more."""
RESTART_S = 0.1
"""No relay starts again faster. So if a version was written in less time, its relay has not restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folding:
    """A snapshot that the relay was asked to make."""

    version: int
    state_hash: StateHash
    asked_s: float


class VersionChain:
    """The chain of one run. snapshot_every: the number of versions after which a snapshot is due at the
    latest.

    snapshot_share: a snapshot is also due when all deltas since the last one exceed this share of its size.
    adapter: what the run's adapter is; None: it has whole weights. writer: what claim_run() returned.
    """

    def __init__(
        self,
        relay: Relay,
        run_id: str,
        layout: Layout,
        snapshot_every: int,
        snapshot_share: float,
        signer: Signer | None,
        adapter: AdapterBody | None = None,
        config: dict[str, JsonValue] | None = None,
        writer: str | None = None,
    ) -> None:
        self._adapter = adapter
        self._config = config
        self._relay = relay
        self._run_id = run_id
        self._layout = layout
        self._snapshot_every = snapshot_every
        self._snapshot_share = snapshot_share
        self._signer = signer
        self._writer = writer if writer is not None else uuid.uuid4().hex
        self._has_claimed = False
        """Whether this trainer was the last to open the run, as far as it knows."""
        self._objects: dict[tuple[int, int | None], list[str]] = {}
        self._snapshots: list[int] = []
        self._oldest_base = 0
        self._snapshot_bytes = 0
        self._chain_bytes = 0
        """The deltas since the last snapshot, or since the one that is being folded."""
        self._is_fold_due = False
        self._folding: _Folding | None = None
        self.is_announced = False
        """Whether followers may be on this chain. It is False again when the relay came back empty."""
        self._opened_s = 0.0
        self._head: tuple[int, StateHash] | None = None
        self._coming: int | None = None
        self._ack_leases = WatchedSigns(ACK_LEASE_S)
        self._left: list[str] = []
        """The keys of acknowledgements of workers that left."""
        self._lock = threading.Lock()

    def open(self, others_write: tuple[str, ...] = ()) -> None:
        """Puts what precedes all versions, also when the relay came back empty, and repairs the relay's
        copies.

        others_write: prefixes under which other trainer ranks may have begun to write. Raises: RelayError,
        also where another trainer has published under this run id.
        """
        self._opened_s = time.monotonic()
        key = keys.head_key(self._run_id)
        head = self._relay.get(key)
        if head is None:
            self._open_anew(removes_left=not self._has_claimed and not others_write)
        elif unpack_body(head, Head, key).writer != self._writer:
            raise _used_already(self._run_id)
        else:
            prefix = keys.run_prefix(self._run_id)
            written = {key for names in self._objects.values() for key in names}
            last = max((version for version, _ in self._objects), default=None)
            newest = [
                key for (version, _), names in self._objects.items() if version == last for key in names
            ]
            if self._folding is not None:
                others_write += (keys.version_prefix(self._run_id, self._folding.version, None),)
            self._relay.repair(prefix, written, newest, others_write)

    def _open_anew(self, *, removes_left: bool = False) -> None:
        """removes_left: removes what a trainer that failed meanwhile has left."""
        _claim(self._relay, self._run_id, self._writer)
        if removes_left:
            left = self._relay.keys(keys.run_prefix(self._run_id))
            self._relay.remove(key for key in left if keys.is_version_key(key))
        key = keys.layout_key(self._run_id)
        body = LayoutBody.of(self._layout, self._adapter, self._config)
        self._relay.upsert(key, sealed(self._signer, key, body))
        self.is_announced, self._has_claimed = False, True
        self._folding = None

    def require_claim(self, num_bytes: int) -> bool:
        """Returns False, because after a snapshot no other is due, whatever its size. Raises: RelayError if
        the relay no longer has this trainer's claim of the run, or has another trainer's.
        """
        if self.is_announced:  # so HEAD stands in the relay, unless that is a new one
            is_there = self._relay.get(keys.head_key(self._run_id)) is not None
        else:
            is_there = self._has_claimed = self._holds_claim() and self._marks_opening()
        if not is_there:
            raise RelayError(
                f"run {self._run_id}: the relay was started again while a snapshot was written, or another "
                "trainer has opened this run; publish again, and if that fails, choose another run id"
            )
        return False

    def _holds_claim(self) -> bool:
        return self._relay.get(keys.claim_key(self._run_id)) == self._writer.encode()

    def _marks_opening(self) -> bool:
        """Tells other trainers that HEAD is about to be written; returns whether the claim still holds.

        A trainer writes its claim and then looks for the mark, and this one looks for claims when the mark is
        there. So of two that open the run at the same time, one is refused at least.
        """
        self._relay.upsert(keys.opening_key(self._run_id), self._writer.encode())
        if self._holds_claim():
            return True
        self._relay.remove([keys.opening_key(self._run_id)])
        return False

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
        """Records that a snapshot is in the relay, whole."""
        self._snapshots = [*self._snapshots[-1:], version]
        self._snapshot_bytes = num_bytes

    def needs_snapshot(self, version: int, num_bytes: int) -> bool:
        """Returns whether the trainer should send a snapshot after a delta of this size.

        Late joiners walk the chain from the snapshot, so it may be neither long nor nearly as big as the
        snapshot: then the relay is asked to fold it. The trainer sends only what the relay has no deltas for,
        or does not fold in time, and all snapshots of a signed run. Raises: RelayError.
        """
        self._chain_bytes += num_bytes
        may_be_new = self.is_announced and time.monotonic() - self._opened_s > RESTART_S
        if may_be_new and self._relay.get(keys.head_key(self._run_id)) is None:
            self._open_anew()  # the relay was started again while the version was written
        folding, latest = self._folding, self._snapshots[-1]
        if latest == version or not self.is_announced:
            return latest != version
        num_versions = version - (folding.version if folding is not None else latest)
        max_bytes = self._snapshot_bytes * self._snapshot_share
        is_long = num_versions >= self._snapshot_every or self._chain_bytes > max_bytes
        if self._signer is not None:  # a relay can't sign what it folds
            return is_long
        self._is_fold_due = is_long and folding is None
        is_late = folding is not None and time.monotonic() - folding.asked_s > FOLD_TIMEOUT_S
        if is_long and is_late:
            logger.warning("the relay did not fold version %s in time: sending a snapshot", folding)
        return is_long and is_late

    def announce_coming(self, version: int) -> None:
        """Tells followers that are up to date to fetch this version's frames while they arrive."""
        if self.is_announced:
            self._coming = version
            with self._lock, suppress(RelayFull):  # the put that comes next makes room
                self._take_folded()
                self._put_head()

    def move_head(self, version: int, state_hash: StateHash) -> None:
        """Points followers at the newest version, then removes what nobody needs any more."""
        self._coming = None
        self._head = (version, state_hash)
        if self._snapshots[-1] == version:
            self._folding, self._is_fold_due, self._chain_bytes = None, False, 0  # the trainer sent it
        self._make_room()
        if not self.is_announced:
            if self._adapter is None:  # engines that follow the newest run want whole weights
                self._relay.upsert(keys.HEAD_RUN_KEY, pack_body(HeadRun(run_id=self._run_id)))
            self._relay.remove([keys.opening_key(self._run_id)])
            self.is_announced = True
        if self._is_fold_due:
            self._ask_to_fold(version, state_hash)

    def _ask_to_fold(self, version: int, state_hash: StateHash) -> None:
        key = keys.fold_key(self._run_id, version)
        self._objects[version, None] = [key]
        self._relay.upsert(key, pack_body(Fold(snapshot=self._snapshots[-1])))
        self._folding = _Folding(version=version, state_hash=state_hash, asked_s=time.monotonic())
        self._is_fold_due, self._chain_bytes = False, 0

    def _take_folded(self) -> None:
        """Takes over the snapshot that the relay was asked for, once every copy of the relay has made it."""
        folding = self._folding
        if folding is None:
            return
        key = keys.manifest_key(self._run_id, folding.version, None)
        data = self._relay.get(key) if not self._relay.lacking([key]) else None
        if data is None:
            return
        snapshot = unpack_body(data, Manifest, key)
        self._folding = None
        if snapshot.state_hash != str(folding.state_hash):
            logger.error("folded snapshot has a wrong hash: key=%s %s, published %s", key, snapshot, folding)
            return
        names = {entry.key for entry in snapshot.buckets}
        for written in list(self._objects.values()):
            # A delta's dense frames now stay as long as the snapshot. The list may be growing meanwhile.
            for name in [name for name in written if name in names]:
                written.remove(name)
        self._objects[folding.version, None] += [key, *sorted(names)]
        self.add_snapshot(folding.version, sum(entry.num_bytes for entry in snapshot.buckets))

    def make_room(self) -> None:
        """Removes what nobody needs now that workers have acknowledged more. Raises: RelayError."""
        if self.is_announced:  # else a relay that came back empty would get HEAD before its version
            self._make_room()

    def _make_room(self) -> None:
        with self._lock:
            self._take_folded()
            self._left = []
            self._oldest_base = self._choose_oldest_base()
            try:
                self._put_head()
            except RelayFull:  # HEAD may have grown by a digit
                self._relay.remove(self._left)
                raise
            self._remove_unneeded()

    def _put_head(self) -> None:
        assert self._head is not None
        version, state_hash = self._head
        head = Head(
            writer=self._writer,
            version=version,
            snapshot=self._snapshots[-1],
            oldest_base=self._oldest_base,
            state_hash=str(state_hash),
            coming=self._coming,
        )
        self._relay.upsert(keys.head_key(self._run_id), pack_body(head))

    def _remove_unneeded(self) -> None:
        """Removes versions that are older than the oldest base, and acknowledgements of workers that left."""
        old = [
            (number, base)
            for number, base in self._objects
            if (base if base is not None else number) < self._oldest_base
        ]
        self._relay.remove([*self._left, *(key for each in old for key in self._objects[each])])
        self._left = []
        for number, base in old:
            if base is None:
                # The relay may have folded a snapshot that was not waited for. FOLD is gone now, so it
                # removes what it still makes.
                self._relay.remove(self._relay.keys(keys.version_prefix(self._run_id, number, None)))
            del self._objects[number, base]

    def acks(self) -> dict[str, Ack]:
        """Returns the last acknowledgement of each worker of this run, without those that can't be read.

        Raises: RelayError.
        """
        bodies = self._relay.get_all(keys.ack_prefix(self._run_id))
        acks = [read_ack(key, data) for key, data in bodies.items()]
        return {ack.worker: ack for ack in acks if ack is not None}

    def acked_version(self, worker: str) -> int:
        """Returns the number that the worker acknowledged last, or -1. Raises: RelayError."""
        key = keys.ack_prefix(self._run_id) + worker
        data = self._relay.get(key)
        ack = read_ack(key, data) if data is not None else None
        return ack.version if ack is not None else -1

    def _choose_oldest_base(self) -> int:
        """Returns the latest snapshot once all workers are past it, else the one before it, for workers that
        lag.

        A worker that falls two snapshots behind may be dead and is not waited for: it starts over.
        """
        latest = self._snapshots[-1]
        if latest == self._oldest_base or all(ack.version >= latest for ack in self._present_acks()):
            return latest
        return max(self._snapshots[0], self._oldest_base)

    def _present_acks(self) -> list[Ack]:
        """Returns the acknowledgements of workers that are there, and has the others' removed."""
        acks, now_s = self.acks(), time.monotonic()
        self._ack_leases.look({name: (ack.version, ack.beat) for name, ack in acks.items()}, now_s)
        gone = {name for name in acks if self._ack_leases.is_dead(name, now_s)}
        if gone:
            logger.info("workers that left: run=%s workers=%s", self._run_id, sorted(gone))
        self._left = [keys.ack_prefix(self._run_id) + name for name in sorted(gone)]
        return [ack for name, ack in acks.items() if name not in gone]


def check_pace(link_gbps: float, snapshot_every: int) -> None:
    """Raises: ValueError."""
    if link_gbps <= 0 or snapshot_every < 1:
        raise ValueError(
            f"link_gbps must be > 0 and snapshot_every >= 1, got {link_gbps} and {snapshot_every}"
        )


def read_ack(key: str, data: bytes) -> Ack | None:
    """Returns the acknowledgement in an object; None, and a line in the log, when it is none: whoever has the
    relay's read key can write there, and is not to stop the trainer.
    """
    try:
        return unpack_body(data, Ack, key)
    except RelayError as error:
        logger.warning("acknowledgement skipped: %s", error)
        return None


def claim_run(relay: Relay, run_id: str) -> str:
    """Claims a run that nobody has published, and removes what a run without HEAD left; returns the claim.

    What trainer ranks announced that they hold stays, because some may already have done so. Raises:
    RelayError.
    """
    if relay.get(keys.head_key(run_id)) is not None:
        raise _used_already(run_id)
    writer = uuid.uuid4().hex
    _claim(relay, run_id, writer)
    left = set(relay.keys(keys.run_prefix(run_id))) - {keys.claim_key(run_id)}
    relay.remove(key for key in left if not key.startswith(keys.rank_prefix(run_id)))
    return writer


def _claim(relay: Relay, run_id: str, writer: str) -> None:
    """Raises: RelayError where another trainer is about to write HEAD, or has just done so."""
    relay.upsert(keys.claim_key(run_id), writer.encode())
    mark = relay.get(keys.opening_key(run_id))
    if mark not in (None, writer.encode()) or relay.get(keys.head_key(run_id)) is not None:
        raise _used_already(run_id)


def _used_already(run_id: str) -> RelayError:
    return RelayError(f"run {run_id} is in this relay already; choose another run id")
