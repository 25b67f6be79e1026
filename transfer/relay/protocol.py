"""The relay: a small object store between the trainer and the engines.

Owns the Relay protocol and the reading of relay URLs.
Promises of every relay: an object is seen whole or not at all; put() never replaces; a failure raises
RelayError with the key. Never knows what the objects mean (manifest does).
Source: ROSE §4.2 (relay layer that decouples trainer and engines).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rose.transfer.format.manifest import run_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What Relay.wait() tells."""

    seen: str
    """For the next wait()."""
    keys: list[str] | None
    """Of what was written; None: of anything, the relay does not know."""


class Relay(Protocol):
    """Blocking calls, safe to use from several threads."""

    def put(self, key: str, data: bytes) -> None:
        """Stores a new object. Raises: RelayError when the key exists or the relay is full."""

    def upsert(self, key: str, data: bytes) -> None:
        """Stores or replaces a small object."""

    def get(self, key: str) -> bytes | None:
        """The object, or None if there is none."""

    def remove(self, keys: Iterable[str]) -> None:
        """Removes objects; those that are gone already are no error."""

    def keys(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, in order."""

    def wait(self, prefixes: Sequence[str], seen: str | None, timeout_s: float) -> Changes:
        """Returns when objects under one of the prefixes may have been written since `seen`.

        seen: of the last wait(), None to begin with: then it returns at once. Whoever looks after each wait()
        misses nothing. May return early; after timeout_s at the latest.
        """

    def close(self) -> None:
        """Lets go of connections and buffers; the objects stay."""


def remove_run(relay: Relay, run_id: str) -> int:
    """Removes every object of a run that ended; returns how many."""
    keys = relay.keys(run_prefix(run_id))
    relay.remove(keys)
    return len(keys)
