"""Speculative decoding in slab pools: the greedy tokens of stock vLLM while slabs move, several in a step."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import engine_runs
import pytest
import speculative_runs
import torch
from forked_engines import Fork, forks
from probes import prompt
from real_engine import new_folder, runtime_dir
from references import ModelDirs
from safetensors.torch import load_file, save_file
from speculative_runs import NUM_DRAFTS, Drafted, Served, Updated, speculation
from test_models_in_slabs import HEADROOM_SLABS, NUM_SLABS, assert_greedy
from tiny_models import SLAB_BYTES, VOCABULARY, make_eagle3_head, make_mtp_model

from rose.memory.daemon.daemon import start_daemon

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(f"drafted-{index}", 60 + 30 * index) for index in range(8)]
TOKENS = 40
NUM_ROUNDS = 3
POOL_NUMBERS = count()

Run = Callable[..., Fork]


@pytest.fixture(scope="module")
def run(engines_dir: Path) -> Iterator[Run]:
    """Forks a function with the prompts."""
    with forks(engines_dir / "speculative", prompts=PROMPTS, max_tokens=TOKENS) as start:
        yield start


@pytest.fixture(params=[NUM_SLABS])
def pool(run: Run, engines_dir: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"speculative-{next(POOL_NUMBERS)}"
    with start_daemon(
        name,
        num_slabs=request.param,
        slab_bytes=SLAB_BYTES,
        headroom_slabs=HEADROOM_SLABS,
        runtime_dir=runtime_dir(engines_dir / "speculative"),
    ):
        yield name


@pytest.fixture(scope="module")
def expected(run: Run, models: ModelDirs) -> list[list[int]]:
    answers: list[list[int]] = run(engine_runs.stock_answers, model=models.untied[0]).result()
    return answers


@pytest.fixture(scope="module")
def drafters(models: ModelDirs, engines_dir: Path) -> dict[str, dict[str, Any]]:
    """Returns each method's configuration. Most drafts of the draft model are wrong: it has other weights."""
    return {
        "ngram": speculation("ngram"),
        "draft_model": speculation("draft_model", models.untied[1]),
        "eagle3": speculation("eagle3", make_eagle3_head(engines_dir / "speculative" / "eagle3")),
    }


@pytest.fixture(scope="module")
def mtp(engines_dir: Path) -> Path:
    return make_mtp_model(engines_dir / "mtp", dtype="float32")


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("ngram", {}),
        ("draft_model", {"is_gated": True}),
        ("draft_model", {"is_late": True}),
        ("eagle3", {"is_late": True, "is_gated": True}),
    ],
)
def test_drafts_leave_the_answers_stocks_while_slabs_leave(
    run: Run,
    pool: str,
    models: ModelDirs,
    expected: list[list[int]],
    drafters: dict[str, dict[str, Any]],
    method: str,
    how: dict[str, bool],
) -> None:
    drafted: Drafted = run(
        speculative_runs.draft_over_cuts,
        model=models.untied[0],
        pool=pool,
        num_rounds=NUM_ROUNDS,
        speculative=drafters[method],
        **how,
    ).result()
    assert_greedy(drafted.moves, expected)
    assert drafted.num_drafts > 0
    assert drafted.most_in_flight == (2 if how == {"is_late": True} else 1)
    assert (drafted.num_granted > 0) == ("is_gated" in how)


def test_drafts_of_a_models_own_layer_leave_the_answers_stocks_while_slabs_leave(
    run: Run, pool: str, mtp: Path
) -> None:
    drafted: Drafted = run(
        speculative_runs.draft_over_cuts,
        model=mtp,
        pool=pool,
        num_rounds=NUM_ROUNDS,
        speculative=speculation("mtp"),
        is_late=True,
    ).result()
    assert_greedy(drafted.moves, run(engine_runs.stock_answers, model=mtp).result())
    assert drafted.num_drafts > 0
    assert drafted.most_in_flight == 2


@pytest.mark.parametrize("pool", [2 * NUM_SLABS], indirect=True)
def test_accepted_drafts_count_in_deadlines_and_floors(run: Run, pool: str, models: ModelDirs) -> None:
    """The drafter is the model itself, so nearly every draft is accepted."""
    model = models.untied[0]
    served: Served = run(
        speculative_runs.serve_drafted,
        model=model,
        pool=pool,
        speculative=speculation("draft_model", model),
    ).result()
    assert served.num_tokens == len(PROMPTS) * TOKENS
    assert 2 < served.tokens_per_step <= 1 + NUM_DRAFTS
    assert served.num_preempted == 0, "slabs were free for every draft"
    assert served.is_profiled
    assert served.tpot_floor_us == pytest.approx(served.step_us / (1 + NUM_DRAFTS), abs=1)


@pytest.mark.parametrize("pool", [2 * NUM_SLABS], indirect=True)
def test_new_weights_count_at_once_and_the_drafter_follows_if_its_tensors_come_too(
    run: Run,
    pool: str,
    models: ModelDirs,
    expected: list[list[int]],
    drafters: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    """The EAGLE3 head shares the model's embeddings, and has the rest of its weights in a checkpoint of its
    own. Its table of tokens stays if a trainer leaves it out, and can be published as int32.
    """
    newer = run(engine_runs.stock_answers, model=models.untied[1]).result()
    (alone,) = models.untied[1].glob("*.safetensors")
    head = load_file(Path(drafters["eagle3"]["model"]) / "model.safetensors")
    table = head.pop("d2t")
    trained = {name: each + 0.25 for name, each in head.items()}
    both, table_too = tmp_path / "both.safetensors", tmp_path / "table.safetensors"
    published = load_file(alone) | {f"drafter.{name}": each for name, each in trained.items()}
    save_file(published, both)
    save_file(published | {"drafter.d2t": torch.zeros_like(table, dtype=torch.int32)}, table_too)
    updated: Updated = run(
        speculative_runs.answer_under_new_weights,
        model=models.untied[0],
        pool=pool,
        speculative=drafters["eagle3"],
        checkpoints=[alone, both, table_too],
    ).result()
    assert updated.answers == [expected, newer, newer, newer]
    assert "keeps the weights that it has" in str(updated.stale[0])
    assert updated.stale[1:] == [None, None]
    tables = (table, table, torch.zeros_like(table))
    for found, tensors, wanted in zip(updated.drafter, (head, trained, trained), tables, strict=True):
        assert (found["model.norm.weight"] == tensors["norm.weight"].numpy()).all()
        assert (found["draft_id_to_target_id"] == wanted.numpy()).all()
        # The other layers are packed on a CPU, and have a parameter without elements.
        assert found.keys() == updated.drafter[0].keys()


def test_a_draft_model_of_another_vocabulary_is_refused_before_any_model_is_loaded(
    engines_dir: Path, pool: str, models: ModelDirs
) -> None:
    other = new_folder(engines_dir, "other-words")
    shutil.copytree(models.untied[1], other, dirs_exist_ok=True)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 2 * VOCABULARY}))
    for file in other.glob("*.safetensors"):
        file.unlink()
    given = {"model": models.untied[0], "pool": pool, "speculative": speculation("draft_model", other)}
    fork = Fork(engines_dir / "speculative", speculative_runs.refused_with, **given)
    try:
        told = fork.result()
    finally:
        fork.stop()
    assert f"Target model vocab_size={VOCABULARY}. Draft model vocab_size={2 * VOCABULARY}." in told
