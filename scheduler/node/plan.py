"""A node's planned execution: when a new task would start and end on each stage, and how idle that leaves it.

Owns one node's planned paths. Promises that looking changes nothing. Never chooses a node.

Source: LeMix §IV-B, Algorithm 1 (ComputeIdleness), corrected: its temporary queue puts tasks back at its
end and so breaks their order; here each stage walks its planned guests in the order of their starts.
"""

import math
from bisect import insort
from collections.abc import Sequence

_SCALE_WEIGHT = 0.05
"""How fast the measured over the predicted seconds are believed: twenty passes."""


class NodePlan:
    """The stages' forward passes, and beside them the guests: training passes that are planned in the gaps.

    `give_way_s`: a guest that runs when a forward pass is due stops within this time, as training is split by
    groups of layers. Infinite: the forward waits for the guest's end, a far dependency, as in the paper.
    """

    __slots__ = (
        "_guests",
        "_measured_s",
        "_moved_s",
        "_planned",
        "_predicted_s",
        "ends",
        "extra_s",
        "give_way_s",
        "scale",
    )

    def __init__(self, num_stages: int, give_way_s: float = math.inf) -> None:
        self.give_way_s = give_way_s
        self.ends = [0.0] * num_stages
        """The last planned forward pass's end on each stage."""
        self.extra_s = [0.0] * num_stages
        """What each pass takes longer by, for the sequences that are being decoded in the same passes."""
        self.scale = 1.0
        """Measured over predicted seconds of this node's passes."""
        self._measured_s = self._predicted_s = 0.0
        self._moved_s = [0.0] * num_stages
        """Calibration has moved each stage's plans by this much; `_planned` keeps ends without it."""
        self._planned: list[dict[int, float]] = [{} for _ in range(num_stages)]
        self._guests: list[list[tuple[float, float, int]]] = [[] for _ in range(num_stages)]
        """Start, end and task of planned training passes, in order."""

    def look(self, now: float, forwards: Sequence[float]) -> tuple[float, float]:
        """Idle seconds that a forward pass would leave on all stages together, and its response time.

        `forwards`: seconds on each stage by the profile.
        """
        idle_s, done_s = 0.0, now
        for stage, cost_s in enumerate(forwards):
            start_s, gap_s = self._start(stage, done_s, cost_s * self.scale)
            idle_s += gap_s
            done_s = start_s + cost_s * self.scale + self.extra_s[stage]
        return idle_s, done_s - now

    def add(self, number: int, now: float, forwards: Sequence[float]) -> float:
        """Plans a task's forward passes; returns the end of the last one."""
        done_s = now
        for stage, cost_s in enumerate(forwards):
            start_s, _ = self._start(stage, done_s, cost_s * self.scale)
            done_s = start_s + cost_s * self.scale + self.extra_s[stage]
            self.ends[stage] = done_s
            self._planned[stage][number] = done_s - self._moved_s[stage]
        return done_s

    def add_guest(
        self, number: int, now: float, forwards: Sequence[float], backwards: Sequence[float]
    ) -> float:
        """Plans a training task that gives way: all its passes are guests. Returns the last one's end."""
        done_s = now
        for stage, cost_s in enumerate(forwards):
            done_s = self._host(number, stage, done_s, cost_s)
        return self.add_backwards(number, done_s, backwards)

    def add_backwards(self, number: int, now: float, backwards: Sequence[float]) -> float:
        """Plans backward passes, from the last stage to the first, each behind the guests that are there."""
        done_s = now
        for stage in reversed(range(len(backwards))):
            done_s = self._host(number, stage, done_s, backwards[stage])
        return done_s

    def calibrate(self, number: int, stage: int, now: float) -> None:
        """A task's forward pass has ended on a stage: later plans there move by the difference.

        Source: LeMix §IV-D, Algorithm 2, line 14.
        """
        planned = self._planned[stage]
        unmoved_s = planned.pop(number, None)
        if unmoved_s is None:
            self._drop_guest(number, stage)
            return
        late_s = now - unmoved_s - self._moved_s[stage]
        self._moved_s[stage] += late_s
        self.ends[stage] = max(now, self.ends[stage] + late_s) if planned else now

    def calibrate_backward(self, number: int, stage: int) -> None:
        """A task's backward pass has ended on a stage (Algorithm 2, line 17)."""
        self._drop_guest(number, stage)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """A pass took `measured_s`: from now on this node's costs are scaled by what passes have shown."""
        if not self._predicted_s:
            self._predicted_s, self._measured_s = predicted_s, predicted_s
        keep = 1.0 - _SCALE_WEIGHT
        self._predicted_s = keep * self._predicted_s + _SCALE_WEIGHT * predicted_s
        self._measured_s = keep * self._measured_s + _SCALE_WEIGHT * measured_s
        self.scale = self._measured_s / self._predicted_s

    def _start(self, stage: int, ready_s: float, cost_s: float) -> tuple[float, float]:
        """When a forward pass can start, and for how long the stage then had nothing to do before it."""
        previous_s = self.ends[stage]
        start_s = ready_s if ready_s > previous_s else previous_s
        busy_s = 0.0
        for guest_start_s, guest_end_s, _ in self._guests[stage]:
            gives_way = guest_start_s >= start_s and self.give_way_s < math.inf
            if gives_way or start_s + cost_s <= guest_start_s:
                break
            if guest_end_s > start_s:
                start_s = min(guest_end_s, start_s + self.give_way_s)
            if guest_end_s > previous_s:
                busy_s += min(guest_end_s, start_s) - max(guest_start_s, previous_s)
            if guest_end_s > start_s:
                break  # this guest and those behind it go on after the pass
        return start_s, max(0.0, start_s - previous_s - busy_s)

    def _host(self, number: int, stage: int, ready_s: float, cost_s: float) -> float:
        guests = self._guests[stage]
        behind_s = guests[-1][1] if guests else 0.0
        start_s = max(ready_s, self.ends[stage], behind_s)
        end_s = start_s + cost_s * self.scale
        insort(guests, (start_s, end_s, number))
        return end_s

    def _drop_guest(self, number: int, stage: int) -> None:
        guests = self._guests[stage]
        for index, (_, _, other) in enumerate(guests):
            if other == number:
                del guests[index]
                return
