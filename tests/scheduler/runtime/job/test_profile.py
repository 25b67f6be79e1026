"""What is made of a profiled job's notes."""

from typing import Any

import pytest

from rose.errors import ProfileError
from rose.scheduler.cluster.model import Phase
from rose.scheduler.runtime.job.profile import JobProfile, Sample, filled, profile_of
from rose.scheduler.runtime.job.recording import PhaseRun, Recorded
from rose.scheduler.runtime.job.spec import RunSpec

GIB = 1 << 30


def content(**phases: dict[str, Any]) -> dict[str, Any]:
    base = {"name": "a", "command": ["x"], "max_tokens": 10, "iterations": 5, "folder": "code"}
    return {**base, "phases": {"rollout": {}, "train": {}, **phases}}


def run(phase: str, iteration: int, run_s: float, begin_s: float = 0.0, **more: Any) -> PhaseRun:
    fields: dict[str, Any] = {"load_s": 0.0, "offload_s": 0.0, "cached_bytes": 0, **more}
    return PhaseRun(phase=Phase(phase), iteration=iteration, begin_s=begin_s, run_s=run_s, **fields)


def profile(file: dict[str, Any], runs: list[PhaseRun], samples: tuple[Sample, ...] = ()) -> JobProfile:
    recorded = Recorded(began=[each.phase for each in runs], runs=runs, has_asked_tokens=True)
    return profile_of(RunSpec.model_validate(file), recorded, samples)


def test_times_are_the_longest_after_the_warm_up_copies_included() -> None:
    runs = [
        run(phase, iteration, run_s, load_s=0.5, offload_s=0.25)
        for iteration, run_s in enumerate((90.0, 3.0, 4.0, 2.0))
        for phase in ("rollout", "train")
    ]
    found = profile(content(), runs)
    assert found.num_iterations == 3
    rollout = found.phases["rollout"]
    assert (rollout.total_s.worst, rollout.total_s.median, rollout.load_s.worst) == (4.75, 3.75, 0.5)


def test_a_sync_of_several_calls_counts_as_one() -> None:
    runs = [run(phase, 1, 1.0) for phase in ("rollout", "train", "sync", "sync")]
    assert profile(content(sync={}), runs).phases["sync"].total_s.worst == 2.0


def test_memory_is_that_of_the_phase_or_of_the_nearest_moment() -> None:
    runs = [run("rollout", 1, 10.0, begin_s=0.0), run("train", 1, 0.1, begin_s=10.45)]
    at = {1.0: 2, 9.0: 5, 10.3: 7, 11.0: 3}
    samples = tuple(Sample(at_s=at_s, resident_bytes=gib * GIB) for at_s, gib in at.items())
    phases = profile(content(), runs, samples).phases
    assert (phases["rollout"].peak_resident_gib, phases["train"].peak_resident_gib) == (5.0, 7.0)


@pytest.mark.parametrize(
    ("phases", "problem"),
    [
        (("rollout", "train", "sync"), "enters phase sync, its file has rollout, train; add it"),
        (("rollout",), r'never entered phase train, only rollout; put @rose.phase\("train"\)'),
        (
            ("rollout", "rollout", "train"),
            "2 times rollout in iteration 1; a group's order has one place",
        ),
    ],
)
def test_phases_that_are_not_those_of_the_file_are_refused(phases: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ProfileError, match=problem):
        profile(content(), [run(phase, 1, 1.0) for phase in phases])


def test_the_file_gets_times_and_the_memory_that_it_does_not_name() -> None:
    file = content(rollout={"nodes": 2, "seconds": 1.0, "memory_gb": 5.0}, train={"after": ["rollout"]})
    runs = [run(phase, 1, 2.00001, cached_bytes=3_000_001) for phase in ("rollout", "train")]
    written = filled(file, RunSpec.model_validate(file), profile(file, runs))
    assert written["phases"] == {
        "rollout": {"nodes": 2, "seconds": 2.001, "memory_gb": 5.0},
        "train": {"after": ["rollout"], "seconds": 2.001, "memory_gb": 0.004},
    }
    assert {key: written[key] for key in file if key != "phases"} == {
        key: file[key] for key in file if key != "phases"
    }
    assert "seconds" not in file["phases"]["train"], "what was read stays"
