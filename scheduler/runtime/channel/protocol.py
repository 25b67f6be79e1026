"""The control channel between jobs and scheduler: what every kind of it offers.

Owns: the two sides' interfaces, and the choice by URL. Promises of every kind: calls reach the scheduler in
the order in which a client made them, at least once; what `commit` was given is there after a restart of
scheduler, job or channel; a second scheduler is refused. Never: looks into a message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """One call as it arrived."""

    client: str
    body: bytes
    token: str = ""
    """Names it to the channel until it is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One answer to one client."""

    client: str
    body: bytes


@dataclass(slots=True, kw_only=True)
class Batch:
    """What handling some calls has changed: made durable as one, and sent only then."""

    rows: dict[str, bytes | None] = field(default_factory=dict)
    """State by key; None removes."""
    events: list[bytes] = field(default_factory=list)
    outgoing: list[Outgoing] = field(default_factory=list)


class SchedulerSide(Protocol):
    """The scheduler's end. One thread."""

    def load(self) -> Mapping[str, bytes]:
        """All rows of earlier commits."""

    def receive(self, timeout_s: float) -> Sequence[Incoming]:
        """Calls that have arrived; empty when none does in time."""

    def commit(self, batch: Batch, handled: Sequence[Incoming]) -> None:
        """Makes rows and events durable, then sends. Raises: ChannelError if another scheduler took over."""

    def events(self, last: int) -> Sequence[bytes]:
        """The latest events, oldest first."""

    def close(self) -> None:
        """Lets another scheduler in."""


class ClientSide(Protocol):
    """A job's, a command's or the runner's end. One thread receives, any may send."""

    def send(self, body: bytes) -> None:
        """Hands one call over. Raises: ConnectionError."""

    def receive(self) -> bytes:
        """The next answer; waits for it. Raises: ConnectionError when scheduler or channel are gone."""

    def connect(self) -> None:
        """Opens the channel, or opens it again. Raises: ConnectionError."""

    def close(self) -> None:
        """Ends a `receive` in another thread with ConnectionError."""
