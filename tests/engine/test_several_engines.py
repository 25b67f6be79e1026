"""Two serving and two rollout engines in one slab pool: answers stay right, and three survive the fourth."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from probes import ROLLOUT_TOKENS, SERVING_TOKENS, WAVES, wave_prompts
from real_engine import Answer, RealEngine, runtime_dir, until
from references import ModelDirs, StockAnswers
from shared_gpu import HEADROOM_SLABS, NUM_SLABS, SETTINGS
from tiny_models import SLAB_BYTES

from rose.admission.board_snapshot import snapshot
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.types import Role, StopReason

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOL = "many"
ROLES = (Role.SERVING, Role.SERVING, Role.ROLLOUT, Role.ROLLOUT)
TOKENS = {Role.SERVING: SERVING_TOKENS, Role.ROLLOUT: ROLLOUT_TOKENS}


@pytest.fixture
def observer(engines_dir: Path) -> Iterator[PoolClient]:
    folder = runtime_dir(engines_dir)
    with (
        start_daemon(
            POOL,
            num_slabs=NUM_SLABS,
            slab_bytes=SLAB_BYTES,
            headroom_slabs=HEADROOM_SLABS,
            runtime_dir=folder,
        ),
        PoolClient.observe(POOL, runtime_dir=folder) as client,
    ):
        yield client


@pytest.fixture
def engines(observer: PoolClient, engines_dir: Path, models: ModelDirs) -> Iterator[list[RealEngine]]:
    checkpoints = {Role.SERVING: models.serving, Role.ROLLOUT: models.untied[0]}
    started = [
        RealEngine(checkpoints[role], role, engines_dir, "--dtype", "float32", pool=POOL, **SETTINGS)
        for role in ROLES
    ]
    try:
        yield [engine.wait_ready() for engine in started]
    finally:
        for engine in started:
            engine.stop()


def test_four_engines_answer_as_stock_vllm_and_three_go_on_when_one_is_killed(
    engines: list[RealEngine], observer: PoolClient, stock: StockAnswers
) -> None:
    for wave in range(WAVES):
        check_wave(engines, observer, wave, stock)
    seen = snapshot(observer.board_words)
    assert [side.num_steps > 0 for side in (*seen.servings, *seen.guests)] == [True] * 4
    assert (seen.num_evictions, seen.num_deaths) == (0, 0)
    observer.ledger.check_integrity()

    victim = engines.pop()
    (dead,) = {side.pid for side in seen.guests} - {pid_of_first_guest(engines, observer)}
    os.kill(dead, signal.SIGKILL)
    until(lambda: not victim.process.is_alive(), "the killed engine has ended")
    check_wave(engines, observer, 0, stock)
    victim.stop()


def pid_of_first_guest(engines: list[RealEngine], observer: PoolClient) -> int:
    """Finds which place on the board the rollout engine that is left has: only it steps now."""
    stepped: list[int] = []
    while len(stepped) != 1:  # a turn that is cut before its first step shows nothing
        before = snapshot(observer.board_words).guests
        engines[-1].complete(wave_prompts(Role.ROLLOUT, 0)[0], 4)
        after = snapshot(observer.board_words).guests
        stepped = [new.pid for old, new in zip(before, after, strict=True) if new.num_steps > old.num_steps]
    return stepped[0]


def check_wave(engines: list[RealEngine], observer: PoolClient, wave: int, stock: StockAnswers) -> None:
    """All engines at once. What was cut or stalled is right as far as it came, and whole when asked again in
    the next RL step: until then a cut budget stays as it is."""
    asked = [
        (engine, given, request)
        for engine in engines
        for given, request in zip(
            wave_prompts(engine.role, wave),
            engine.start_requests(wave_prompts(engine.role, wave), TOKENS[engine.role]),
            strict=True,
        )
    ]
    answers: list[Answer] = [request.result() for _, _, request in asked]
    ledger, rl_step = observer.ledger, observer.ledger.policy.rl_step + 1
    until(lambda: ledger.serving_reserve_slabs == 0, "serving's recent peak has passed")
    engines[-1].begin_rl_step(rl_step)
    until(lambda: ledger.policy.rl_step == rl_step, "the rollout engine began the RL step")
    for (engine, given, _), answer in zip(asked, answers, strict=True):
        expected = stock.of(str(engine.role))[tuple(given)]["tokens"]
        assert answer.tokens == expected[: len(answer.tokens)]
        while answer.finish_reason == "abort":
            assert engine.role is Role.ROLLOUT and answer.stop_reason in set(StopReason)
            answer = engine.complete(given, TOKENS[engine.role])
        assert answer.tokens == expected
