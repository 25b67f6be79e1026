"""Timetables under "starts at least this much later than": the shortest cycle, in whole ticks.

Owns the constraints of a periodic timetable and their solution: the smallest whole cycle time for which a
timetable exists, with every start as early as possible, or the proof that there is none. It knows no jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Precedence:
    """`after` starts at least `ticks` after `before`, less `passes` cycles. Upper bounds are negative."""

    before: int
    after: int
    ticks: int
    passes: int


class NoTimetable(Exception):
    """A loop of constraints that no cycle time satisfies."""


def shortest_cycle(
    num_steps: int, constraints: Sequence[Precedence], at_least: int = 0
) -> tuple[int, list[int]]:
    """Returns the least cycle time, not below `at_least`, that has a timetable, and its earliest starts.

    Newton's method from below: a loop that is positive at one cycle time needs a longer one, which it names.
    Raises: NoTimetable.
    """
    edges = [(each.before, each.after, each.ticks, each.passes) for each in constraints]
    cycle = at_least
    while True:
        starts, loop = _relax(num_steps, edges, cycle)
        if not loop:
            return cycle, starts
        ticks = sum(edges[index][2] for index in loop)
        passes = sum(edges[index][3] for index in loop)
        if passes <= 0:
            raise NoTimetable(f"{ticks} ticks in a loop over {passes} passes")
        cycle = -(-ticks // passes)


def _relax(
    num_steps: int, edges: Sequence[tuple[int, int, int, int]], cycle: int
) -> tuple[list[int], list[int]]:
    """Bellman-Ford for longest paths: the earliest starts, or a positive loop as the indices of its edges."""
    starts = [0] * num_steps
    reached_by = [-1] * num_steps
    weighted = [(before, after, ticks - passes * cycle) for before, after, ticks, passes in edges]
    for _ in range(num_steps + 1):
        last = -1
        for index, (before, after, weight) in enumerate(weighted):
            if starts[before] + weight > starts[after]:
                starts[after] = starts[before] + weight
                reached_by[after] = index
                last = after
        if last < 0:
            return starts, []
    for _ in range(num_steps):  # back from a step that still moves lies the loop that moves it
        last = edges[reached_by[last]][0]
    loop = [reached_by[last]]
    while edges[loop[-1]][0] != last:
        loop.append(reached_by[edges[loop[-1]][0]])
    return starts, loop
