"""Which trajectory a request belongs to, and where its last turn ran.

Owns: the session key of a request, the affinity table, the fingerprints of finished turns.
Promises: all tables are bounded (least recently used entries leave first).
Never does: I/O. Losing an entry costs a prefix-cache hit, never a wrong answer.
"""

import itertools
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from rose.types import WeightVersion

SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")


_MAX_HOLDERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The KV that a turn left on a worker."""

    num_tokens: int
    version: WeightVersion | None
    until: float
    """When its lease ends."""


@dataclass(slots=True, kw_only=True)
class Session:
    """Where a trajectory's turns ran, and the weights of its first."""

    worker: str
    """Of its last turn."""
    first_version: WeightVersion | None
    holders: OrderedDict[str, Held] = field(default_factory=OrderedDict)
    """Worker -> what it holds, the last few."""

    def cached_tokens(self, worker: str, version: WeightVersion | None, now: float) -> int:
        """Prompt tokens whose KV the worker should still hold, made by weights of `version`."""
        held = self.holders.get(worker)
        if held is None or held.version != version or held.until <= now:
            return 0
        return held.num_tokens


class SessionTable:
    """Session key -> Session, bounded."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: str) -> Session | None:
        return self._sessions.get(key)

    def record(self, key: str, worker: str, version: WeightVersion | None, held: Held | None = None) -> None:
        """Remember that this session's turn ran on `worker`; the version of its first turn is kept."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(worker=worker, first_version=version)
        session.worker = worker
        if held is not None:
            session.holders[worker] = held
            session.holders.move_to_end(worker)
            if len(session.holders) > _MAX_HOLDERS:
                session.holders.popitem(last=False)
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)


class Fingerprints:
    """Finds the trajectory of a request that carries no session key, by what it begins with.

    A finished turn is filed under the digest of prompt + generated tokens. The next turn's prompt
    begins with exactly that, so the longest filed prefix names its trajectory. Siblings of a GRPO
    group share the first prompt but not what was generated: they are told apart, and a first turn
    matches nothing, so it goes where the load is least.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, tokens: str | Sequence[int], key: str) -> None:
        data = _as_bytes(tokens)
        entry = (len(data), xxhash.xxh3_64_intdigest(data))
        if entry not in self._entries:
            self._lengths[len(data)] += 1
        self._entries[entry] = key
        self._entries.move_to_end(entry)
        while len(self._entries) > self._max_entries:
            (length, _), _key = self._entries.popitem(last=False)
            self._lengths[length] -= 1
            if self._lengths[length] == 0:
                del self._lengths[length]

    def find(self, prompt: str | Sequence[int]) -> str | None:
        """The session whose filed prefix is the longest that `prompt` begins with."""
        data = memoryview(_as_bytes(prompt))
        digest, done, found = xxhash.xxh3_64(), 0, None
        for length in sorted(n for n in self._lengths if n <= len(data)):
            digest.update(data[done:length])
            done = length
            found = self._entries.get((length, digest.intdigest()), found)
        return found

    def check_integrity(self) -> None:
        assert self._lengths == Counter(length for length, _ in self._entries)


def _as_bytes(prompt: str | Sequence[int]) -> bytes:
    return prompt.encode() if isinstance(prompt, str) else array("q", prompt).tobytes()


def explicit_key(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """The session key that the client sent, if any: header first, then the body's session_id."""
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

    def key(self, explicit: str | None, prompt: str | Sequence[int], index: int, count: int) -> str:
        """Request `index` of the `count` that one call was fanned out to."""
        if explicit is not None:
            return explicit if count == 1 else f"{explicit}#{index}"
        found = self.fingerprints.find(prompt)
        return found if found is not None else f"anonymous-{next(self._serial)}"
