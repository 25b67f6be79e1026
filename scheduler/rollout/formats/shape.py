"""The interface of every path through which clients ask for tokens.

Owns: Format and Sink.
Promises: all paths run as completions or chats; they differ only in their requests and answers.
Never does: I/O.
"""

from typing import Protocol

from rose.scheduler.rollout.formats.bodies import Json
from rose.scheduler.rollout.formats.completions import CheckRoom, ClientCall, Single
from rose.scheduler.rollout.formats.events import Chunk


class Format(Protocol):
    """The shape of one path's requests and answers."""

    ids_key: str
    """The field of a request that holds the prompt's ids."""
    end: bytes
    """The end of an event stream."""

    def call(self, body: Json, check_room: CheckRoom | None) -> ClientCall:
        """Reads a request. Raises: BadRequest; what `check_room` raises."""

    def answer(self, call: ClientCall, model: str | None) -> object:
        """Returns the whole answer to a finished call."""

    def stream_chunk(self, call: ClientCall, single: Single, chunk: Chunk, model: str | None) -> Json:
        """Returns the event for a chunk that was just added to the single's generation."""

    def stream_end(self, call: ClientCall, single: Single, model: str | None) -> Json:
        """Returns the event that finishes one choice."""

    def stream_usage(self, call: ClientCall, model: str | None) -> Json | None:
        """Returns the usage event; None if the client did not ask for one."""


class Sink(Protocol):
    """Receives a streamed answer while it is generated."""

    async def chunk(self, single: Single, chunk: Chunk, model: str | None) -> None:
        """Takes a chunk that was just added to the single's generation."""

    async def end(self, single: Single, model: str | None) -> None:
        """Takes the end of one choice."""
