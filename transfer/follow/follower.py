"""The follower: brings a mirror to the newest published version.

Owns the choice of the path there: deltas from the mirror's own version, or the latest snapshot and its
deltas. Also fetches frames ahead, of a version that the trainer is still writing, so that fetching and
decoding keep pace with the link. The mirror is always at a whole version; when advance() raises, it stays at
the last good one. It never goes back, neither within a run nor to a run that it has left, so a relay copy
that missed writes does no harm. Never talks to a worker, never sleeps except in wait().
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rose.errors import ConfigError, FrameError, RelayError
from rose.signature import Verifier, frame_digest
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.run_choice import NAME_IT, RunChoice
from rose.transfer.format import manifest as keys
from rose.transfer.format.checkpoint import fill_from_checkpoint
from rose.transfer.format.layout import Layout
from rose.transfer.format.manifest import (
    AdapterBody,
    BucketEntry,
    Head,
    LayoutBody,
    Manifest,
    Model,
    unpack_body,
)
from rose.transfer.relay.protocol import Relay
from rose.types import BytesLike

logger = logging.getLogger(__name__)

AUTO_RUN = "auto"
_MOST_NAMED = 32
"""A wait names up to this many frames one by one, so that the frames of others wake nobody."""


class _Missing(RelayError):
    """An object that HEAD promised is not there: it was removed while the follower walked the chain."""


class Follower:
    """Follows one run, or with "auto" the only one whose trainer is alive (run_choice.py).

    base_checkpoint: the checkpoint that the trainer started from. When its bits are the snapshot's, the
    snapshot need not cross the link. public_key: the trainer's. With it, the run has to be named, objects
    that the trainer did not sign are refused, and the run never goes back. takes_adapter: whether the run has
    to be a LoRA adapter's instead of whole weights. accept: raises RelayError for a layout that the mirror
    can't hold. Raises: ConfigError on a bad public key or one for "auto", ValueError on a bad run id.
    """

    def __init__(
        self,
        relay: Relay,
        run_id: str,
        mirror: WeightMirror,
        base_checkpoint: Path | None = None,
        public_key: str | None = None,
        *,
        takes_adapter: bool = False,
        accept: Callable[[LayoutBody], None] | None = None,
    ) -> None:
        if public_key is not None and run_id == AUTO_RUN:
            raise ConfigError(
                "ROSE_PUBLIC_KEY needs the name of the run, because the signs of live runs are not signed; "
                f"{NAME_IT}"
            )
        self._relay = relay
        self._run_id = run_id if run_id == AUTO_RUN else keys.check_name(run_id, "run id")
        self._base_checkpoint = base_checkpoint
        self._takes_adapter = takes_adapter
        self._accept = accept
        self.adapter: AdapterBody | None = None
        """What the run's adapter is, once the mirror holds one."""
        self._verifier = Verifier(public_key) if public_key is not None else None
        self._digests_ahead: dict[int, str] = {}
        """Those of the frames that the mirror has read ahead of their manifest, by bucket, if it has to be
        signed.
        """
        self.mirror = mirror
        self.fetched_bytes = 0
        self.is_empty = False
        """Whether the run had published nothing at the last look."""
        self.is_fetching = False
        """Whether a snapshot is being fetched, or is to be, once its layout was accepted."""
        self._writer: str | None = None
        self._choice = RunChoice(relay) if run_id == AUTO_RUN else None
        self._followed: str | None = run_id if run_id != AUTO_RUN else None
        self._seen: str | None = None
        self._written: list[str] | None = None
        """The keys that the last wait() reported; None: any key may have been written."""
        self._unreadable: tuple[str, int] | None = None
        """A coming version that has a bad frame. It is not read ahead any further; its manifest decides."""

    @property
    def run_id(self) -> str | None:
        """The run whose weights the mirror has, or is to get; None while "auto" has none."""
        return self.mirror.version.run_id if self.mirror.version is not None else self._followed

    def advance(self, *, may_move: bool = True) -> bool:
        """Looks at HEAD once; returns True when the mirror moved. Raises: RelayError, FrameError.

        While a version is being written, it fetches the frames that are there, and looks again as long as
        more have come. When wait() reported frames only, it fetches just those. The mirror may stop short of
        HEAD where its store has no room for the changes; it goes on at the next look.
        """
        written, self._written = self._written, None
        version = self.mirror.version
        if written is not None and version is not None and not self._have_moved(written):
            self._read_frames(version.run_id, version.number + 1, written)
            return False
        while True:
            run_id = self._followed = self._current_run()
            data = self._relay.get(keys.head_key(run_id)) if run_id is not None else None
            self.is_empty = data is None
            if run_id is None or data is None:
                return False
            head = unpack_body(data, Head, keys.head_key(run_id))
            if self._is_at(run_id, head) and self._read_ahead(run_id, head):
                continue
            if self._is_at(run_id, head) or self._is_past(run_id, head):
                return False
            if not may_move:
                return False
            self._refuse_older(run_id, head.version)
            self._move(run_id, head)
            return True

    def load_version(self, snapshot: int, number: int) -> None:
        """Loads one version of a named run into the mirror, from a snapshot that is not newer. Raises:
        RelayError, FrameError.
        """
        self._load_snapshot(self._run_id, snapshot)
        for each in range(snapshot + 1, number + 1):
            self._apply_delta(self._run_id, each)

    def wait(self, timeout_s: float) -> None:
        """Returns when advance() may find something new, or after timeout_s. Raises: RelayError."""
        prefixes = [keys.HEAD_RUN_KEY] if self._run_id == AUTO_RUN else []
        if self._followed is not None:
            prefixes.append(keys.head_key(self._followed))
        prefixes += self._coming_frames()
        changes = self._relay.wait(prefixes, self._seen, timeout_s)
        self._seen = changes.seen
        self._written = changes.keys if changes.keys else None

    def _coming_frames(self) -> list[str]:
        """Returns prefixes of the next version's frames that the mirror has not read."""
        version, planes = self.mirror.version, self.mirror.planes
        if version is None or planes is None:
            return []
        missing = planes.held - self.mirror.buckets_ahead
        if len(missing) > _MOST_NAMED:
            return [keys.version_prefix(version.run_id, version.number + 1, version.number)]
        return [
            keys.bucket_key(version.run_id, version.number + 1, version.number, bucket)
            for bucket in sorted(missing)
        ]

    def _have_moved(self, written: list[str]) -> bool:
        """Returns whether HEAD or the run to follow is among these keys."""
        heads = {keys.HEAD_RUN_KEY}
        if self._followed is not None:
            heads.add(keys.head_key(self._followed))
        return not heads.isdisjoint(written)

    def _move(self, run_id: str, head: Head) -> None:
        is_broken = False
        try:
            self._walk(run_id, head)
        except (FrameError, _Missing) as error:
            if self._leads_back(run_id, head.snapshot):
                raise
            logger.warning(
                "delta chain unusable, starts again from the snapshot: run=%s error=%s", run_id, error
            )
            is_broken = True
        if is_broken:  # behind the error, whose traceback holds frames of the chain in the relay's memory
            self._load_snapshot(run_id, head.snapshot)
            self._walk(run_id, head)
        self._writer = head.writer
        logger.info("mirror moved: version=%s state_hash=%s", self.mirror.version, self.mirror.state_hash)

    def _read_ahead(self, run_id: str, head: Head) -> bool:
        """Returns whether the coming version had frames that the mirror had not read yet."""
        if head.coming != head.version + 1:
            return False
        names = self._relay.keys(keys.version_prefix(run_id, head.coming, head.version))
        return self._read_frames(run_id, head.coming, names)

    def _read_frames(self, run_id: str, coming: int, names: list[str]) -> bool:
        """Returns whether the mirror took any of these frames of the version that follows its own."""
        planes = self.mirror.planes
        if planes is None or self._unreadable == (run_id, coming):
            return False
        missing = planes.held - self.mirror.buckets_ahead
        wanted = {key: bucket for key in names if (bucket := keys.bucket_of(key)) in missing}
        found = False
        frames = self._fetched(list(wanted))
        for key, bucket in wanted.items():
            try:
                found = self._read_frame(bucket, next(frames)) or found
            except FrameError as error:
                # The manifest will tell whether the frame belongs to the version.
                logger.warning("stops reading ahead at a bad frame: key=%s error=%s", key, error)
                self._unreadable = (run_id, coming)
                return False
        return found

    def _read_frame(self, bucket: int, data: BytesLike | None) -> bool:
        """Returns whether the frame is there. Raises: FrameError."""
        if data is None:
            return False  # the attempt failed and its frames were removed
        self.fetched_bytes += len(data)
        self.mirror.read_ahead(data, bucket)
        if self._verifier is not None:
            self._digests_ahead[bucket] = frame_digest(data)
        return True

    def _current_run(self) -> str | None:
        if self._choice is None:
            return self._run_id
        current = self.mirror.version.run_id if self.mirror.version is not None else None
        return self._choice.choose(current, time.monotonic())

    def _is_at(self, run_id: str, head: Head) -> bool:
        version = self.mirror.version
        return (
            version is not None
            and (version.run_id, version.number) == (run_id, head.version)
            and str(self.mirror.version_hash) == head.state_hash
        )

    def _is_past(self, run_id: str, head: Head) -> bool:
        """Returns whether HEAD is older than the mirror, because it comes from a relay copy that missed
        writes.
        """
        version = self.mirror.version
        return (
            version is not None
            and (version.run_id, self._writer) == (run_id, head.writer)
            and version.number > head.version
        )

    def _leads_back(self, run_id: str, number: int) -> bool:
        """Returns whether this version is one to which a signed run can't go any more."""
        own = self.mirror.version
        is_signed = self._verifier is not None
        return is_signed and own is not None and own.run_id == run_id and number < own.number

    def _refuse_older(self, run_id: str, number: int) -> None:
        """Raises: RelayError where the run is signed and HEAD, which is not, leads back to this version."""
        if self._leads_back(run_id, number):
            raise RelayError(
                f"HEAD of run {run_id} names version {number}, and this follower has {self.mirror.version}: "
                "a signed run never goes back; start the trainer again under another run id"
            )

    def _walk(self, run_id: str, head: Head) -> None:
        for number in range(self._start_of_walk(run_id, head) + 1, head.version + 1):
            self._apply_delta(run_id, number)
            if number < head.version and not self.mirror.has_room:
                return
        if not self._is_at(run_id, head):
            raise FrameError(
                f"deltas led to {self.mirror.version} of hash {self.mirror.version_hash}, HEAD says {head}"
            )

    def _apply_delta(self, run_id: str, number: int) -> None:
        manifest = self._body(keys.manifest_key(run_id, number, number - 1), Manifest)
        self._forget_unsigned(manifest)
        self.mirror.apply_delta(manifest, self._frames)

    def _start_of_walk(self, run_id: str, head: Head) -> int:
        """Returns the version from which deltas lead to HEAD: the mirror's own, or the snapshot, which it
        loads.
        """
        own = self.mirror.version
        if own is not None and own.run_id == run_id and head.oldest_base <= own.number <= head.version:
            return own.number
        self._load_snapshot(run_id, head.snapshot)
        return head.snapshot

    def _load_snapshot(self, run_id: str, number: int) -> None:
        self._refuse_older(run_id, number)
        body = self._body(keys.layout_key(run_id), LayoutBody)
        self._require_kind(run_id, body.adapter)
        self.is_fetching = True
        try:
            if self._accept is not None:
                self._accept(body)
            self._fetch_snapshot(run_id, number, body.to_layout())
        finally:
            self.is_fetching = False

    def _fetch_snapshot(self, run_id: str, number: int, layout: Layout) -> None:
        manifest = self._body(keys.manifest_key(run_id, number, None), Manifest)
        if self._base_checkpoint is not None:
            planes = self.mirror.make_planes(layout)
            try:
                fill_from_checkpoint(planes, self._base_checkpoint)
                self.mirror.adopt(manifest, planes)
                return
            except (FrameError, OSError) as error:
                logger.info("base checkpoint is not snapshot %s/%s: %s", run_id, number, error)
        self.mirror.load_snapshot(manifest, layout, self._frames)

    def _require_kind(self, run_id: str, adapter: AdapterBody | None) -> None:
        """Raises: RelayError where the run has an adapter and whole weights are followed, or the reverse."""
        if self._takes_adapter and adapter is None:
            raise RelayError(f"run {run_id} has whole weights and no LoRA adapter: follow it with --run")
        if not self._takes_adapter and adapter is not None:
            raise RelayError(
                f"run {run_id} has a LoRA adapter of {adapter.base}, no whole weights: "
                "follow it with rose serve --adapter"
            )
        self.adapter = adapter

    def _forget_unsigned(self, manifest: Manifest) -> None:
        """Has all frames fetched again where one that was read ahead is not what the manifest says."""
        signed = {entry.index: entry.digest for entry in manifest.buckets}
        ahead = {bucket: self._digests_ahead.get(bucket) for bucket in self.mirror.buckets_ahead}
        if self._verifier is not None and any(signed.get(bucket) != found for bucket, found in ahead.items()):
            self.mirror.take_back_ahead()
        self._digests_ahead.clear()

    def _frames(self, entries: Sequence[BucketEntry]) -> Iterator[BytesLike]:
        return map(self._checked, entries, self._fetched([entry.key for entry in entries]))

    def _fetched(self, names: list[str]) -> Iterator[BytesLike | None]:
        """Yields these objects, several of which come from the relay together. Keeps none of them."""
        while names:
            came = deque(self._relay.get_several(names))
            del names[: len(came)]
            while came:
                yield came.popleft()

    def _checked(self, entry: BucketEntry, data: BytesLike | None) -> BytesLike:
        if data is None:
            raise _Missing(f"{entry.key} is not in the relay")
        self.fetched_bytes += len(data)
        if self._verifier is not None and (found := frame_digest(data)) != entry.digest:
            raise FrameError(f"{entry.key}: its SHA-256 is {found}, the trainer signed {entry.digest}")
        return data

    def _body(self, key: str, model: type[Model]) -> Model:
        data = self._object(key)
        if self._verifier is not None:
            self._verifier.require_signed(key, data)
        return unpack_body(data, model, key)

    def _object(self, key: str) -> bytes:
        data = self._relay.get(key)
        if data is None:
            raise _Missing(f"{key} is not in the relay")
        return data
