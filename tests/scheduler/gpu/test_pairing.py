"""How two running pipelines come to share a device, and when they don't."""

import pytest
from played_pair import PlayedPair, Script, Truth

from rose.scheduler.gpu.live import ROLLOUT, TRAIN, StepCosts
from rose.scheduler.gpu.pairing import YIELD_S, Mode, Pairing
from rose.scheduler.gpu.slowdown import WHOLE, SlowdownTable
from rose.scheduler.gpu.substages import SubStageKind

COMPLEMENTARY: Truth = {
    (ROLLOUT, ROLLOUT): 1.05,
    (ROLLOUT, TRAIN): 1.1,
    (TRAIN, ROLLOUT): 1.6,
    (TRAIN, TRAIN): 1.95,
}
SATURATING: Truth = {(one, two): 2.1 for one in (ROLLOUT, TRAIN) for two in (ROLLOUT, TRAIN)}


def pair(*, is_serial: bool = False, table: SlowdownTable | None = None) -> Pairing:
    return Pairing(("a", "b"), "two cores", (0.5,), table=table, is_serial=is_serial)


def table_of(truth: Truth) -> SlowdownTable:
    kinds = (SubStageKind.ROLLOUT_SMALL, SubStageKind.TRAIN)
    entries = {(kinds[one], kinds[two]): ((slowdown,),) for (one, two), slowdown in truth.items()}
    return SlowdownTable(hardware="two cores", entries=entries, compute=(0.5,), memory=(0.5,))


def run_phase(pairing: Pairing, index: int, phase: int, step_s: float, now: float) -> float:
    """Runs eight steps of a phase that is allowed to begin at once; returns when it ends."""
    pairing.asks(index, phase, now)
    pairing.granted(index, now)
    assert pairing.shares[index] is not None
    for _ in range(8):
        now += step_s
        pairing.stepped(index, *((8, 8) if phase == ROLLOUT else (2048, 0)), step_s, pairing.epoch)
    pairing.released(index, now)
    return now


def serial_s() -> float:
    return PlayedPair(pair(is_serial=True), (Script(), Script()), SATURATING).run()


def test_complementary_pipelines_share_after_their_profile_and_gain() -> None:
    played = PlayedPair(pair(), (Script(), Script()), COMPLEMENTARY)
    elapsed_s = played.run()
    assert played.modes[:3] == [Mode.PROFILE, Mode.TRIAL, Mode.SHARED]
    assert played.pairing.gain is not None and played.pairing.gain > 1.3
    assert serial_s() / elapsed_s > 1.25, "the profile and the trials included"
    measured = played.pairing.table
    assert measured.entries[SubStageKind.TRAIN, SubStageKind.TRAIN][0][0] == pytest.approx(1.95, rel=0.02)
    assert measured.entries[SubStageKind.ROLLOUT_SMALL, SubStageKind.TRAIN][0][0] == pytest.approx(
        1.1, rel=0.02
    )


def test_pipelines_that_both_use_the_whole_device_run_one_after_the_other() -> None:
    played = PlayedPair(pair(), (Script(), Script()), SATURATING)
    elapsed_s = played.run()
    assert played.modes[:3] == [Mode.PROFILE, Mode.TRIAL, Mode.SERIAL]
    assert elapsed_s < serial_s() * 1.02, "only the trials cost something"


def test_serial_gives_each_pipeline_whole_iterations_in_turn() -> None:
    played = PlayedPair(pair(is_serial=True), (Script(num_iterations=3), Script(num_iterations=3)), {})
    played.run()
    ends = sorted((at_s, k) for k, script in enumerate(played.scripts) for at_s in script.ends_s)
    assert [k for _, k in ends] == [0, 1, 0, 1, 0, 1]
    assert played.modes == [Mode.SERIAL, Mode.ALONE]


def test_a_pipeline_that_reports_no_steps_runs_serially_and_is_named() -> None:
    played = PlayedPair(pair(), (Script(), Script(reports=False)), COMPLEMENTARY)
    played.run()
    assert played.modes == [Mode.PROFILE, Mode.SERIAL, Mode.ALONE]
    assert played.reasons[1].startswith("b reports no steps of its rollout")


@pytest.mark.parametrize(("phase", "name"), [(ROLLOUT, "train"), (TRAIN, "rollout")])
def test_a_pipeline_that_never_enters_a_phase_is_named_with_it(phase: int, name: str) -> None:
    pairing, now = pair(), 0.0
    for index in (0, 1, 0, 1):
        for each in (ROLLOUT, TRAIN) if index == 0 else (phase,):
            now = run_phase(pairing, index, each, 0.1, now)
        pairing.completed(index, now)
    assert (pairing.mode, pairing.why) == (Mode.SERIAL, f'b never enters {name} (@rose.phase("{name}"))')


