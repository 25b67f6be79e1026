"""How long a part may leave a question without an answer. No Ray cluster runs."""

from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")

from rose.jobs.on_ray import parts  # noqa: E402 - loads Ray
from rose.jobs.on_ray.parts import Hung, PartRef, ask  # noqa: E402


class Clock:
    """Time passes only while a part is waited for: as long as was said, or `stall_s` in the first wait."""

    def __init__(self, stall_s: float, num_silent: int) -> None:
        self.now_s, self._stall_s, self._num_silent = 0.0, stall_s, num_silent

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.now_s += max(timeout, self._stall_s)
        self._stall_s = 0.0
        self._num_silent -= 1
        return (asked, []) if self._num_silent < 0 else ([], asked)


@pytest.mark.parametrize(
    ("stall_s", "num_silent", "is_hung"), [(0.0, 2, False), (0.0, 99, True), (500.0, 1, False)]
)
def test_a_part_has_hung_after_its_time_unless_it_was_its_scheduler_that_stood_still(
    monkeypatch: pytest.MonkeyPatch, stall_s: float, num_silent: int, is_hung: bool
) -> None:
    clock = Clock(stall_s, num_silent)
    monkeypatch.setattr(parts, "time", clock)
    monkeypatch.setattr(ray, "wait", clock.wait)
    monkeypatch.setattr(ray, "get", lambda answers: answers)
    part = PartRef(node="train-0", ray_node="12345678", actor=None)
    try:
        assert ask([(part, "answer")], "to start", 10.0, look=lambda: None, say=lambda _: None) == ["answer"]
    except Hung as error:
        assert "train-0 on Ray node 12345678: no answer for 10 s when asked to start" in str(error)
        assert clock.now_s == 10.0
    assert part.is_hung is is_hung
