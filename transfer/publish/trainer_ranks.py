"""Several trainer ranks that publish one run together and communicate only through the relay.

Owns the exchange of what each rank holds, each rank's exclusive share of the buckets, and putting a version
together from the ranks' parts. Rank 0 commits: it alone writes manifests and HEAD. All ranks derive the same
layout and shares. A version is committed by all ranks or by none. A rank that did not learn of a commit in
time learns of it at its next publish. Every rank calls publish() once for each training step. Source: ROSE
§4.2 (mutually exclusive shards).
"""

import time
from collections.abc import Callable
from typing import TypeVar

from rose.errors import RelayError
from rose.signature import Signer, Verifier
from rose.transfer.format import manifest as keys
from rose.transfer.format.layout import Layout, TensorSpec
from rose.transfer.format.manifest import (
    Manifest,
    Model,
    PartBody,
    RankBody,
    ShardBody,
    sealed,
    unpack_body,
)
from rose.transfer.format.partition import Holdings, assign_buckets, cut_by_holdings
from rose.transfer.format.shard_plan import Box
from rose.transfer.format.state_hash import StateHash
from rose.transfer.publish.version_writer import VersionWriter
from rose.transfer.relay.protocol import Relay

Found = TypeVar("Found")


class TrainerRanks:
    """This rank among `num_ranks`, which wait up to timeout_s for each other. signer: the same for all ranks;
    each takes from the others only what it signed. None: the run is not signed.
    """

    def __init__(
        self,
        relay: Relay,
        run_id: str,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        signer: Signer | None,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank must be at least 0 and below num_ranks, got rank {rank} of {num_ranks}")
        self._relay = relay
        self._run_id = run_id
        self.rank = rank
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._signer = signer
        self._verifier = Verifier(signer.public_key) if signer is not None else None
        self.attempt = 0

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def agree(
        self, specs: list[TensorSpec], held: Holdings, bucket_bytes: int
    ) -> tuple[Layout, frozenset[int]]:
        """Returns the run's layout and this rank's buckets. Raises: RelayError when a rank is missing;
        ValueError.
        """
        if self.num_ranks == 1:
            layout = Layout(specs, bucket_bytes)
            return layout, frozenset(range(len(layout.buckets)))
        key = keys.rank_key(self._run_id, self.rank)
        self._relay.upsert(key, sealed(self._signer, key, _rank_body(specs, held)))
        bodies = [self._wait_for_rank(rank) for rank in range(self.num_ranks)]
        all_specs, all_held = _merge(bodies)
        layout = Layout(all_specs, bucket_bytes, cut_by_holdings(all_specs, all_held))
        return layout, assign_buckets(layout, all_held)[self.rank]

    def commit(
        self, writer: VersionWriter, before: StateHash | None, wants_snapshot: Callable[[int], bool]
    ) -> Manifest:
        """Makes a version from all ranks' parts; returns its manifest on every rank.

        wants_snapshot: given the version's bytes, tells the leader whether a snapshot is to follow. Raises:
        RelayError when the relay fails or a rank is not heard of in time; nothing is committed then.
        """
        part = PartBody(attempt=self.attempt, num_changed=writer.num_changed, buckets=writer.finish_frames())
        if not self.is_leader:
            key = keys.part_key(self._run_id, writer.version, writer.base, self.rank)
            writer.note(key)
            self._relay.upsert(key, sealed(self._signer, key, part))
            manifest_key = keys.manifest_key(self._run_id, writer.version, writer.base)
            what = f"manifest of version {writer.version}"
            return self._wait(manifest_key, lambda: self.committed(writer.version, writer.base), what)
        parts = [part, *(self._collect(writer, rank) for rank in range(1, self.num_ranks))]
        entries = sorted((entry for each in parts for entry in each.buckets), key=lambda entry: entry.index)
        after = sum(
            (StateHash.from_hex(entry.change) for entry in entries),
            before if before is not None else StateHash(),
        )
        is_followed = wants_snapshot(sum(entry.num_bytes for entry in entries))
        num_changed = sum(each.num_changed for each in parts)
        manifest = writer.commit(entries, num_changed, after, before, is_followed)
        # From now on the leader removes the others' objects; before the commit, another attempt may put them
        # again. A snapshot may share frames with its delta.
        for rank in range(1, self.num_ranks):
            writer.note(keys.part_key(self._run_id, writer.version, writer.base, rank))
        for entry in entries:
            writer.note(entry.key)
        return manifest

    def committed(self, version: int, base: int | None) -> Manifest | None:
        """Returns the version's manifest if it was committed, else None. Raises: RelayError."""
        return self._body(keys.manifest_key(self._run_id, version, base), Manifest)

    def _collect(self, writer: VersionWriter, rank: int) -> PartBody:
        key = keys.part_key(self._run_id, writer.version, writer.base, rank)

        def look() -> PartBody | None:
            part = self._body(key, PartBody)
            # The part of another attempt names frames that were taken back.
            return part if part is not None and part.attempt == self.attempt else None

        return self._wait(key, look, f"part of rank {rank} of version {writer.version}")

    def _wait_for_rank(self, rank: int) -> RankBody:
        key = keys.rank_key(self._run_id, rank)
        return self._wait(key, lambda: self._body(key, RankBody), f"shards of rank {rank}")

    def _body(self, key: str, model: type[Model]) -> Model | None:
        """Returns what a rank wrote, or None. Raises: RelayError where it is not signed as this run is."""
        data = self._relay.get(key)
        if data is None:
            return None
        if self._verifier is not None:
            self._verifier.require_signed(key, data)
        return unpack_body(data, model, key)

    def _wait(self, key: str, look: Callable[[], Found | None], what: str) -> Found:
        """Calls `look` whenever the object was written, until it returns something. Raises: RelayError after
        timeout_s.
        """
        deadline_s = time.monotonic() + self._timeout_s
        seen: str | None = None
        while True:
            found = look()
            if found is not None:
                return found
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise RelayError(
                    f"run {self._run_id}, rank {self.rank}: no {what} within {self._timeout_s} s"
                )
            seen = self._relay.wait([key], seen, left_s).seen


def _rank_body(specs: list[TensorSpec], held: Holdings) -> RankBody:
    return RankBody(
        shards=[
            ShardBody(name=spec.name, dtype=spec.dtype, shape=spec.shape, start=box.start, stop=box.stop)
            for spec in specs
            for box in held[spec.name]
        ]
    )


def _merge(bodies: list[RankBody]) -> tuple[list[TensorSpec], list[Holdings]]:
    """Raises: ValueError when ranks disagree on a tensor."""
    specs: dict[str, TensorSpec] = {}
    all_held: list[Holdings] = []
    for rank, body in enumerate(bodies):
        held: Holdings = {}
        for shard in body.shards:
            spec = TensorSpec(name=shard.name, dtype=shard.dtype, shape=shard.shape)
            other = specs.setdefault(shard.name, spec)
            if other != spec:
                raise ValueError(
                    f"trainer rank {rank} has {spec}, another rank has {other}: {_fix(spec, other)}"
                )
            held.setdefault(shard.name, []).append(Box(start=shard.start, stop=shard.stop))
        all_held.append(held)
    return list(specs.values()), all_held


def _fix(spec: TensorSpec, other: TensorSpec) -> str:
    if spec.dtype == other.dtype:
        return "give all ranks the same model"
    return (
        "give all ranks the same dtype and the same checkpoint. With dtype='auto' each rank reads it from "
        "its own host: have it on all hosts, or set dtype to that of the engines"
    )
