"""Makes snapshots from deltas in the relay's own process, so that only the first one crosses the trainer's
link.

Owns the snapshot that a Fold asks for: its frames, bucket by bucket, and then its manifest. A bucket's deltas
are checked and applied as a follower would do it, so the snapshot has the published bits or is not made. A
wrong chain is given up and logged, and the trainer sends a snapshot instead. Other failures, such as a full
store or an object that has not arrived yet, are tried again after growing pauses, and hold up no other
snapshot. Needs memory for one bucket beside the objects. The bytes depend on the deltas alone, so copies of a
relay make the same ones, and after a process was killed the next one goes on. Never moves HEAD, never removes
what a trainer put.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rose.errors import FrameError, RelayError, RelayFull
from rose.transfer.format import manifest as keys
from rose.transfer.format.codec import Codec, decode, dense_bits
from rose.transfer.format.frame import Frame
from rose.transfer.format.layout import Bucket, Layout
from rose.transfer.format.manifest import (
    BucketEntry,
    Fold,
    LayoutBody,
    Manifest,
    Model,
    pack_body,
    unpack_body,
)
from rose.transfer.format.planes import bits_dtype
from rose.transfer.format.state_hash import StateHash
from rose.transfer.relay.beside import PREFIX, BesideRelay
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
"""Where the store can't tell of changes: each look lists its keys, and a snapshot is in no hurry."""
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 60.0


class _Gone(RelayError):
    """An object is not there: the trainer gave the snapshot up, or has yet to repair this copy."""


