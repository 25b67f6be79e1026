"""The control channel between jobs and scheduler: the interfaces of its two sides.

Every kind of channel keeps three promises. Calls reach the scheduler at least once, in the order in which a
client made them. What `commit` was given survives a restart of the scheduler, the job or the channel. A
second scheduler is refused. A channel never looks into a message.

The calls of a command that has given up are taken back, unless the scheduler has them already, so that a
command which failed is not carried out later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

COMMAND = "command:"
"""Begins the names of clients that wait for their answers as long as they are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """One call as it arrived."""

    client: str
    body: bytes
    token: str = ""
    """Identifies the call to the channel until it is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One answer to one client."""

    client: str
    body: bytes


@dataclass(slots=True, kw_only=True)
class Batch:
    """The changes and answers of some calls: made durable together, then sent."""

    rows: dict[str, bytes | None] = field(default_factory=dict)
    """State by key; None removes."""
    events: list[bytes] = field(default_factory=list)
    outgoing: list[Outgoing] = field(default_factory=list)


class SchedulerSide(Protocol):
    """The scheduler's end. One thread."""

    def load(self) -> Mapping[str, bytes]:
        """Returns all rows of earlier commits."""

    def receive(self, timeout_s: float) -> Sequence[Incoming]:
        """Returns the calls that have arrived; empty if none arrives in time."""

    def commit(self, batch: Batch, handled: Sequence[Incoming]) -> None:
        """Makes rows and events durable, then sends.

        Raises: ChannelError if another scheduler took over, or if nothing can be made durable any more.
        """

    def events(self, last: int) -> Sequence[bytes]:
        """Returns the latest events, oldest first. Raises: ChannelError if they can't be read."""

    def close(self) -> None:
        """Lets another scheduler in."""


class ClientSide(Protocol):
    """A job's, a command's or the runner's end. One thread receives, any may send."""

    def send(self, body: bytes) -> None:
        """Sends one call. Raises: ConnectionError."""

    def receive(self) -> bytes:
        """Waits for the next answer. Raises: ConnectionError when the scheduler or the channel is gone."""

    def connect(self) -> None:
        """Opens the channel, or opens it again. Raises: ConnectionError."""

    def close(self) -> None:
        """Ends a `receive` in another thread with ConnectionError."""
