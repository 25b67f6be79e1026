"""The ranks of a trainer whose weights are sharded (FSDP) are one guest of the board."""

import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from rose import ports
from rose.admission.board_snapshot import EngineState, snapshot
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.node.processes import ServerProcess

PROGRAM = Path(__file__).with_name("sharded_trainer.py")
MOST_S = 300.0


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1", "2"])
def test_two_ranks_with_sharded_weights_train_as_one_guest_what_they_train_alone(
    runtime_dir: Path, tmp_path: Path, version: str
) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    at = ["--master-addr", "127.0.0.1", "--master-port", str(ports.free_port())]
    argv = [sys.executable, *launcher, *at, str(PROGRAM), "gpu0", str(tmp_path), version]
    trainer = ServerProcess(argv, "trainer", tmp_path / "trainer.log", {"OMP_NUM_THREADS": "1"})
    with (
        start_daemon("gpu0", num_slabs=4, slab_bytes=1 << 20, headroom_slabs=1),
        PoolClient.observe("gpu0") as observer,
    ):
        trainer.start()
        try:
            until_s = time.monotonic() + MOST_S
            while trainer.is_alive():
                assert time.monotonic() < until_s, trainer.log_tail()
                time.sleep(0.05)
        finally:
            trainer.stop()
        board = snapshot(observer.board_words)
    assert trainer.exit_status == 0, trainer.log_tail()
    leader, follower = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert leader["is_same"] and follower["is_same"]
    assert leader["grants"] > 3 and follower["grants"] == 0 and follower["computed_s"] > 0
    if version == "2":  # whole weights that FSDP2 gathers are not taken for activations
        assert leader["token_bytes"] == leader["token_bytes_of_whole"]
    assert len(board.guests) == 1 and board.rollout.num_steps == leader["grants"]
    assert board.rollout.state is EngineState.DETACHED
