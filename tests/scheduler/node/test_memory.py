"""Wait-or-drop, and batches of requests."""

import pytest

from rose.scheduler.node.batching import BatchLimits
from rose.scheduler.node.memory import MemoryVerdict, WaitOrDrop

RULE = WaitOrDrop(max_wait_s=0.2, threshold=0.9)


@pytest.mark.parametrize(
    ("need_bytes", "used_bytes", "waited_s", "verdict"),
    [
        (30, 60, 0.0, MemoryVerdict.RUN),
        (31, 60, 0.0, MemoryVerdict.WAIT),
        (31, 60, 0.1, MemoryVerdict.WAIT),
        (31, 60, 0.2, MemoryVerdict.OFFLOAD),
        (30, 60, 9.0, MemoryVerdict.RUN),  # after an offload the task is tried again
        (91, 0, 0.0, MemoryVerdict.REFUSE),
        (90, 0, 0.0, MemoryVerdict.RUN),
    ],
)
def test_a_task_runs_waits_or_drops(
    need_bytes: int, used_bytes: int, waited_s: float, verdict: MemoryVerdict
) -> None:
    found = RULE.decide(need_bytes=need_bytes, used_bytes=used_bytes, total_bytes=100, waited_s=waited_s)
    assert found is verdict


@pytest.mark.parametrize("wrong", [{"threshold": 0.0}, {"threshold": 1.1}, {"max_wait_s": -1.0}])
def test_rules_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="threshold"):
        WaitOrDrop(**({"max_wait_s": 1.0} | wrong))


@pytest.mark.parametrize(
    ("lengths", "count"),
    [([], 0), ([10], 1), ([5000], 1), ([1000, 1000, 100], 2), ([1, 1, 1, 1], 3), ([3000, 1], 1)],
)
def test_a_batch_takes_the_head_of_the_queue_within_its_limits(lengths: list[int], count: int) -> None:
    assert BatchLimits(max_requests=3, max_tokens=2000).take(iter(lengths)) == count
