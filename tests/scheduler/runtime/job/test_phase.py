"""What `rose.phase` and `rose.runtime_hook` do where no scheduler has started the process."""

import subprocess
import sys

import pytest

import rose


def test_importing_rose_loads_no_scheduler() -> None:
    program = "import sys, rose; assert not [m for m in sys.modules if m.startswith('rose.')]; rose.phase"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_program_runs_alone_without_permits() -> None:
    seen: list[tuple[str, int]] = []

    @rose.phase("rollout")
    def rollout(iteration: int) -> int:
        seen.append(("rollout", iteration))
        return iteration

    @rose.phase("train")
    def train(samples: int) -> None:
        seen.append(("train", samples))

    @rose.runtime_hook
    def iteration(progress: rose.Progress) -> None:
        train(rollout(progress.iteration))
        progress.report("rollout", 1, 1)

    iteration(num_iterations=2)
    assert seen == [("rollout", 0), ("train", 0), ("rollout", 1), ("train", 1)]
    with pytest.raises(ValueError, match="pass num_iterations"):
        iteration()


def test_what_is_no_phase_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"phase '\.\./x': expected rollout, train, or a name like checkpoint"
    ):
        rose.phase("../x")
    with pytest.raises(ValueError, match="phase 'sync': expected one of rollout, train"):
        rose.phase("sync", move_tail=print)(print)


def test_a_batch_is_divided_into_microbatches_of_the_most_rows_that_fit_all_memory() -> None:
    alone = rose.Progress(0, 1)
    assert list(alone.microbatches(7, 3)) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(alone.microbatches(0, 3)) == []
    with pytest.raises(ValueError, match="max_rows 0: a microbatch has at least one row"):
        next(alone.microbatches(7, 0))


def test_steps_of_negative_size_are_refused() -> None:
    with pytest.raises(ValueError, match="must be 0 or more, got -1 and 0"):
        rose.Progress(0, 1).step(-1)
