"""Which trajectory a request belongs to, and where its last turn ran.

Owns: the session keys of requests, the affinity table, the fingerprints of finished turns.
Promises: all tables are bounded (least recently used entries leave first); losing an entry costs a prefix-
cache hit, never a wrong answer. Equal session keys in different scopes are different trajectories.
Never does: I/O.
"""

import itertools
from bisect import insort
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from rose.http import SESSION_HEADERS
from rose.scheduler.rollout.formats.bodies import TokenIds
from rose.types import WeightVersion

_MAX_HOLDERS = 4


KvWeights = WeightVersion | tuple[WeightVersion | None, WeightVersion] | None
"""The weights that made KV: a version of the whole weights, or that and an adapter's; None: base weights."""


def scope_of(job: str, model: str | None) -> str:
    """Returns the scope of a job's sessions for a model: no other job or model continues them."""
    return f"{job}\n{model or ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The KV that a turn left on a worker."""

    num_tokens: int
    version: KvWeights
    until: float
    """The time at which its lease ends."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Where a trajectory's turns ran, and the weights of its first turn."""

    worker: str
    """The worker of the last turn."""
    first_version: WeightVersion | None
    holders: OrderedDict[str, Held] = field(default_factory=OrderedDict)
    """Worker -> the KV that it holds, for the last few workers."""
    said: tuple[int, int] | None = None
    """Length and digest of the bytes of the last turn's prompt and sampled tokens; None for texts."""

    def is_extended_by(self, prefix: bytes) -> bool | None:
        """Returns whether a next turn's prompt begins with all tokens of the last turn, as they were sampled;
        None if that can't be told."""
        if self.said is None:
            return None
        return self.said == length_and_digest(prefix[: self.said[0]])

    def cached_tokens(self, worker: str, version: KvWeights, now: float) -> int:
        """Returns the prompt tokens whose KV, made by weights of `version`, the worker should still hold."""
        held = self.holders.get(worker)
        if held is None or held.version != version or held.until <= now:
            return 0
        return held.num_tokens


