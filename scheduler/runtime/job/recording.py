"""The file in which a profiled job records how long its phases took.

A job that is not profiled writes none. Each line is written whole.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a JobFile that makes its run a profile."""

    forced_tokens: int
    """The length of every response."""
    path: str


class PhaseRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One rank's phase from its permit to its release, or one that needs no permit."""

    phase: str
    rank: int = 0
    iteration: int
    begin_s: float
    """The time is of time.monotonic(), which all processes of a host share."""
    load_s: float
    run_s: float
    offload_s: float
    cached_bytes: int
    """The bytes of its working set in host memory while the phase is suspended."""

    @property
    def total_s(self) -> float:
        """The time of the permit, which covers the copies as well."""
        return self.load_s + self.run_s + self.offload_s

    @property
    def end_s(self) -> float:
        return self.begin_s + self.total_s


class TokensAsked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job has read how long its responses must be."""


class PhaseBegan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job has its permit for a phase, or needs none."""

    phase: str


class IterationDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank has done all of an iteration."""

    iteration: int
    at_s: float


RecordedLine = PhaseRun | TokensAsked | PhaseBegan | IterationDone


class Recorded(NamedTuple):
    """All lines that have been written so far."""

    began: list[str]
    """All phases that began, also those that have not ended."""
    runs: list[PhaseRun]
    done_s: dict[int, float]
    """When the last rank had done each iteration."""
    has_asked_tokens: bool


class Recorder:
    """The job's side."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._has_asked = False

    def forced_tokens(self) -> int:
        """Returns the length of every response, and records that the job has read it."""
        if not self._has_asked:
            self._has_asked = True
            self.note(TokensAsked())
        return self._recording.forced_tokens

    def note(self, line: RecordedLine) -> None:
        """Records what happens now."""
        with Path(self._recording.path).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def read_recording(path: Path) -> Recorded:
    """Reads what the job has recorded so far."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    decoder: msgspec.json.Decoder[RecordedLine] = msgspec.json.Decoder(RecordedLine)
    found = [decoder.decode(line) for line in lines]
    done = [each for each in found if isinstance(each, IterationDone)]
    return Recorded(
        began=[each.phase for each in found if isinstance(each, PhaseBegan)],
        runs=[each for each in found if isinstance(each, PhaseRun)],
        done_s={each.iteration: each.at_s for each in sorted(done, key=lambda each: each.at_s)},
        has_asked_tokens=any(isinstance(each, TokensAsked) for each in found),
    )
