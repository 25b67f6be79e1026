"""What benchmarks of a fleet say of GPUs that change hands."""

from collections.abc import Sequence
from itertools import pairwise

from rose.measure.figures import Figure


def switch_figure(name: str, spans: Sequence[tuple[float, float]]) -> Figure:
    """Returns how long the longest change of hands took.

    ``spans``: the begin and the end of each burst of turns, in seconds; the jobs' bursts follow each other.
    """
    waits = [after[0] - before[1] for before, after in pairwise(spans)]
    return Figure(
        name=name,
        value=max(waits),
        unit="s",
        target="<= 1",
        peers={"switches": float(len(waits))},
        spread=(min(waits), max(waits)),
    )
