"""The relay: a small object store between the trainer and the engines.

Owns the protocol that every relay keeps, alone or as several copies.
Every relay promises that a reader sees an object whole or not at all, that put() never replaces an object,
and that a failure raises RelayError with the key. It never knows what its objects mean (manifest.py does).
Source: ROSE §4.2 (the relay layer that decouples trainer and engines).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rose.transfer.format.manifest import run_prefix, run_sign_key
from rose.types import BytesLike


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayChanges:
    """The answer of Relay.wait()."""

    seen: str
    """The position to hand to the next wait()."""
    keys: list[str] | None
    """The keys that were written; None where the relay can't tell, so that any may have been."""


class Relay(Protocol):
    """A relay's client. Calls block, and several threads may make them.

    The methods with a body are right for one relay that stands alone; implementations inherit them.
    """

    batch_bytes: int = 0
    """Callers hand put_several() new objects of up to this many bytes together; 0: one by one."""

    def put(self, key: str, data: bytes) -> None:
        """Stores a new object. Raises: RelayError when the key exists or the relay is full."""

    def upsert(self, key: str, data: bytes) -> None:
        """Stores a small object, and replaces one that has this key."""

    def get(self, key: str) -> bytes | None:
        """Returns the object, or None if there is none."""

    def remove(self, keys: Iterable[str]) -> None:
        """Removes objects. A key that has no object is no error."""

    def keys(self, prefix: str) -> list[str]:
        """Returns all keys that start with `prefix`, in order."""

    def wait(self, prefixes: Sequence[str], seen: str | None, timeout_s: float) -> RelayChanges:
        """Returns when objects under one of the prefixes may have been written since `seen`.

        seen: the position that the last wait() returned; None makes the first wait() return at once. A caller
        that looks after each wait() misses nothing. May return early; returns after timeout_s at the latest.
        """

    def close(self) -> None:
        """Closes connections and buffers; the objects stay in the relay."""

    def put_several(self, objects: Sequence[tuple[str, bytes]]) -> int:
        """Stores the first of some new objects, or several from the first on, and returns how many. Raises:
        as put() does.
        """
        self.put(*objects[0])
        return 1

    def get_several(self, keys: Sequence[str]) -> list[BytesLike | None]:
        """Returns the object of the first of some keys, or those of several from the first on; None where
        there is none.

        They may lie in memory of the relay's client, which has no room for others until they are dropped.
        """
        return [self.get(keys[0])]

    def put_with_copies(
        self, key: str, data: bytes, *, is_replacing: bool, copy_to: Sequence[str]
    ) -> Sequence[str]:
        """Writes an object and asks this relay to hand it on to the relays with the URLs in `copy_to`.

        is_replacing: writes as upsert() does instead of as put(). Returns the URLs of those that took the
        object; the caller writes to the others itself. A relay that can't hand objects on returns none.
        """
        if is_replacing:
            self.upsert(key, data)
        else:
            self.put(key, data)
        return ()

    def get_all(self, prefix: str) -> dict[str, bytes]:
        """Returns all objects whose keys start with `prefix`, by key, in few calls. They must be small."""
        found = {key: self.get(key) for key in self.keys(prefix)}
        return {key: data for key, data in found.items() if data is not None}

    def lacking(self, keys: Sequence[str]) -> set[str]:
        """Returns those of these keys, all of one version, that have no object. Exchanges few bytes."""
        return set(keys).difference(self.keys(_common_prefix(keys))) if keys else set()

    def repair(
        self, prefix: str, versions: Iterable[str], newest: Sequence[str], spared: tuple[str, ...] = ()
    ) -> None:
        """Gives every copy of this relay what it missed while it did not answer; one alone has no copies.

        prefix: the run's. versions: the keys of all objects that its versions need. Other objects of versions
        are removed, except under the prefixes in `spared`, where others may be writing. newest: the keys
        among `versions` that were written last.
        """
        return None


def remove_run(relay: Relay, run_id: str) -> int:
    """Removes every object of a run that has ended. Returns how many there were."""
    keys = relay.keys(run_prefix(run_id))
    relay.remove([*keys, run_sign_key(run_id)])
    return len(keys)


def _common_prefix(keys: Sequence[str]) -> str:
    pairs = enumerate(zip(min(keys), max(keys), strict=False))
    return keys[0][: next((at for at, (first, last) in pairs if first != last), None)]
