"""The slowdown table and shares."""

import math

import pytest

from rose.scheduler.gpu.slowdown import WHOLE, Share, SlowdownTable, Split, splits
from rose.scheduler.gpu.substages import SubStageKind

GRID = ((4.0, 3.0), (2.0, 1.0))
TABLE = SlowdownTable(
    hardware="here",
    entries={(SubStageKind.TRAIN, SubStageKind.TRAIN): GRID},
    compute=(0.25, 0.75),
    memory=(0.2, 0.8),
)


@pytest.mark.parametrize(
    ("compute", "memory", "slowdown"),
    [(0.25, 0.2, 4.0), (0.75, 0.8, 1.0), (0.5, 0.2, 3.0), (0.25, 0.5, 3.5), (0.5, 0.5, 2.5), (0.1, 0.9, 3.0)],
)
def test_slowdowns_are_interpolated_and_the_nearest_outside_the_grid(
    compute: float, memory: float, slowdown: float
) -> None:
    share = Share(compute=compute, memory=memory)
    assert TABLE.slowdown(SubStageKind.TRAIN, SubStageKind.TRAIN, share) == pytest.approx(slowdown)


def test_what_was_not_measured_is_unknown_and_nothing_beside_costs_nothing() -> None:
    assert TABLE.slowdown(SubStageKind.TRAIN, SubStageKind.REFERENCE, Share(compute=0.5)) is None
    assert TABLE.slowdown(SubStageKind.REFERENCE, None, WHOLE) == 1.0


def test_shares_that_exceed_one_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match=r"compute shares 0\.75 \+ 0\.5 exceed one GPU"):
        Split(first=Share(compute=0.75, memory=0.5), second=Share(compute=0.5, memory=0.5))
    with pytest.raises(ValueError, match="above 0"):
        Share(compute=0.0)


def test_every_split_gives_all_of_the_gpu_away() -> None:
    found = splits()
    assert len(found) == 12
    for split in found:
        assert split.first.compute + split.second.compute == pytest.approx(1)
        assert split.first.memory + split.second.memory == pytest.approx(1)


@pytest.mark.parametrize(
    ("grid", "compute", "message"),
    [
        (((1.0,),), (0.5, 0.75), "expected 2 rows of 1 slowdowns"),
        (((math.nan,),), (0.5,), "got nan"),
        (((1.0,),), (1.5,), "ascend within"),
        ((), (), "ascend within"),
    ],
)
def test_a_table_that_can_not_be_is_refused(
    grid: tuple[tuple[float, ...], ...], compute: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SlowdownTable(
            hardware="here",
            entries={(SubStageKind.TRAIN, SubStageKind.TRAIN): grid},
            compute=compute,
            memory=(0.5,),
        )
