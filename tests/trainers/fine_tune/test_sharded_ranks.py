"""The ranks of a trainer whose weights are sharded (FSDP) are one guest of the board."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from rose.admission.board_snapshot import EngineState, snapshot
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from tests.trainers.fine_tune.test_ranks import ranks, wait_ended

PROGRAM = "tests.trainers.fine_tune.sharded_trainer"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1", "2"])
def test_two_ranks_with_sharded_weights_train_as_one_guest_what_they_train_alone(
    runtime_dir: Path, tmp_path: Path, version: str
) -> None:
    with (
        start_daemon("gpu0", num_slabs=4, slab_bytes=1 << 20, headroom_slabs=1),
        PoolClient.observe("gpu0") as observer,
        ranks(version, folder=tmp_path, program=PROGRAM) as started,
    ):
        for process in started:
            wait_ended(process)
        board = snapshot(observer.board_words)
        logs = "\n".join(process.log_tail() for process in started)
        assert [process.exit_status for process in started] == [0, 0], logs
    leader, follower = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert leader["is_same"] and follower["is_same"]
    assert leader["grants"] > 3 and follower["grants"] == 0 and follower["computed_s"] > 0
    if version == "2":  # whole weights that FSDP2 gathers are not taken for activations
        assert leader["token_bytes"] == leader["token_bytes_of_whole"]
    assert len(board.guests) == 1 and board.rollout.num_steps == leader["grants"]
    assert board.rollout.state is EngineState.DETACHED
