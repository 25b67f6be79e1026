"""Which slabs may be unmapped: those that no step in flight may still use.

Steps have numbers in the order of their scheduling, and end in that order. A slab that is given back while
steps are in flight is held until the youngest of them has ended. Steps that are scheduled later do not know
its blocks. Owns the slabs that are held; never waits for a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StepFence:
    """The steps of one engine core, and the (position, slab) pairs that it gave back."""

    def __init__(self) -> None:
        self._num_begun = self._num_ended = 0
        self._held: deque[tuple[int, Sequence[tuple[int, int]]]] = deque()
        """What was given back, and the number of steps that have to end first."""

    def begin(self) -> None:
        """A step has been scheduled, or a pass without tokens."""
        self._num_begun += 1

    def end(self) -> None:
        """The output of the oldest step in flight is there."""
        self._num_ended += 1
        assert self._num_ended <= self._num_begun, "a step ended that never began"

    def hold(self, slabs: Sequence[tuple[int, int]]) -> None:
        """Holds slabs until all steps that are in flight now have ended."""
        if slabs:
            self._held.append((self._num_begun, slabs))

    @property
    def has_passed(self) -> bool:
        """Whether some of them may be unmapped now."""
        return bool(self._held) and self._held[0][0] <= self._num_ended

    def take_passed(self) -> list[tuple[int, int]]:
        """Returns those that may be unmapped now, and forgets them."""
        passed: list[tuple[int, int]] = []
        while self.has_passed:
            passed += self._held.popleft()[1]
        return passed
