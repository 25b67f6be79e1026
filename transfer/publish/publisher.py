"""The publisher: the trainer's end of the weight transfer.

Owns the copy of what was published last, and the run's version numbers. A version is announced only when all
its objects are in the relay; the routers of ROSE_ROUTER_URL hear of it before publish() returns. The kept
copy is updated in the same pass that compares it with the weights. If that publish fails, the next one takes
the copy back to the last committed version and starts from there. Deltas are exact. Never waits for engines,
except in wait_acked(). One thread at a time, which may go on with its training while publish_async() sends.
A trainer of one process also gives the last version again to a relay that came back empty.
Source: ROSE §4.2. Where we differ: deltas are wrap differences of raw bits instead of sums (a bf16 sum is not
exact), and the relay folds snapshots, which bound the chain of deltas that a late joiner has to apply.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rose.config import Settings
from rose.errors import RelayError, WorkerError
from rose.signature import Signer
from rose.transfer.format import manifest as keys
from rose.transfer.format.architecture import architecture_of
from rose.transfer.format.codec import Codec
from rose.transfer.format.layout import BUCKET_BYTES
from rose.transfer.format.manifest import Ack, AdapterBody, Manifest
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.format.state_hash import StateHash
from rose.transfer.publish.announcer import RunAnnouncer
from rose.transfer.publish.behind import Behind
from rose.transfer.publish.bucket_encoder import BucketEncoder, num_encode_threads
from rose.transfer.publish.chain import VersionChain, check_pace, claim_run
from rose.transfer.publish.kept_copy import open_kept_copy
from rose.transfer.publish.published_dtypes import AUTO, PublishedDtypes
from rose.transfer.publish.quantized_source import source_of
from rose.transfer.publish.run_lease import RunLease
from rose.transfer.publish.trainer_ranks import TrainerRanks
from rose.transfer.publish.version_writer import VersionWriter
from rose.transfer.relay.opening import open_relay
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY = 100
SNAPSHOT_SHARE = 0.5
DEFAULT_LINK_GBPS = 1.0
"""Where the link's speed is not given: G8S with zstd is chosen, the smallest codec of little cost."""
FULL_WAIT_S = 30.0
RANKS_TIMEOUT_S = 120.0
_PUT_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one publish sent, and what other encodings would have cost."""

    version: WeightVersion
    base: int | None
    state_hash: str
    num_elements: int
    num_changed: int
    dense_bytes: int
    coo_bytes: int
    """An int32 place and a difference for each changed element; dense_bytes for a snapshot."""
    wire_bytes: int
    """The frames and the manifest of this version."""
    snapshot_bytes: int
    """The size of the snapshot that was sent beside a delta, because the relay had come back empty or did not
    fold one in time; usually 0.
    """
    encode_s: float
    put_s: float
    """The time spent waiting for the relay when nothing was left to encode meanwhile."""


class WeightPublisher:
    """Publishes a trainer's weights as a run of versions 0, 1, 2, ...

    weights: a torch module, or a mapping or pairs of (Hugging Face name, tensor), read at each publish(). A
    transformers model's tensors are published under the names of its files.
    dtype: the type to which floats of two bytes or more are cast; None: they are not cast. "auto": each
    tensor gets the checkpoint's type, so tensors that are float32 there beside narrower floats stay float32.
    checkpoint: the checkpoint's folder, or its name on Hugging Face's hub; None: the one from which a
    transformers model was read, if it can be read. If the hub's model is not on this machine, the trainer's
    own floats decide, and a trainer that has only float32 publishes bfloat16.
    codec: one for all buckets; None: one for each bucket, by its density and by link_gbps, the link to the
    relay.
    full_wait_s: how long to wait for a full relay, while acknowledgements free its old versions.
    snapshot_every, snapshot_share: the relay folds its deltas into a new snapshot for late joiners after this
    many versions, or when they exceed this share of the snapshot's size.
    rank, num_ranks: for a trainer of several processes. Each publishes its own TensorShards, or its share of
    what several hold, under one run id, and calls publish() as often as the others; they wait
    ranks_timeout_s for each other.
    encode_threads: the number of buckets that are compared and packed at the same time; None: this rank's
    share of the cores that the process may use, 4 at most.
    quantized_like: the folder of a checkpoint in fp8 like that of the engines. Tensors that are quantized
    there are quantized before they are published.
    adapter: the LoRA adapter to which the tensors belong, if any (rose.transfer.adapters.publisher).
    key, signing_key, routers: used instead of the environment's ROSE_KEY, ROSE_SIGNING_KEY and
    ROSE_ROUTER_URL. With a signing key the run is signed, and the trainer sends its snapshots itself.
    Raises: RelayError if the relay does not answer or already holds a run with this id; ConfigError on a bad
    signing key or ROSE_ROUTER_URL; FrameError or OSError if a given checkpoint can't be read; ValueError.
    """

    def __init__(
        self,
        weights: Any,
        relay_url: str,
        run_id: str | None = None,
        dtype: str | PublishedDtypes | None = AUTO,
        *,
        codec: Codec | None = None,
        link_gbps: float = DEFAULT_LINK_GBPS,
        snapshot_every: int = SNAPSHOT_EVERY,
        snapshot_share: float = SNAPSHOT_SHARE,
        bucket_bytes: int = BUCKET_BYTES,
        full_wait_s: float = FULL_WAIT_S,
        rank: int = 0,
        num_ranks: int = 1,
        ranks_timeout_s: float = RANKS_TIMEOUT_S,
        encode_threads: int | None = None,
        checkpoint: str | Path | None = None,
        quantized_like: str | Path | None = None,
        adapter: AdapterBody | None = None,
        key: str | None = None,
        signing_key: str | None = None,
        routers: RunAnnouncer | None = None,
    ) -> None:
        self.run_id = keys.check_name(run_id if run_id is not None else uuid.uuid4().hex[:12], "run id")
        check_pace(link_gbps, snapshot_every)
        num_threads = num_encode_threads(encode_threads, num_ranks)
        self._source = source_of(weights, dtype, quantized_like, num_ranks, checkpoint, rank)
        self._full_wait_s, self._number, self._is_followed = full_wait_s, -1, False
        settings = Settings.from_environment()
        signing_key = signing_key if signing_key is not None else settings.signing_key
        self._signer = Signer(signing_key) if signing_key is not None else None
        self._announcer = routers if routers is not None else RunAnnouncer.of(settings, self._signer)
        self._relay = self.relay = open_relay(relay_url, key if key is not None else settings.key)
        self.is_adapter, self.num_ranks = adapter is not None, num_ranks
        self._puts = ThreadPoolExecutor(_PUT_THREADS, thread_name_prefix="rose-put")
        try:
            self._ranks = TrainerRanks(
                self._relay, self.run_id, rank, num_ranks, ranks_timeout_s, self._signer
            )
            writer = claim_run(self._relay, self.run_id) if self._ranks.is_leader else None
            specs, held = self._source.specs(), self._source.holdings()
            self.layout, share = self._ranks.agree(specs, held, bucket_bytes)
        except (RelayError, ValueError):
            self._puts.shutdown()
            self._relay.close()
            raise
        self._planes = WeightPlanes(self.layout, share)
        self._buckets = [self.layout.buckets[index] for index in sorted(share)]
        arch = architecture_of(weights) if adapter is None else None
        pace = (snapshot_every, snapshot_share)
        self._chain = VersionChain(
            self._relay, self.run_id, self.layout, *pace, self._signer, adapter, arch, writer
        )
        self._lease = RunLease(self._relay, self.run_id, self._restore) if adapter is None else None
        self._version_hash, self._is_under_way = StateHash(), False
        """Whether a version was begun whose commit is not known of yet."""
        self._kept = open_kept_copy(self._source, self._planes)
        self._encoder = BucketEncoder(self._kept, codec, link_gbps * 1e9 / 8, num_threads)
        self._behind, self._publishing = Behind[SyncReport](f"rose-publish-{self.run_id}"), threading.Lock()

    @property
    def version(self) -> WeightVersion | None:
        """The last committed version; None before the first publish()."""
        return WeightVersion(run_id=self.run_id, number=self._number) if self._number >= 0 else None

    @property
    def public_key(self) -> str | None:
        """The key by which followers know what this trainer signed; None: the run is not signed."""
        return self._signer.public_key if self._signer is not None else None

    @property
    def state_hash(self) -> StateHash:
        """The hash of the last committed version, over all ranks' parts."""
        return self._version_hash

    def publish(self) -> SyncReport:
        """Publishes the weights as they are now, and returns when the relay has all of the version. Raises:
        RelayError; calling again is safe.

        Raises ValueError when a tensor has another shape or dtype than when the run began.
        """
        self._begin()
        return self._publish()

    def publish_async(self) -> Future[SyncReport]:
        """Publishes the weights as they are now, and returns when they have been read: the next step may
        change them while the rest is sent. The future's result() is what publish() returns or raises.

        The next publish begins when this one has ended. If this one failed, the next one sends its changes,
        too. The first publish of a run keeps the trainer until all was read. Raises: ValueError, as
        publish() does.
        """
        self._begin()
        return self._behind.run(partial(self._publish, self._behind.has_read))

    def _begin(self) -> None:
        """Runs in the trainer's thread, whose streams may still write the weights."""
        self._behind.settle()
        self._ranks.attempt += 1
        self._source.require_same()
        self._source.prepare()

    def _publish(self, has_read: Callable[[], None] | None = None) -> SyncReport:
        with self._publishing:
            return self._publish_version(has_read)

    def _restore(self) -> None:
        """Gives a relay that has lost the run its last version again, from the kept copy. Raises: RelayError.

        Engines that start now would find nothing there, and the trainer may publish no other version before
        they have made its turns. Leaves it to a publish that is under way or has to be repeated, and always
        if the trainer has several ranks.
        """
        if self.num_ranks > 1 or not self._publishing.acquire(blocking=False):
            return
        try:
            if not self._is_under_way and self._relay.get(keys.head_key(self.run_id)) is None:
                self._chain.open()
                self._write(self._number, None, self._put_snapshot)
                self._chain.move_head(self._number, self.state_hash)
                logger.info("the relay had lost the run and has it again: version=%s", self.version)
        finally:
            self._publishing.release()

    def _publish_version(self, has_read: Callable[[], None] | None) -> SyncReport:
        if self._ranks.is_leader:
            base = self._number if self._number >= 0 else None
            coming = keys.version_prefix(self.run_id, self._number + 1, base)
            self._chain.open((coming,) if self._ranks.num_ranks > 1 else ())
        self._hear_of_commit()
        if self._number < 0:
            writer = self._write(0, None, self._put_first)
        else:
            put = partial(self._put_delta, has_read=has_read)
            writer = self._write(self._number + 1, self._number, put)
        snapshot_bytes = 0
        if self._is_followed:
            snapshot_bytes = self._write(self._number, None, self._put_snapshot).wire_bytes
        if not self._ranks.is_leader:
            self._chain.forget()
        elif writer.base is None or snapshot_bytes > 0:
            self._chain.move_head(self._number, self.state_hash)
        if self._ranks.is_leader:
            self._announcer.announce(WeightVersion(run_id=self.run_id, number=self._number))
            if self._lease is not None:
                self._lease.start()
        report = self._report(writer, snapshot_bytes)
        logger.info("published: %s", report)
        return report

    def load(self, planes: WeightPlanes) -> None:
        """Writes weights of the run's layout into the trainer's tensors, in place."""
        self._source.load(planes)

    def acks(self) -> dict[str, Ack]:
        """Returns each worker's last acknowledgement, with its own state hash. Raises: RelayError."""
        return self._chain.acks()

    def acked(self) -> dict[str, int]:
        """Returns the version that each worker of this run acknowledged last. Raises: RelayError."""
        return {worker: ack.version for worker, ack in self.acks().items()}

    def wait_acked(self, version: WeightVersion, workers: Sequence[str], timeout_s: float) -> None:
        """Returns when every named worker runs `version` or a newer one of this run.

        workers: names as manifest.worker_name makes them. Raises: WorkerError naming the late workers.
        """
        deadline_s = time.monotonic() + timeout_s
        prefix = keys.ack_prefix(self.run_id)
        seen: str | None = None
        late = unread = set(workers)
        while True:
            late = late - {name for name in unread if self._chain.acked_version(name) >= version.number}
            if not late:
                return
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                missing = ", ".join(sorted(late))
                raise WorkerError(f"no acknowledgement of {version} within {timeout_s} s from {missing}")
            changes = self._relay.wait([prefix], seen, left_s)
            seen = changes.seen
            # The link to the relay may be slow, so only new acknowledgements are read.
            written = {key.removeprefix(prefix) for key in changes.keys} if changes.keys is not None else late
            unread = late & written

    def close(self) -> None:
        """Says that the run has ended, and closes the connection; what was published stays in the relay."""
        self._behind.close()
        if self._lease is not None:
            self._lease.stop()
        self._puts.shutdown()
        self._encoder.close()
        self._announcer.close()
        self._relay.close()

    def _write(self, version: int, base: int | None, put: Callable[[VersionWriter], object]) -> VersionWriter:
        """Calls `put` with a new writer, after removing what an aborted attempt left."""
        writer = VersionWriter(
            self._relay,
            self._puts,
            self.run_id,
            self.layout,
            version,
            base,
            written=self._chain.start(version, base),
            make_room=self._chain.make_room,
            full_wait_s=self._full_wait_s,
            signer=self._signer,
        )
        try:
            put(writer)
        finally:
            writer.abort()
        return writer

    def _put_first(self, writer: VersionWriter) -> None:
        for bucket in self._buckets:
            with writer.encoding():
                self._kept.fill(bucket)
        self._behind.has_read()
        self._is_under_way = True
        self._move_to(self._put_snapshot(writer))

    def _put_delta(self, writer: VersionWriter, has_read: Callable[[], None] | None) -> None:
        if self._ranks.is_leader:
            writer.run_beside(partial(self._chain.announce_coming, writer.version))
        self._is_under_way = True
        with closing(self._encoder.encode(self._buckets, has_read)) as steps:
            for _ in self._buckets:
                with writer.encoding():
                    step = next(steps)
                if step.encoded.num_changed > 0:
                    writer.put(step.bucket, step.encoded, step.before, step.after)
        manifest = self._ranks.commit(writer, self._version_hash, partial(self._wants_snapshot, writer))
        if self._ranks.is_leader and self._chain.is_announced:
            # Followers reach this version by its delta, so they need not wait for the snapshot.
            self._chain.move_head(manifest.version, StateHash.from_hex(manifest.state_hash))
        self._move_to(manifest)

    def _wants_snapshot(self, writer: VersionWriter, num_bytes: int) -> bool:
        return self._chain.needs_snapshot(writer.version, num_bytes)

    def _hear_of_commit(self) -> None:
        """Finds out whether a version that failed was committed anyway; if not, takes the kept copy back."""
        if not self._is_under_way:
            return
        base = self._number if self._number >= 0 else None
        manifest = self._ranks.committed(self._number + 1, base)
        if manifest is not None:
            self._move_to(manifest)
            return
        self._encoder.take_back()
        self._is_under_way = False

    def _move_to(self, manifest: Manifest) -> None:
        """Records that the kept copy is what was committed."""
        self._encoder.settle()
        self._is_under_way = False
        self._number = manifest.version
        self._version_hash = StateHash.from_hex(manifest.state_hash)
        self._is_followed = manifest.is_followed

    def _put_snapshot(self, writer: VersionWriter) -> Manifest:
        for bucket in self._buckets:
            writer.put_dense(bucket, self._planes.bits(bucket), self._planes.bucket_hash(bucket))
        manifest = self._ranks.commit(writer, None, self._chain.require_claim)
        self._is_followed = False
        if self._ranks.is_leader:
            self._chain.add_snapshot(writer.version, sum(entry.num_bytes for entry in manifest.buckets))
        return manifest

    def _report(self, writer: VersionWriter, snapshot_bytes: int) -> SyncReport:
        dense_bytes = self.layout.num_bytes
        return SyncReport(
            version=WeightVersion(run_id=self.run_id, number=writer.version),
            base=writer.base,
            state_hash=str(self.state_hash),
            num_elements=self.layout.num_elements,
            num_changed=writer.num_changed,
            dense_bytes=dense_bytes,
            coo_bytes=writer.coo_bytes if writer.base is not None else dense_bytes,
            wire_bytes=writer.wire_bytes,
            snapshot_bytes=snapshot_bytes,
            encode_s=writer.encode_s,
            put_s=writer.put_s,
        )
