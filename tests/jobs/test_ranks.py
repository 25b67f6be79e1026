"""What the processes of a job on one host are told."""

import pytest

from rose.jobs.ranks import limit_bytes
from rose.scheduler.cluster.spec import PhaseSpec
from rose.scheduler.runtime.job.job import JobNode


@pytest.mark.parametrize(
    ("here", "num_bytes"),
    [
        (("rollout-0", "train-0"), 3_000_000_000),
        (("rollout-0", "rollout-1", "train-0"), 6_000_000_000),
        (("train-0", "train-1"), 3_000_000_000),
    ],
)
def test_a_host_keeps_as_much_as_the_phases_nodes_on_it_may(here: tuple[str, ...], num_bytes: int) -> None:
    phase = PhaseSpec(nodes=4, seconds=1.0, memory_gb=3.0)
    nodes = [JobNode(name=name, address="127.0.0.1") for name in here]
    assert limit_bytes("rollout", phase, nodes) == num_bytes
