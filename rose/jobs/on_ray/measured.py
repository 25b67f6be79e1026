"""What the parts of a profiled job record on their hosts, brought together with all times on one clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose.scheduler.runtime.job.profile import MemorySample
from rose.scheduler.runtime.job.recording import (
    IterationDone,
    PhaseRun,
    RecordedLine,
    Recorder,
    Recording,
)

FILE = "phases.jsonl"
"""Each part's own recording, in its folder."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a part has recorded since it was asked last."""

    lines: bytes
    """Whole ones."""
    end: int
    """The end of these lines, for the next question."""
    now_s: float
    """Its host's time.monotonic()."""
    own_bytes: int
    """The memory of all its processes."""


def measured(folder: Path, kept: int, own_bytes: int, now_s: float) -> Measured:
    """Returns what the part with this folder has recorded behind ``kept``."""
    path = folder / FILE
    found = path.read_bytes()[kept:] if path.exists() else b""
    lines = found[: found.rfind(b"\n") + 1]
    return Measured(lines=lines, end=kept + len(lines), now_s=now_s, own_bytes=own_bytes)


@dataclass(slots=True)
class _Clock:
    """A host's clock as seen from here."""

    kept: int = 0
    offset_s: float = 0.0
    width_s: float = math.inf
    """How long the answer took that gave the offset, which is wrong by half of that at most."""


@dataclass(slots=True)
class RayRecording:
    """The recording of one job, on this host's clock."""

    recording: Recording
    samples: list[MemorySample] = field(default_factory=list)
    _clocks: dict[str, _Clock] = field(default_factory=dict)

    def kept(self, node: str) -> int:
        """Returns where the next question to the part of this node begins."""
        return self._clocks[node].kept if node in self._clocks else 0

    def take(self, nodes: Sequence[str], answers: Sequence[Measured], asked_s: float, now_s: float) -> None:
        """Adds the answers of all nodes' parts, which were asked at ``asked_s``."""
        recorder = Recorder(self.recording)
        decoder: msgspec.json.Decoder[RecordedLine] = msgspec.json.Decoder(RecordedLine)
        for node, each in zip(nodes, answers, strict=True):
            clock = self._clocks.setdefault(node, _Clock())
            if now_s - asked_s < clock.width_s:
                clock.width_s, clock.offset_s = now_s - asked_s, (asked_s + now_s) / 2 - each.now_s
            clock.kept = each.end
            for line in each.lines.splitlines():
                recorder.note(_shifted(decoder.decode(line), clock.offset_s))
        total = sum(each.own_bytes for each in answers)
        self.samples.append(MemorySample(at_s=now_s, own_bytes=total))


def _shifted(line: RecordedLine, offset_s: float) -> RecordedLine:
    match line:
        case PhaseRun():
            return msgspec.structs.replace(line, begin_s=line.begin_s + offset_s)
        case IterationDone():
            return msgspec.structs.replace(line, at_s=line.at_s + offset_s)
        case _:
            return line