class SessionTable:
    """The sessions by key and scope (scope_of)."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[tuple[str, str | None], Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: str, scope: str | None = None) -> Session | None:
        return self._sessions.get((key, scope))

    def record(
        self,
        key: str,
        worker: str,
        version: WeightVersion | None,
        held: Held | None = None,
        scope: str | None = None,
        said: bytes | None = None,
    ) -> None:
        """Notes that this session's turn ran on `worker`; the version of its first turn is kept. `said`:
        the bytes of its prompt and its sampled tokens."""
        entry = (key, scope)
        session = self._sessions.get(entry)
        if session is None:
            session = self._sessions[entry] = Session(worker=worker, first_version=version)
        session.worker = worker
        session.said = length_and_digest(said) if said is not None else None
        if held is not None:
            session.holders[worker] = held
            session.holders.move_to_end(worker)
            if len(session.holders) > _MAX_HOLDERS:
                session.holders.popitem(last=False)
        self._sessions.move_to_end(entry)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def forget(self, key: str, scope: str | None) -> None:
        self._sessions.pop((key, scope), None)


_STRIDE_BYTES = 1024


class Fingerprints:
    """Finds the trajectory of a request that carries no session key, by what it begins with.

    A finished turn is filed under the digest of prompt + generated tokens. The next turn's prompt
    begins with exactly that, so the longest filed prefix names its trajectory. Siblings of a GRPO
    group share the first prompt but not what was generated: they are told apart, and a first turn
    matches nothing, so it goes where the load is least. The scope is the digests' seed: equal prompts
    in different scopes don't match.

    An entry is filed under the digest of its whole strides. So a look-up hashes the prompt once, stops at the
    numbers of strides that entries have, and compares only with the few entries that share a digest.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[int, int], tuple[str, tuple[int, int]]] = OrderedDict()
        """(length, digest) -> its session and its stride."""
        self._by_stride: dict[int, dict[int, dict[int, set[int]]]] = {}
        """The number of whole strides -> their digest -> length -> digests."""
        self._strides: list[int] = []
        """The keys of `_by_stride` in order."""

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, prefix: bytes, key: str, scope: str | None = None) -> None:
        """Files a finished turn by the prefix that `prefix_of` gives."""
        entry, stride = _digests(prefix, _seed(scope))
        if entry not in self._entries:
            strides, digest = stride
            if strides not in self._by_stride:
                self._by_stride[strides] = {}
                insort(self._strides, strides)
            lengths = self._by_stride[strides].setdefault(digest, {})
            lengths.setdefault(entry[0], set()).add(entry[1])
        self._entries[entry] = (key, stride)
        self._entries.move_to_end(entry)
        while len(self._entries) > self._max_entries:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        (length, digest), (_, (strides, stride_digest)) = self._entries.popitem(last=False)
        by_digest = self._by_stride[strides]
        lengths = by_digest[stride_digest]
        lengths[length].remove(digest)
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del by_digest[stride_digest]
        if not by_digest:
            del self._by_stride[strides]
            self._strides.remove(strides)

    def find(self, prefix: bytes, scope: str | None = None) -> str | None:
        """Returns the session with the longest filed prefix that this prefix begins with."""
        found, hashed = None, 0
        digest, view = xxhash.xxh3_64(seed=_seed(scope)), memoryview(prefix)
        for strides in self._strides:
            start = strides * _STRIDE_BYTES
            if start > len(prefix):
                break
            digest.update(view[hashed:start])
            hashed = start
            if lengths := self._by_stride[strides].get(digest.intdigest()):
                found = self._longest(prefix, start, digest, lengths) or found
        return found

    def _longest(
        self, prefix: bytes, start: int, until_start: xxhash.xxh3_64, lengths: Mapping[int, set[int]]
    ) -> str | None:
        for length in sorted((n for n in lengths if n <= len(prefix)), reverse=True):
            digest = until_start.copy()
            digest.update(prefix[start:length])
            if digest.intdigest() in lengths[length]:
                return self._entries[(length, digest.intdigest())][0]
        return None

    def check_integrity(self) -> None:
        by_digest = [lengths for digests in self._by_stride.values() for lengths in digests.values()]
        by_length = [each for lengths in by_digest for each in lengths.items()]
        assert self._strides == sorted(self._by_stride)
        filed = {(length, digest) for length, digests in by_length for digest in digests}
        assert filed == set(self._entries)


def length_and_digest(prefix: bytes) -> tuple[int, int]:
    return len(prefix), xxhash.xxh3_64_intdigest(prefix)


def _seed(scope: str | None) -> int:
    return xxhash.xxh3_64_intdigest(scope.encode()) if scope is not None else 0


def _digests(prefix: bytes, seed: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns (length, digest) of the prefix, and (count, digest) of its whole strides."""
    strides = len(prefix) // _STRIDE_BYTES
    digest = xxhash.xxh3_64(prefix[: strides * _STRIDE_BYTES], seed=seed)
    stride = (strides, digest.intdigest())
    digest.update(prefix[strides * _STRIDE_BYTES :])
    return (len(prefix), digest.intdigest()), stride


def prefix_of(prompt: str | TokenIds) -> bytes:
    """Returns the bytes by which prompts are compared. A prompt that continues another begins with its
    bytes."""
    return prompt.encode() if isinstance(prompt, str) else prompt.prefix()


def explicit_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Returns the session key that the client sent, if any: a header, or else the body's session_id."""
    for name in SESSION_HEADERS:
        if key := headers.get(name):
            return key
    session_id = body.get("session_id")
    return session_id if isinstance(session_id, str) and session_id else None


class SessionKeys:
    """Gives every single request its session key."""

    def __init__(self, fingerprints: Fingerprints) -> None:
        self.fingerprints = fingerprints
        self._serial = itertools.count()

    def key(
        self, explicit: str | None, prompt: str | TokenIds, index: int, count: int, scope: str | None = None
    ) -> str:
        """Returns the key of request `index` of the `count` requests of one call."""
        if explicit is not None:
            return explicit if count == 1 else f"{explicit}#{index}"
        found = self.fingerprints.find(prefix_of(prompt), scope)
        return found if found is not None else f"anonymous-{next(self._serial)}"
