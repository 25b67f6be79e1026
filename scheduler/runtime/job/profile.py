"""A job's worst-case times, computed from a run of the job alone at max tokens, and written into its file.

Times are the longest that were measured after the warm-up, never estimates. A job that does not run its
phases as its file says raises ProfileError. Pure: rose.jobs.profile runs the job.

Source: WEAVE §4.1: phases are profiled once, at the token limit, so that no later iteration is longer.
"""

import copy
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import msgspec

from rose.errors import ProfileError
from rose.scheduler.cluster.spec import PhaseSpec
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.job.recording import EngineTimes, PhaseRun, Recorded
from rose.scheduler.runtime.job.spec import RayClusterSpec, RunSpec, TailSpec

NUM_WARM_UP = 1
"""Iterations that are not measured: the first one starts cold and compiles."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """The memory of the job's processes at one moment."""

    at_s: float
    own_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Statistics over the measured iterations."""

    worst: float
    median: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(worst=max(values), median=statistics.median(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProfile:
    """One phase. `total_s` is what a permit is held for: loading, running, offloading, by all ranks."""

    total_s: Seconds
    load_s: Seconds
    run_s: Seconds
    offload_s: Seconds
    peak_own_gib: float
    """The peak of what the job's processes had in memory in this phase, without files and shared memory: the
    phase's own working set counts, and copies in host memory don't."""
    cached_bytes: int
    """The sum over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """One job. `has_asked_tokens`: it read `Progress.forced_tokens`; else its lengths were the usual ones."""

    job: str
    max_tokens: int
    num_iterations: int
    has_asked_tokens: bool
    phases: Mapping[str, PhaseProfile]
    outside: Mapping[Phase, Seconds]
    """For each phase with nodes, the time after it in which the job is in no phase."""
    tail: TailSpec | None = None
    """How fast the job's engines are, for moves of its tails; None if it has not told."""

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "kind": "measured",
            "max_tokens": self.max_tokens,
            "iterations": self.num_iterations,
            "has_asked_tokens": self.has_asked_tokens,
            "phases": {name: asdict(phase) for name, phase in self.phases.items()},
            "outside": {f"after_{phase}_s": asdict(seconds) for phase, seconds in self.outside.items()},
            "tail": self.tail.model_dump() if self.tail is not None else None,
        }


def to_be_profiled(spec: RunSpec, num_iterations: int, group: str) -> dict[str, Any]:
    """The job as it is run for its profile: alone in `group`, without limits of time and of host memory.

    A limit of host memory that the file names is kept: exceeded, it would be so in every run.
    """
    unknown_s, unlimited_gb = 1e6, 1e6
    phases = {
        name: {
            "nodes": phase.nodes,
            "seconds": unknown_s,
            "memory_gb": phase.memory_gb if _has_memory(phase) else unlimited_gb,
            "after": list(phase.after),
        }
        for name, phase in spec.phases.items()
    }
    return {
        "name": spec.name,
        "command": list(spec.command),
        "folder": spec.folder,
        "phases": phases,
        "slo": spec.slo,
        "max_tokens": spec.max_tokens,
        "iterations": NUM_WARM_UP + num_iterations,
        "group": group,
        "num_ranks": spec.num_ranks,
        "launch": spec.launch.value,
        "placement": spec.placement.value,
        "runtime_env": spec.runtime_env,
        "max_restarts": 0,
        "ray": spec.ray.model_dump() if spec.ray is not None else None,
    }


def cluster_of(spec: RunSpec, group: str, ray: RayClusterSpec | None = None) -> dict[str, Any]:
    """Returns a cluster with one group that has as many nodes as the job asks for."""
    memory = {"dollars_per_gpu_hour": 0.0, "host_gb": 1e7}
    return {
        "pools": {"rollout": {"name": "rollout", **memory}, "train": {"name": "train", **memory}},
        "groups": {
            group: {
                "num_rollout_nodes": spec.phases["rollout"].nodes,
                "num_train_nodes": spec.phases["train"].nodes,
            }
        },
        "ray": ray.model_dump() if ray is not None else None,
    }