def test_a_pipeline_that_never_pauses_makes_the_pair_serial() -> None:
    truth = {**COMPLEMENTARY, (TRAIN, TRAIN): 3.0}  # so that one of two trainings is told to pause
    scripts = (
        Script(rollout=(400, 0.1), train=(100, 0.5), num_iterations=9),
        Script(rollout=(400, 0.1), train=(2, 50.0), num_iterations=9, obeys=False),
    )
    played = PlayedPair(pair(), scripts, truth)
    played.run()
    assert f"b takes over {YIELD_S:.0f} s from one progress.step to the next" in played.reasons
    assert played.modes[-2:] == [Mode.SERIAL, Mode.ALONE]


def test_seconds_count_as_alone_only_once_the_other_pipeline_has_paused() -> None:
    """While b ends the step in which it was told to pause, a's training is slow."""
    pairing, now = pair(table=table_of({**COMPLEMENTARY, (TRAIN, TRAIN): 3.0})), 0.0
    for index in (0, 1, 0, 1):
        now = run_phase(pairing, index, ROLLOUT, 0.02, now)
        now = run_phase(pairing, index, TRAIN, 0.1, now)
        pairing.completed(index, now)
    assert pairing.mode is Mode.SHARED
    pairing.asks(0, ROLLOUT, now)
    pairing.granted(0, now)
    pairing.stepped(0, 8, 8, 0.02, pairing.epoch)
    now = run_phase(pairing, 1, ROLLOUT, 0.02, now)
    pairing.asks(1, TRAIN, now)
    pairing.granted(1, now)
    pairing.released(0, now)
    now = run_phase(pairing, 0, TRAIN, 0.3, now)
    pairing.completed(0, now)
    past = pairing.pipelines[0].past
    assert past is not None and past.phases[TRAIN].seconds == pytest.approx(0.8)


def test_a_smaller_microbatch_counts_with_its_part_of_the_seconds_of_one_alone() -> None:
    costs = StepCosts()
    costs.learn(SubStageKind.TRAIN, 2048, 0.1)
    costs.learn(SubStageKind.ROLLOUT_SMALL, 8, 0.02)
    assert costs.seconds(SubStageKind.TRAIN, 512) == pytest.approx(0.025)
    assert costs.seconds(SubStageKind.ROLLOUT_SMALL, 4) == 0.02, "a decode step costs its weights"
    assert costs.seconds(SubStageKind.ROLLOUT_LARGE, 4) is None


def test_when_a_pipeline_ends_the_other_one_has_the_whole_device() -> None:
    played = PlayedPair(pair(), (Script(num_iterations=6), Script(num_iterations=30)), COMPLEMENTARY)
    played.run()
    assert (played.pairing.mode, played.pairing.why) == (Mode.ALONE, "a has ended")
    assert played.pairing.together is not None and played.pairing.together[0] is Mode.SHARED
    assert played.scripts[1].num_done == 30
    last = played.pairing.decisions[-1]
    assert last.shares[0] is None


def test_a_given_table_needs_no_trials() -> None:
    played = PlayedPair(pair(table=table_of(COMPLEMENTARY)), (Script(), Script()), COMPLEMENTARY)
    played.run()
    assert played.modes[:2] == [Mode.PROFILE, Mode.SHARED]


def test_an_empty_table_keeps_them_serial() -> None:
    played = PlayedPair(pair(table=table_of({})), (Script(), Script()), COMPLEMENTARY)
    played.run()
    assert played.modes == [Mode.PROFILE, Mode.SERIAL, Mode.ALONE]


def test_sharing_that_turns_out_slower_than_serial_ends() -> None:
    """The table promises what this device does not keep."""
    promised = dict.fromkeys(SATURATING, 1.1)
    played = PlayedPair(pair(table=table_of(promised)), (Script(), Script()), SATURATING)
    elapsed_s = played.run()
    assert played.modes[:3] == [Mode.PROFILE, Mode.SHARED, Mode.SERIAL]
    assert elapsed_s < serial_s() * 1.05


def test_a_pipeline_that_never_begins_keeps_nobody_waiting() -> None:
    pairing = pair()
    for now in range(3):
        for phase in (ROLLOUT, TRAIN):
            pairing.asks(1, phase, float(now))
            assert pairing.shares == (None, WHOLE)
            pairing.granted(1, float(now))
            pairing.released(1, now + 0.5)
        pairing.completed(1, now + 0.9)
