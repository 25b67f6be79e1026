"""A mixture of experts serves with two data-parallel ranks, which compute every step together, each in a pool
that it shares with rollouts. A rank has a part of each expert, or half of the experts."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import engine_runs
import pytest
from forked_engines import Fork
from probes import ROLLOUT_TOKENS, prompt, wave_prompts
from real_engine import RealEngine, new_folder, runtime_dir, until
from references import ModelDirs, StockAnswers
from shared_gpu import HEADROOM_SLABS, NUM_SLABS, SETTINGS, BoardLog
from tiny_models import SLAB_BYTES, make_moe_model

from rose._shm import Words
from rose.admission.board import BoardWord
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.types import GateMode, Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOLS = ("experts", "experts-1")
PROMPTS = [prompt(f"experts-{index}", 60 + 40 * index) for index in range(3)]
TOKENS = 24
MAX_ROUNDS = 10


class Experts:
    """The pools of two ranks, the engine that serves on both, and the rollout engine beside it."""

    def __init__(self, folder: Path, models: ModelDirs, *serving_flags: str) -> None:
        self._undo = ExitStack()
        self.folder = folder
        self.model = make_moe_model(folder / "model")
        runtime = runtime_dir(folder)
        try:
            for name in POOLS:
                daemon = start_daemon(
                    name,
                    num_slabs=NUM_SLABS,
                    slab_bytes=SLAB_BYTES,
                    headroom_slabs=HEADROOM_SLABS,
                    runtime_dir=runtime,
                )
                self._undo.callback(daemon.stop)
            self.pools = [
                self._undo.enter_context(PoolClient.observe(name, runtime_dir=runtime)) for name in POOLS
            ]
            given = {**SETTINGS, "pool": POOLS[0], "stall_s": 60.0, "gate": GateMode.IDLE}
            flags = ("--dtype", "float32", "--data-parallel-size", str(len(POOLS)))
            more = {Role.SERVING: serving_flags, Role.ROLLOUT: ()}
            paths = {Role.SERVING: self.model, Role.ROLLOUT: models.untied[0]}
            self.engines = {
                role: RealEngine(
                    path, role, folder, *flags, *more[role], **given, engine_id=f"experts-{role}"
                )
                for role, path in paths.items()
            }
            for engine in self.engines.values():
                self._undo.callback(engine.stop)
            for engine in self.engines.values():
                engine.wait_ready()
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        self._undo.close()


def is_unclaimed(words: Words) -> bool:
    return words.load(BoardWord.S_STARTED) == 0


@pytest.fixture(scope="module", params=[(), ("--enable-expert-parallel",)], ids=["data", "experts"])
def experts(engines_dir: Path, models: ModelDirs, request: pytest.FixtureRequest) -> Iterator[Experts]:
    made = Experts(new_folder(engines_dir, "experts"), models, *request.param)
    yield made
    made.close()


def test_ranks_in_lockstep_claim_their_gpus_for_each_others_steps_and_give_them_back_when_all_are_idle(
    experts: Experts, stock: StockAnswers
) -> None:
    """One rank has a single request, so that the other one computes dummy batches."""
    serving, rollout = experts.engines[Role.SERVING], experts.engines[Role.ROLLOUT]
    reference = Fork(
        experts.folder,
        engine_runs.stock_answers,
        model=experts.model,
        prompts=PROMPTS,
        max_tokens=TOKENS,
    )
    try:
        expected = reference.result()
    finally:
        reference.stop()
    rollouts = wave_prompts(Role.ROLLOUT, 0)
    with ExitStack() as logging:
        logs = [logging.enter_context(BoardLog(pool.board_words)) for pool in experts.pools]
        for _ in range(MAX_ROUNDS):
            asked = rollout.start_requests(rollouts, ROLLOUT_TOKENS)
            answers = [serving.complete(given, TOKENS) for given in PROMPTS]
            assert [answer.tokens for answer in answers] == expected
            for given, request in zip(rollouts, asked, strict=True):
                tokens = stock.of("rollout")[tuple(given)]["tokens"]
                assert request.result().tokens == tokens[: len(request.result().tokens)]
            if all(log.has_grown(BoardWord.R_STEPS) for log in logs):
                break
    for log, pool in zip(logs, experts.pools, strict=True):
        words = pool.board_words
        assert log.has_grown(BoardWord.R_STEPS), "rollouts step while no rank serves"
        assert log.num_overlaps == 0 or log.has_grown(BoardWord.S_OVERRUNS)
        assert words.load(BoardWord.S_BUSY) > 0, "a rank without requests claims its GPU too"
        until(partial(is_unclaimed, words), "the claim ends with the wave")
        pool.ledger.check_integrity()


def test_a_gate_that_lends_time_between_steps_is_refused_while_ranks_compute_together(
    experts: Experts,
) -> None:
    response = experts.engines[Role.SERVING].post("gate", {"mode": "dual"})
    assert response.status_code == 422 and "use gate idle" in response.text
