"""What is made of a profiled job's notes."""

from typing import Any

import pytest

from rose.errors import ProfileError
from rose.scheduler.runtime.job.profile import JobProfile, MemorySample, filled, profile_of
from rose.scheduler.runtime.job.recording import EngineTimes, PhaseRun, Recorded
from rose.scheduler.runtime.job.spec import RunSpec

GIB = 1 << 30


def content(**phases: dict[str, Any]) -> dict[str, Any]:
    base = {"name": "a", "command": ["x"], "max_tokens": 10, "iterations": 5, "folder": "code"}
    return {**base, "phases": {"rollout": {}, "train": {}, **phases}}


def run(phase: str, iteration: int, run_s: float, begin_s: float = 0.0, **more: Any) -> PhaseRun:
    fields: dict[str, Any] = {"load_s": 0.0, "offload_s": 0.0, "cached_bytes": 0, **more}
    return PhaseRun(phase=phase, iteration=iteration, begin_s=begin_s, run_s=run_s, **fields)


def profile(
    file: dict[str, Any],
    runs: list[PhaseRun],
    samples: tuple[MemorySample, ...] = (),
    done_s: dict[int, float] | None = None,
    engines: EngineTimes | None = None,
) -> JobProfile:
    began = [each.phase for each in runs]
    recorded = Recorded(began, runs, done_s or {}, has_asked_tokens=True, engines=engines)
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


def test_a_phase_of_several_ranks_lasts_from_the_first_permit_to_the_last_release() -> None:
    runs = [
        run(phase, 1, run_s, begin_s=begin_s, rank=rank, cached_bytes=100 + rank)
        for rank, begin_s, run_s in ((0, 10.0, 3.0), (1, 10.5, 4.0))
        for phase in ("rollout", "train")
    ]
    train = profile(content(), runs).phases["train"]
    assert (train.total_s.worst, train.run_s.worst, train.cached_bytes) == (4.5, 4.0, 201)


def test_the_time_outside_of_phases_is_what_no_phase_explains() -> None:
    file = content(
        rewards={"after": ["rollout"]},
        train={"after": ["rewards"]},
        checkpoint={"after": ["train"]},
        evaluate={"seconds": 50.0},
    )
    file["outside"] = {"after_train_s": 0.5}
    runs = [
        *(run("rollout", 1, 4.0, begin_s=11.0), run("rewards", 1, 1.5, begin_s=15.0)),
        *(run("train", 1, 2.0, begin_s=17.0), run("checkpoint", 1, 3.0, begin_s=20.0)),
    ]
    found = profile(file, runs, done_s={0: 10.75, 1: 23.0})
    assert {phase.value: each.worst for phase, each in found.outside.items()} == {
        "rollout": 0.5,
        "train": 1.25,
    }
    written = filled(file, RunSpec.model_validate(file), found)
    assert written["outside"] == {"after_rollout_s": 0.5, "after_train_s": 1.25}
    assert written["phases"]["checkpoint"] == {"after": ["train"], "seconds": 3.0}
    assert written["phases"]["evaluate"] == {"seconds": 50.0}, (
        "it is rare, and its file says how long it takes"
    )
    longer = {**file, "outside": {"after_train_s": 60.0}}
    assert filled(longer, RunSpec.model_validate(longer), found)["outside"]["after_train_s"] == 60.0
    job = RunSpec.model_validate(written)
    assert [job.after_s(phase) for phase in found.outside] == [0.5 + 1.5, 1.25 + 3.0 + 50.0]


def test_memory_is_that_of_the_phase_or_of_the_nearest_moment() -> None:
    runs = [run("rollout", 1, 10.0, begin_s=0.0), run("train", 1, 0.1, begin_s=10.45)]
    at = {1.0: 2, 9.0: 5, 10.3: 7, 11.0: 3}
    samples = tuple(MemorySample(at_s=at_s, own_bytes=gib * GIB) for at_s, gib in at.items())
    phases = profile(content(), runs, samples).phases
    assert (phases["rollout"].peak_own_gib, phases["train"].peak_own_gib) == (5.0, 7.0)


@pytest.mark.parametrize(
    ("phases", "problem"),
    [
        (("rollout", "train", "sync"), "enters phase sync, its file has rollout, train; add it"),
        (("rollout",), r'never entered phase train, only rollout; put @rose.phase\("train"\)'),
        (
            ("rollout", "rollout", "train"),
            "enters rollout 2 times in iteration 1, but a group's order has one place",
        ),
    ],
)
def test_phases_that_are_not_those_of_the_file_are_refused(phases: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ProfileError, match=problem):
        profile(content(), [run(phase, 1, 1.0) for phase in phases])


def test_memory_is_written_for_one_of_the_phases_nodes() -> None:
    file = content(rollout={"nodes": 2, "seconds": 1.0}, train={"after": ["rollout"]})
    runs = [run(phase, 1, 2.0, cached_bytes=3_000_001) for phase in ("rollout", "train")]
    written = filled(file, RunSpec.model_validate(file), profile(file, runs))
    assert written["phases"]["rollout"]["memory_gb"] == 0.002
    assert written["phases"]["train"]["memory_gb"] == 0.004


def test_the_file_gets_times_and_the_memory_that_it_does_not_name() -> None:
    file = content(rollout={"nodes": 2, "seconds": 1.0, "memory_gb": 5.0}, train={"after": ["rollout"]})
    runs = [run(phase, 1, 2.00001, cached_bytes=3_000_001) for phase in ("rollout", "train")]
    written = filled(file, RunSpec.model_validate(file), profile(file, runs))
    assert written["phases"] == {
        "rollout": {"nodes": 2, "seconds": 2.001, "memory_gb": 5.0},
        "train": {"after": ["rollout"], "seconds": 2.001, "memory_gb": 0.004},
    }
    assert written["outside"] == {"after_rollout_s": 0.0, "after_train_s": 0.0}
    assert {key: written[key] for key in file if key != "phases"} == {
        key: file[key] for key in file if key != "phases"
    }
    assert "seconds" not in file["phases"]["train"], "what was read stays"


def test_the_file_gets_the_speed_of_the_job_s_engines_unless_it_has_one() -> None:
    file = content(rollout={"nodes": 2})
    runs = [
        run(phase, 1, 2.0, offload_s=offload_s) for phase, offload_s in (("rollout", 2.5), ("train", 9.0))
    ]
    engines = EngineTimes(step_s=0.0123456, request_s=0.0, prompt_tokens=12345, prefill_tokens_per_s=16000.0)
    found = profile(file, runs, engines=engines)
    written = filled(file, RunSpec.model_validate(file), found)
    assert written["tail"] == {
        "step_s": 0.01235,
        "request_s": 0.0,
        "prompt_tokens": 12345,
        "prefill_tokens_per_s": 16000.0,
        "pause_s": 2.5,
    }
    assert RunSpec.model_validate(written).speed is not None
    own = {**file, "tail": {**written["tail"], "step_s": 0.5}}
    assert filled(own, RunSpec.model_validate(own), found)["tail"] == own["tail"]
    assert "tail" not in filled(file, RunSpec.model_validate(file), profile(file, runs))