def check_phases(spec: RunSpec, recorded: Recorded) -> None:
    """Raises: ProfileError for a phase that the file lacks, or one on nodes that an iteration has twice."""
    for phase in recorded.began:
        if phase not in spec.phases:
            raise ProfileError(
                f"{spec.name}: enters phase {phase}, its file has {', '.join(spec.phases)}; add it there"
            )
    held = [run for run in recorded.runs if run.phase in set(Phase)]
    for (phase, iteration, _), count in Counter((run.phase, run.iteration, run.rank) for run in held).items():
        if count > 1:
            raise ProfileError(
                f"{spec.name}: enters {phase} {count} times in iteration {iteration}, but a group's order "
                "has one place for it: make it one function"
            )


def profile_of(spec: RunSpec, recorded: Recorded, samples: Sequence[MemorySample]) -> JobProfile:
    """Returns the figures of a job that ran to its end. Raises: ProfileError for a phase that it never
    entered."""
    check_phases(spec, recorded)
    measured = [run for run in recorded.runs if run.iteration >= NUM_WARM_UP]
    seen = {run.phase for run in measured}
    # What needs no nodes may be rare, such as an evaluation: the file says how long it takes.
    missing = [
        name
        for name, phase in spec.phases.items()
        if name not in seen and (phase.nodes or phase.seconds is None)
    ]
    if missing:
        raise ProfileError(
            f"{spec.name}: never entered phase {missing[0]}, only {', '.join(sorted(seen)) or 'none'}; put "
            f'@rose.phase("{missing[0]}") on its function, or leave it out of the file'
        )
    phases = {
        name: _phase([run for run in measured if run.phase == name], samples)
        for name in spec.phases
        if name in seen
    }
    return JobProfile(
        job=spec.name,
        max_tokens=spec.max_tokens,
        num_iterations=len({run.iteration for run in measured}),
        has_asked_tokens=recorded.has_asked_tokens,
        phases=phases,
        outside=_outside(spec, measured, recorded.done_s),
        tail=_tail(recorded.engines, phases[Phase.ROLLOUT].offload_s.worst),
    )


def _tail(engines: EngineTimes | None, offload_s: float) -> TailSpec | None:
    """Returns the file's section on moves of tails. A move offloads the engines that it leaves."""
    if engines is None:
        return None
    shown = {key: float(f"{value:.4g}") for key, value in msgspec.structs.asdict(engines).items()}
    found = TailSpec.model_validate({**shown, "prompt_tokens": engines.prompt_tokens})
    return found.model_copy(update={"pause_s": max(found.pause_s, _rounded_up(offload_s))})


def _outside(
    spec: RunSpec, measured: Sequence[PhaseRun], done_s: Mapping[int, float]
) -> dict[Phase, Seconds]:
    """Returns the times from the end of a phase with nodes to the next one, less phases without nodes.

    What comes before an iteration's rollout counts as after the training of that iteration.
    """
    found: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    for iteration in sorted({run.iteration for run in measured}):
        runs = [run for run in measured if run.iteration == iteration]
        begin_s, end_s = ({each: of(runs, each) for each in Phase} for of in (_begin_s, _end_s))
        before_s = begin_s[Phase.ROLLOUT] - done_s.get(iteration - 1, begin_s[Phase.ROLLOUT])
        after_s = done_s.get(iteration, end_s[Phase.TRAIN]) - end_s[Phase.TRAIN]
        gaps_s = {
            Phase.ROLLOUT: begin_s[Phase.TRAIN] - end_s[Phase.ROLLOUT],
            Phase.TRAIN: before_s + after_s,
        }
        for phase, gap_s in gaps_s.items():
            named = [run for run in runs if run.phase in spec.free_phases(phase)]
            found[phase].append(max(0.0, gap_s - _longest_s(named, "total_s")))
    return {phase: Seconds.of(values) for phase, values in found.items()}


