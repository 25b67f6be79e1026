"""Engines whose ranks are the stages of a pipeline: a step in each, and stages of different sizes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import async_runs
import engine_runs
import pytest
from forked_engines import Fork, forks
from preloaded import FORKS
from probes import NUM_VERSIONS, probes, prompt
from real_engine import new_folder, runtime_dir
from references import ModelDirs, StockAnswers
from test_data_parallel import Replicas, answer_as_stock, on_each_rank
from test_models_in_slabs import HEADROOM_SLABS, NUM_SLABS, assert_greedy
from tiny_models import SLAB_BYTES, make_parallel_model, make_window_model
from weight_probes import update

from rose.memory.daemon.daemon import start_daemon
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(f"staged-{index}", 60 + 30 * index) for index in range(8)]
TOKENS = 40
NUM_ROUNDS = 3
NUM_RANKS = 2
LAYERS = "1,3"
"""Of the stages. vLLM gives the scheduler the first one's configuration, which is the smaller one."""

Run = Callable[..., Fork]


@pytest.fixture(scope="module")
def run(engines_dir: Path) -> Iterator[Run]:
    with forks(engines_dir / "staged", max_tokens=TOKENS) as start:
        yield start


@pytest.fixture
def pool(run: Run, engines_dir: Path) -> Iterator[str]:
    with start_daemon(
        "staged",
        num_slabs=NUM_SLABS,
        num_shards=NUM_RANKS,
        slab_bytes=SLAB_BYTES // NUM_RANKS,
        headroom_slabs=HEADROOM_SLABS,
        runtime_dir=runtime_dir(engines_dir / "staged"),
    ):
        yield "staged"


@pytest.fixture(scope="module")
def expected(run: Run, models: ModelDirs) -> list[list[int]]:
    stock = run(engine_runs.stock_answers, model=models.untied[0], prompts=PROMPTS)
    answers: list[list[int]] = stock.result()
    return answers


def test_answers_are_stocks_while_slabs_leave_with_a_step_in_each_stage(
    run: Run, pool: str, models: ModelDirs, expected: list[list[int]]
) -> None:
    arguments = {"model": models.untied[0], "pool": pool, "prompts": PROMPTS, "num_rounds": NUM_ROUNDS}
    stages = {"pipeline_parallel_size": NUM_RANKS, "layers": LAYERS}
    late = run(async_runs.answer_over_cuts_on_ranks, **arguments, **stages).result()
    assert late.most_in_flight == NUM_RANKS
    assert_greedy(late.moves, expected)


@pytest.mark.parametrize(("make", "layers"), [(make_window_model, "2,4"), (make_parallel_model, "1,1")])
def test_stages_with_layers_of_several_cache_groups_answer_as_stock(
    run: Run, pool: str, engines_dir: Path, make: Callable[[Path], Path], layers: str
) -> None:
    """Sliding windows, and Mamba2's states beside attention."""
    model = make(engines_dir / "staged" / make.__name__)
    stock = run(engine_runs.stock_answers, model=model, prompts=PROMPTS)
    arguments = {"model": model, "pool": pool, "prompts": PROMPTS, "num_rounds": NUM_ROUNDS}
    stages = {"pipeline_parallel_size": NUM_RANKS, "layers": layers}
    late = run(async_runs.answer_over_cuts_on_ranks, **arguments, **stages).result()
    assert_greedy(late.moves, stock.result())


def test_serving_empties_its_pipeline_to_offer_a_grant_and_keeps_its_claim_until_then(
    run: Run, pool: str, models: ModelDirs, expected: list[list[int]]
) -> None:
    stages = {"pipeline_parallel_size": NUM_RANKS, "layers": LAYERS}
    arguments = {"model": models.untied[0], "pool": pool, "prompts": PROMPTS}
    turns = run(async_runs.offer_turns_of_ranks, **arguments, **stages).result()
    assert [reply.tokens for reply in turns.replies] == expected
    assert turns.alone_in_flight == NUM_RANKS
    assert turns.num_overlaps == 0
    assert turns.num_rollout_steps > turns.num_serving_steps / 2


def test_a_pipeline_serves_beside_tensor_parallel_rollouts(
    run: Run, pool: str, models: ModelDirs, expected: list[list[int]]
) -> None:
    events = {name: FORKS.Event() for name in ("burst", "stop")}
    served = [prompt(f"served-{index}", 250 + 20 * index) for index in range(6)]
    serving = {"model": models.serving, "prompts": served}
    bursts = run(
        async_runs.serve_bursts_in_stages,
        **serving,
        layers="2,4",
        pool=pool,
        pipeline_parallel_size=NUM_RANKS,
        **events,
    )
    checks = run(
        engine_runs.roll_out_beside_serving,
        model=models.untied[0],
        prompts=PROMPTS,
        pool=pool,
        num_rounds=NUM_ROUNDS,
        tensor_parallel_size=NUM_RANKS,
        **events,
    ).result()
    assert_greedy(checks.moves, expected)
    answers, once = bursts.result(), run(engine_runs.stock_answers, **serving).result()
    assert answers == once * (len(answers) // len(once))


def test_data_parallel_pipelines_answer_as_stock_and_take_new_weights(
    engines_dir: Path, models: ModelDirs, stock: StockAnswers
) -> None:
    """Two engines of two data-parallel ranks, each a pipeline of two stages with a pool of its own."""
    folder = new_folder(engines_dir, "replicated")
    pair = Replicas(folder, {Role.SERVING: models.serving, Role.ROLLOUT: models.untied[0]}, NUM_RANKS)
    try:
        answer_as_stock(pair, stock, num_balanced=0)
        rollout = pair.engines[Role.ROLLOUT]
        update(rollout, models.untied[NUM_VERSIONS], NUM_VERSIONS)
        expected = stock.of("untied")
        for turn in probes():
            assert on_each_rank(rollout, turn) == NUM_RANKS * [expected[tuple(turn)]["tokens"]]
    finally:
        pair.close()