@dataclass(slots=True)
class _Retry:
    """When a snapshot that could not be made is tried again."""

    at_s: float = 0.0
    pause_s: float = _FIRST_RETRY_S

    def put_off(self) -> None:
        self.at_s = time.monotonic() + self.pause_s
        self.pause_s = min(2 * self.pause_s, _LAST_RETRY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """A snapshot, and the deltas from it to the one that is to be made."""

    layout: Layout
    start: Manifest
    deltas: list[Manifest]

    @property
    def end(self) -> Manifest:
        return self.deltas[-1]

    def check(self) -> None:
        """Raises: FrameError unless each manifest starts where the one before it ends."""
        before = self.start
        for delta in self.deltas:
            if (delta.base_state_hash, delta.layout) != (before.state_hash, self.layout.digest):
                raise FrameError(
                    f"delta {delta.run_id}/{delta.version} does not start at version {before.version}"
                )
            before = delta


class SnapshotFolder(BesideRelay):
    """A context in which a relay's snapshots are made as trainers ask for them."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay, "folding", _LOOK_EVERY_S)
        self._relay = relay
        self._asked: dict[str, _Retry] = {}
        self._refused: dict[str, bytes | None] = {}
        """The Folds of wrong chains, which are not tried again while they are the same."""

    def step(self, written: Sequence[str] | None) -> int:
        """Makes the snapshots that were asked for and returns how many. Those that fail are tried later.

        Raises: RelayError when the store can't list its keys.
        """
        self._hear(written)
        now_s = time.monotonic()
        due = sorted(key for key, retry in self._asked.items() if retry.at_s <= now_s)
        return sum(self._try(key) for key in due if not self.closing.is_set())

    def _hear(self, written: Sequence[str] | None) -> None:
        names = written if written is not None else self._relay.keys(PREFIX)
        folds = {key for key in names if keys.fold_of(key) is not None}
        if written is None:  # they may be the objects that are known already
            self._refused = {key: data for key, data in self._refused.items() if key in folds}
            self._asked = {key: _Retry() for key in folds} | self._asked
        else:
            self._refused = {key: data for key, data in self._refused.items() if key not in folds}
            self._asked |= {key: _Retry() for key in folds}

    def _try(self, key: str) -> bool:
        """Returns whether it made the snapshot. One that it may be able to make later stays asked for."""
        data: bytes | None = None
        is_made = False
        try:
            data = self._relay.get(key)
            if data is not None and data != self._refused.get(key):
                is_made = self._fold(key, data)
        except FrameError as error:
            logger.warning("can't fold: key=%s error=%s", key, error)
            self._refused[key] = data
        except Exception as error:  # one run's chain never ends the thread, which serves all runs
            retry, is_known = self._asked[key], isinstance(error, RelayError)
            logger.warning(
                "can't fold, tries again in %.1f s: key=%s error=%s",
                retry.pause_s,
                key,
                error,
                exc_info=not is_known,
            )
            retry.put_off()
            return False
        del self._asked[key]
        return is_made

    def _fold(self, key: str, data: bytes) -> bool:
        """Returns whether it made the snapshot that this Fold asks for."""
        found = keys.fold_of(key)
        if found is None:
            return False
        run_id, version = found
        manifest_key = keys.manifest_key(run_id, version, None)
        if self._relay.get(manifest_key) is not None:
            return False
        snapshot = unpack_body(data, Fold, key).snapshot
        if not snapshot < version:
            raise FrameError(f"{key} names snapshot {snapshot}, which is not older")
        chain = self._chain(run_id, snapshot, version)
        try:
            entries = [self._fold_bucket(chain, bucket) for bucket in chain.layout.buckets]
            whole = sum((StateHash.from_hex(entry.change) for entry in entries), StateHash())
            if str(whole) != chain.end.state_hash:
                raise FrameError(f"{run_id}/{version} hashes to {whole}, not {chain.end.state_hash}")
            self._put_same(manifest_key, pack_body(_snapshot_of(chain, entries)))
            self._object(key)  # a trainer that gave the snapshot up may have looked for frames too early
        except (FrameError, RelayFull, _Gone):
            frames = [keys.bucket_key(run_id, version, None, bucket.index) for bucket in chain.layout.buckets]
            self._relay.remove([manifest_key, *frames])
            raise
        logger.info("folded: version=%s/%s from=%s", run_id, version, chain.start.version)
        return True

    def _chain(self, run_id: str, snapshot: int, version: int) -> _Chain:
        chain = _Chain(
            layout=self._body(keys.layout_key(run_id), LayoutBody).to_layout(),
            start=self._body(keys.manifest_key(run_id, snapshot, None), Manifest),
            deltas=[
                self._body(keys.manifest_key(run_id, number, number - 1), Manifest)
                for number in range(snapshot + 1, version + 1)
            ],
        )
        chain.check()
        if len(chain.start.buckets) != len(chain.layout.buckets):
            raise FrameError(f"snapshot {run_id}/{snapshot} has {len(chain.start.buckets)} buckets")
        return chain

    def _fold_bucket(self, chain: _Chain, bucket: Bucket) -> BucketEntry:
        """Puts the bucket's frame of the snapshot, unless the last delta's frame holds all its bits."""
        if self.closing.is_set():
            raise RelayError("the relay is stopping")
        run_id, version = chain.end.run_id, chain.end.version
        steps = [
            (delta, entry) for delta in chain.deltas for entry in delta.buckets if entry.index == bucket.index
        ]
        if steps and steps[-1][0] is chain.end:
            last = self._frame(chain.layout, bucket, *steps[-1])
            if last.codec is Codec.DENSE:
                return steps[-1][1].model_copy(update={"change": str(last.new_hash)})
        first = self._frame(chain.layout, bucket, chain.start, chain.start.buckets[bucket.index])
        bits = dense_bits(first.codec, first.payload, bits_dtype(bucket.dtype), bucket.num_elements).copy()
        at = first.new_hash
        for delta, entry in steps:
            frame = self._frame(chain.layout, bucket, delta, entry)
            if frame.base_hash != at:
                raise FrameError(f"{entry.key} starts at {frame.base_hash}, the chain is at {at}")
            at += decode(frame.codec, frame.payload, bits).apply_to(bits, bucket.first_index)
            if frame.new_hash != at:
                raise FrameError(f"{entry.key} leads to {at}, its frame says {frame.new_hash}")
        folded = Frame.of(
            chain.layout,
            bucket,
            run_id,
            None,
            version,
            codec=Codec.DENSE,
            payload=bits.tobytes(),
            num_changed=bucket.num_elements,
            before=StateHash(),
            after=at,
        ).pack()
        key = keys.bucket_key(run_id, version, None, bucket.index)
        self._put_same(key, folded)
        return BucketEntry(index=bucket.index, key=key, num_bytes=len(folded), change=str(at))

    def _frame(self, layout: Layout, bucket: Bucket, manifest: Manifest, entry: BucketEntry) -> Frame:
        frame = Frame.unpack(self._object(entry.key))
        frame.check_place(bucket, layout.digest)
        # A snapshot's dense frame may be that of its version's delta.
        base = manifest.base if manifest.base is not None else frame.base
        frame.check_version(manifest.run_id, base, manifest.version)
        return frame

    def _put_same(self, key: str, data: bytes) -> None:
        """Puts an object that may be there already: made before a crash, or copied from another relay."""
        try:
            self._relay.put(key, data)
        except RelayFull:
            raise
        except RelayError:
            if self._relay.get(key) != data:
                raise

    def _body(self, key: str, model: type[Model]) -> Model:
        return unpack_body(self._object(key), model, key)

    def _object(self, key: str) -> bytes:
        data = self._relay.get(key)
        if data is None:
            raise _Gone(f"{key} is not in the relay")
        return data


def _snapshot_of(chain: _Chain, entries: list[BucketEntry]) -> Manifest:
    return Manifest(
        run_id=chain.end.run_id,
        version=chain.end.version,
        base=None,
        layout=chain.layout.digest,
        state_hash=chain.end.state_hash,
        base_state_hash=None,
        num_elements=chain.layout.num_elements,
        num_changed=chain.layout.num_elements,
        is_followed=False,
        buckets=entries,
    )
