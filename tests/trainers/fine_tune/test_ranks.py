"""The processes of a data-parallel trainer are one guest of the board."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from forked_server import ForkedServer

pytest.importorskip("transformers", reason="transformers is not installed")

from rose import ports
from rose.admission.board_snapshot import EngineState, snapshot
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.node.processes import ServerProcess

pytestmark = pytest.mark.slow

PROGRAM = "tests.trainers.fine_tune.ranked_trainer"
MOST_S = 300.0


@contextmanager
def ranks(*flags: str, folder: Path, program: str = PROGRAM) -> Iterator[list[ServerProcess]]:
    """Both ranks of a program, with the environment that torchrun gives them."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free_port())}
    size = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", program, "gpu0", str(folder), *flags]
    with ExitStack() as stack:
        started: list[ServerProcess] = []
        for rank in range(2):
            environment = {**address, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = ServerProcess(argv, f"rank{rank}", folder / f"rank{rank}.log", environment)
            started.append(stack.enter_context(ForkedServer(process)))
        yield started


def wait_ended(process: ServerProcess) -> None:
    until_s = time.monotonic() + MOST_S
    while process.is_alive():
        assert time.monotonic() < until_s, process.log_tail()
        time.sleep(0.05)


def test_two_ranks_train_as_one_guest_what_they_train_alone(runtime_dir: Path, tmp_path: Path) -> None:
    with (
        start_daemon("gpu0", num_slabs=4, slab_bytes=1 << 20, headroom_slabs=1),
        PoolClient.observe("gpu0") as observer,
        ranks(folder=tmp_path) as started,
    ):
        for process in started:
            wait_ended(process)
        board = snapshot(observer.board_words)
        logs = "\n".join(process.log_tail() for process in started)
        assert [process.exit_status for process in started] == [0, 0], logs
    leader, follower = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert leader["is_same"] and follower["is_same"]
    assert leader["grants"] > 3 and follower["grants"] == 0 and follower["computed_s"] > 0
    assert len(board.guests) == 1 and board.rollout.num_steps == leader["grants"]
    assert board.rollout.state is EngineState.DETACHED


@pytest.mark.parametrize(("number", "late_s"), [(signal.SIGKILL, 600), (signal.SIGSTOP, 20)])
def test_a_rank_that_dies_or_hangs_ends_the_trainer_with_one_line_and_frees_the_gpu(
    runtime_dir: Path, tmp_path: Path, number: signal.Signals, late_s: int
) -> None:
    with (
        start_daemon("gpu0", num_slabs=4, slab_bytes=1 << 20, headroom_slabs=1),
        PoolClient.observe("gpu0") as observer,
        ranks("1000000", f"{late_s}", folder=tmp_path) as (leader, follower),
    ):
        until_s = time.monotonic() + MOST_S
        while snapshot(observer.board_words).rollout.num_steps < 3:
            assert leader.is_alive() and time.monotonic() < until_s, leader.log_tail()
            time.sleep(0.05)
        follower.send_signal(number)
        wait_ended(leader)
        assert leader.exit_status == 1, leader.log_tail()
        if number == signal.SIGKILL:
            assert "another process of the trainer has gone or hangs" in leader.log_tail()
        assert not snapshot(observer.board_words).rollout.alive
        follower.send_signal(signal.SIGKILL)  # one that is stopped would be waited for
