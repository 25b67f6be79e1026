"""Two running pipelines of which one or both have their rollouts on several engines."""

import math

import pytest
from played_pair import PlayedPair, Script, Truth

from rose.scheduler.gpu.live import ROLLOUT, TRAIN
from rose.scheduler.gpu.merge import MAX_MERGED
from rose.scheduler.gpu.pairing import Mode, Pairing, RolloutReport
from rose.scheduler.gpu.slowdown import WHOLE, Share, SlowdownTable
from rose.scheduler.gpu.substages import Steps, SubStageKind

TRUTH: Truth = {(ROLLOUT, ROLLOUT): 1.0, (ROLLOUT, TRAIN): 1.0, (TRAIN, ROLLOUT): 2.0, (TRAIN, TRAIN): 2.2}
"""A training on half of the cores takes twice as long, and everything else as long as alone."""
TAILED = ((10, 12, 14, 200), (10, 12, 14, 160))
"""One long response on each engine."""
TABLE = SlowdownTable(
    hardware="two cores",
    entries={
        (one, two): ((2.2,),)
        for one in (SubStageKind.ROLLOUT_SMALL, SubStageKind.TRAIN)
        for two in (SubStageKind.ROLLOUT_SMALL, SubStageKind.TRAIN)
    },
    compute=(0.5,),
    memory=(0.5,),
)
"""Nothing may be shared by it, so that merging alone can gain."""


def pair(
    num_workers: tuple[int, int] = (2, 1), *, table: SlowdownTable | None = TABLE, is_serial: bool = False
) -> Pairing:
    names = ("a", "b")
    return Pairing(names, "two cores", (0.5,), num_workers=num_workers, table=table, is_serial=is_serial)


def scripts(*, both: bool = False) -> tuple[Script, Script]:
    one = Script(engines=TAILED, train=(8, 0.1))
    return one, Script(engines=TAILED, train=(8, 0.4)) if both else Script(rollout=(100, 0.02))


def test_the_other_pipeline_computes_on_the_freed_workers_while_the_tail_runs() -> None:
    played = PlayedPair(pair(), scripts(), TRUTH)
    elapsed_s = played.run()
    assert played.modes[:2] == [Mode.PROFILE, Mode.SHARED]
    assert played.pairing.num_merges > 10
    [note, *_] = [each.note for each in played.pairing.decisions if each.note]
    assert note.startswith("the tail of a continues on worker 0 alone: saves ")
    serial = PlayedPair(pair(is_serial=True), scripts(), TRUTH)
    serial_s = serial.run()
    assert serial.pairing.num_merges == 0
    assert serial_s / elapsed_s > 1.15, "the profile included"
    assert played.pairing.gain is not None and played.pairing.gain > 1.2
    assert played.pairing.plan is not None and played.pairing.plan.gain > 1.1


def test_of_two_rollouts_on_engines_one_runs_and_trainings_go_on_behind_merges() -> None:
    played = PlayedPair(pair((2, 2)), scripts(both=True), TRUTH)
    elapsed_s = played.run()
    assert played.modes[:2] == [Mode.PROFILE, Mode.SHARED]
    assert played.pairing.num_merges > 5
    assert PlayedPair(pair((2, 2), is_serial=True), scripts(both=True), TRUTH).run() / elapsed_s > 1.05


