"""A rollout engine without a pool has vLLM's own KV cache, and may use what a pool can't."""

import pytest
from probes import NUM_VERSIONS, PROBE_TOKENS, probes
from real_engine import RealEngine
from references import ModelDirs, StockAnswers
from tiny_models import staged_update
from weight_probes import update

from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_pipeline_ranks_answer_as_stock_vllm_after_new_weights_which_all_of_them_take_or_none(
    models: ModelDirs, stock: StockAnswers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = RealEngine(
        models.untied[0],
        Role.ROLLOUT,
        tmp_path_factory.mktemp("alone"),
        *("--pipeline-parallel-size", "2"),
    )
    try:
        engine.wait_ready()
        update(engine, models.untied[1], 1)
        good = staged_update(models.untied[NUM_VERSIONS], f"test/{NUM_VERSIONS}")
        refused = engine.update_weights(good.model_copy(update={"state_hash": "0" * 64}))
        assert refused.status_code == 500 and "weights kept at the old version" in refused.text
        update(engine, models.untied[NUM_VERSIONS], NUM_VERSIONS)
        expected = stock.of("untied")
        for turn in probes():
            assert engine.complete(turn, PROBE_TOKENS).tokens == expected[tuple(turn)]["tokens"]
    finally:
        engine.stop()
