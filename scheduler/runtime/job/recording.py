"""The file in which a profiled job records how long its phases took.

A job that is not profiled writes none. Each line is written whole.
"""

import logging
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from rose.errors import WorkerError
from rose.scheduler.runtime.job.cache import WorkingSet

logger = logging.getLogger(__name__)


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a JobFile that makes its run a profile."""

    forced_tokens: int
    """The length of every response."""
    path: str
    times_engines: bool = False
    """Whether the first rollout also measures the job's engines, for moves of its tails."""


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


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How fast the engines of a rollout node are, for moves of tails: those of the slowest node."""

    step_s: float
    """The part of a decode step that does not depend on the responses."""
    request_s: float
    """The part for each response that runs on the node, at the longest context."""
    prompt_tokens: int
    """The mean length of the prompts that they got."""
    prefill_tokens_per_s: float
    """The speed at which the node prefills a response of the longest context."""


RecordedLine = PhaseRun | TokensAsked | PhaseBegan | IterationDone | EngineTimes


@runtime_checkable
class TimedSet(WorkingSet, Protocol):
    """A working set of engines that can tell how fast they are."""

    def begin_timing(self) -> None:
        """Says that the prompts count that the engines get from now on. Raises: WorkerError."""

    def engine_times(self, max_tokens: int) -> EngineTimes:
        """Measures the engines, which are loaded and idle. max_tokens: the longest response.

        Raises: WorkerError.
        """


class Recorded(NamedTuple):
    """All lines that have been written so far."""

    began: list[str]
    """All phases that began, also those that have not ended."""
    runs: list[PhaseRun]
    done_s: dict[int, float]
    """When the last rank had done each iteration."""
    has_asked_tokens: bool
    engines: EngineTimes | None = None
    """None if the job has not told."""


class Recorder:
    """The job's side."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._has_asked = False
        self._times_engines = recording.times_engines

    def forced_tokens(self) -> int:
        """Returns the length of every response, and records that the job has read it."""
        if not self._has_asked:
            self._has_asked = True
            self.note(TokensAsked())
        return self._recording.forced_tokens

    def begin_timing(self, working_set: WorkingSet | None) -> TimedSet | None:
        """Returns the engines if they should be timed after the rollout that begins. This is the first
        rollout, so the time that it takes belongs to the warm-up."""
        if not self._times_engines or not isinstance(working_set, TimedSet):
            return None
        self._times_engines = False
        try:
            working_set.begin_timing()
        except WorkerError as error:
            _say_untimed(error)
            return None
        return working_set

    def end_timing(self, engines: TimedSet) -> None:
        """Times the engines of a rollout that is done, and records the result. Without a result the profile
        has no `tail`, and all else."""
        try:
            self.note(engines.engine_times(self._recording.forced_tokens))
        except WorkerError as error:
            _say_untimed(error)

    def note(self, line: RecordedLine) -> None:
        """Records what happens now."""
        with Path(self._recording.path).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def _say_untimed(error: WorkerError) -> None:
    logger.warning("the job's engines are not timed, so the profile has no `tail`: %s", error)


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
        engines=next((each for each in found if isinstance(each, EngineTimes)), None),
    )