def _begin_s(runs: Sequence[PhaseRun], phase: str) -> float:
    return min(run.begin_s for run in runs if run.phase == phase)


def _end_s(runs: Sequence[PhaseRun], phase: str) -> float:
    return max(run.end_s for run in runs if run.phase == phase)


def _longest_s(runs: Sequence[PhaseRun], part: str) -> float:
    """Returns the time of the slowest rank in one iteration, in which it may have several calls."""
    of_ranks: dict[int, float] = defaultdict(float)
    for run in runs:
        of_ranks[run.rank] += getattr(run, part)
    return max(of_ranks.values(), default=0.0)


def _phase(runs: Sequence[PhaseRun], samples: Sequence[MemorySample]) -> PhaseProfile:
    """Returns a phase's profile. Several calls in one iteration, which a sync may have, count together."""
    iterations = [[run for run in runs if run.iteration == each] for each in {run.iteration for run in runs}]

    def seconds(part: str) -> Seconds:
        return Seconds.of([_longest_s(each, part) for each in iterations])

    def held_s(runs: Sequence[PhaseRun]) -> float:
        """Returns the time from the first rank's begin to the last one's end."""
        is_one_call = len({run.rank for run in runs}) == len(runs)
        return _end_s(runs, runs[0].phase) - _begin_s(runs, runs[0].phase) if is_one_call else 0.0

    return PhaseProfile(
        total_s=Seconds.of([max(held_s(each), _longest_s(each, "total_s")) for each in iterations]),
        load_s=seconds("load_s"),
        run_s=seconds("run_s"),
        offload_s=seconds("offload_s"),
        peak_own_gib=max(_peak_bytes(run, samples) for run in runs) / _GIB,
        cached_bytes=max(sum(_last_bytes(each).values()) for each in iterations),
    )


def _last_bytes(runs: Sequence[PhaseRun]) -> dict[int, int]:
    return {run.rank: run.cached_bytes for run in runs}


def _peak_bytes(run: PhaseRun, samples: Sequence[MemorySample]) -> int:
    """The largest sample within the phase; the nearest one if the phase is shorter than the interval."""
    inside = [each.own_bytes for each in samples if run.begin_s <= each.at_s <= run.end_s]
    if inside:
        return max(inside)
    middle_s = run.begin_s + run.total_s / 2
    nearest = min(samples, key=lambda each: abs(each.at_s - middle_s), default=None)
    return nearest.own_bytes if nearest is not None else 0


def filled(content: Mapping[str, Any], spec: RunSpec, profile: JobProfile) -> dict[str, Any]:
    """Returns the job's file with the measured seconds, and with host memory and `tail` where it names none.

    A longer time outside of phases that the file names is kept: what is rare need not be in the profile.
    """
    written = copy.deepcopy(dict(content))
    for name, phase in profile.phases.items():
        written["phases"][name]["seconds"] = _rounded_up(phase.total_s.worst)
        if phase.cached_bytes and not _has_memory(spec.phases[name]):
            node_bytes = phase.cached_bytes / max(1, spec.phases[name].nodes)
            written["phases"][name]["memory_gb"] = math.ceil(node_bytes / 1e6) / 1e3
    written["outside"] = spec.outside.model_dump()
    for earlier, seconds in profile.outside.items():
        key = f"after_{earlier}_s"
        written["outside"][key] = max(written["outside"][key], _rounded_up(seconds.worst))
    if profile.tail is not None and spec.tail is None:
        written["tail"] = profile.tail.model_dump()
    return written


def _rounded_up(seconds: float) -> float:
    """Returns the seconds as the file has them, in whole milliseconds."""
    return math.ceil(seconds * 1e3) / 1e3


def _has_memory(phase: PhaseSpec) -> bool:
    return "memory_gb" in phase.model_fields_set