def test_more_responses_than_the_small_bucket_holds_are_not_merged() -> None:
    even = (50,) * (MAX_MERGED // 2)
    played = PlayedPair(pair((2, 2)), (Script(engines=(even, even)), Script(engines=(even, even))), TRUTH)
    played.run()
    assert played.pairing.num_merges == 0
    assert played.modes[:2] == [Mode.PROFILE, Mode.SERIAL]


@pytest.mark.parametrize("growth", [1.05, 0.95])
def test_the_graph_follows_lengths_that_change_though_every_rollout_could_merge(growth: float) -> None:
    grows = Script(engines=TAILED, train=(8, 0.1), growth=growth)
    other = Script(rollout=(100, 0.02), num_iterations=60)
    played = PlayedPair(pair(), (grows, other), TRUTH)
    played.run()
    assert Mode.SERIAL not in played.modes, played.reasons
    assert played.pairing.num_merges > 10
    past = played.pairing.pipelines[0].past
    assert past is not None
    longest_s = max(map(max, grows.engines)) * grows.rollout[1]
    assert past.phases[0].seconds == pytest.approx(longest_s, rel=0.4), "it is some iterations old"


def test_steps_beside_a_merged_tail_say_nothing_of_a_split_device() -> None:
    played = PlayedPair(pair(table=None), scripts(), TRUTH)
    played.run()
    assert played.pairing.num_merges > 5
    small = SubStageKind.ROLLOUT_SMALL
    assert (SubStageKind.TRAIN, SubStageKind.TRAIN) in played.pairing.table.entries
    assert (small, small) not in played.pairing.table.entries, "they met behind merges alone"


class Rollout:
    """A planned pair in which pipeline a is in a rollout on engines, and b waits. ``lengths``: of a's
    responses, as it has told them."""

    def __init__(self, lengths: tuple[int, ...] = (10, 10, 200, 200)) -> None:
        self.pairing, self._lengths = pair(), lengths
        self.now = 0.0
        for index in (0, 1, 0, 1):
            self._iteration(index)
        assert self.pairing.mode is Mode.SHARED
        self.pairing.asks(0, ROLLOUT, self.now)
        self.pairing.granted(0, self.now)
        self.pairing.asks(1, ROLLOUT, self.now)
        assert self.pairing.shares == (WHOLE, None)

    def shares(self) -> tuple[Share | None, Share | None]:
        return self.pairing.shares

    def _iteration(self, index: int) -> None:
        for phase in (ROLLOUT, TRAIN):
            self.pairing.asks(index, phase, self.now)
            self.pairing.granted(index, self.now)
            if (index, phase) == (0, ROLLOUT):
                self.report(200, (0, 0), seconds=4.0, lengths=self._lengths)
            for _ in range(50):
                tokens = (4, 4) if phase == ROLLOUT else (512, 0)
                self.pairing.stepped(index, *tokens, 0.05, self.pairing.epoch)
            self.now += 4.0
            self.pairing.released(index, self.now)
        self.pairing.completed(index, self.now)

    def report(
        self,
        num_tokens: int,
        num_running: tuple[int, ...],
        *,
        seconds: float = 0.0,
        lengths: tuple[int, ...] = (),
        num_samples: int = 4,
        num_done: int | None = None,
    ) -> int | None:
        """Returns the worker on which a is told to go on."""
        steps = [Steps(tokens=2, num_running=2, seconds=seconds / 200, count=200)] if seconds else []
        report = RolloutReport(
            logs=[steps, steps],
            num_running=num_running,
            num_samples=num_samples,
            num_done=num_done if num_done is not None else num_samples - sum(num_running),
            num_tokens=num_tokens,
            lengths=lengths,
        )
        return self.pairing.reported(0, report)


def test_cores_change_hands_once_the_tail_has_moved_and_again_when_it_ends() -> None:
    at = Rollout()
    target = at.report(20, (1, 1))
    assert target is not None
    assert at.report(22, (1, 1)) == target, "a report whose answer was lost is made good by the next one"
    assert at.shares() == (WHOLE, None), "not yet"
    assert at.pairing.moved(0, [target], at.now) is None
    assert at.shares() == (Share(compute=0.5), Share(compute=0.5, memory=0.5))
    assert at.pairing.merged == (0, target)
    assert at.report(30, (2, 0)) is None, "it has moved"
    at.pairing.granted(1, at.now)
    at.pairing.released(0, at.now + 4)
    assert at.shares() == (None, WHOLE)


@pytest.mark.parametrize("workers", [[], [0, 1], [7]])
def test_a_move_that_was_not_decided_is_refused(workers: list[int]) -> None:
    at = Rollout()
    refusal = at.pairing.moved(0, [0], at.now)
    assert refusal is not None and refusal.startswith(
        "a was not told that its rollout should continue on worker"
    )
    at.report(20, (1, 1))
    assert at.pairing.moved(0, workers, at.now) is not None
    assert at.pairing.merged is None


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_job_that_dies_in_its_tail_leaves_the_whole_device(has_moved: bool) -> None:
    at = Rollout()
    target = at.report(20, (1, 1))
    assert target is not None
    if has_moved:
        at.pairing.moved(0, [target], at.now)
    at.pairing.ended(0, at.now)
    assert (at.pairing.mode, at.pairing.merged, at.shares()) == (Mode.ALONE, None, (None, WHOLE))
    assert at.pairing.moved(0, [target], at.now) is not None


def test_a_tail_keeps_the_device_when_the_other_pipeline_dies_or_has_no_work() -> None:
    at = Rollout()
    target = at.report(20, (1, 1))
    assert target is not None and at.pairing.moved(0, [target], at.now) is None
    halves = at.shares()
    assert None not in halves
    at.pairing.granted(1, at.now)
    at.pairing.released(1, at.now)
    assert at.shares() == (WHOLE, None), "it is between two phases"
    at.pairing.asks(1, TRAIN, at.now)
    assert at.shares() == halves
    at.pairing.ended(1, at.now)
    assert at.shares() == (WHOLE, None)


@pytest.mark.parametrize(("num_samples", "num_done"), [(1000, 0), (4, 1)])
def test_nothing_moves_while_a_response_is_in_no_engine(num_samples: int, num_done: int) -> None:
    """It is still to be sent, or waits for a tool."""
    at = Rollout()
    assert at.report(20, (1, 1), num_samples=num_samples, num_done=num_done) is None
    assert at.report(20, (1, 1)) is not None


def test_nothing_moves_before_a_rollout_has_told_its_lengths() -> None:
    assert Rollout(lengths=()).report(20, (1, 1)) is None


def test_a_rollout_that_is_over_can_no_longer_move() -> None:
    at = Rollout()
    target = at.report(20, (1, 1))
    assert target is not None
    at.pairing.released(0, at.now)
    assert at.pairing.moved(0, [target], at.now) is not None


def test_a_pipeline_that_asks_for_its_next_phase_has_no_merged_tail() -> None:
    at = Rollout()
    target = at.report(20, (1, 1))
    assert target is not None and at.pairing.moved(0, [target], at.now) is None
    at.pairing.asks(0, TRAIN, at.now)
    assert at.pairing.merged is None


def test_a_rollout_that_must_not_move_is_not_told_to() -> None:
    at = Rollout()
    steps = RolloutReport(logs=[[], []], num_running=(1, 1), num_samples=4, num_done=2)
    assert at.pairing.reported(0, steps) is None


def test_what_merging_is_worth_is_reckoned_with_the_lengths_of_the_last_iteration() -> None:
    at = Rollout()
    tails = at.pairing.pipelines[0].tails((1, 2), reached=20, num_samples=4)
    assert [tail.left for tail in tails] == [(180,), (180, 180)]
    assert [tail.tokens for tail in tails] == [20, 40]
    assert all(math.isinf(tail.beside_slowdown) for tail in tails)
