"""New weights in a live engine are as exact as after a fresh start, and never mixed with the old ones."""

import json
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from mirrored import Mirrored
from probes import PROBE_TOKENS, probes, prompt
from real_engine import Answer, RealEngine, until
from references import ModelDirs, StockAnswers
from shared_gpu import SharedGpu
from tiny_models import make_int8_model, make_mamba_model, make_mla_model, make_mtp_model, staged_update
from weight_probes import Probed, probe, update

from rose.messages import WeightUpdate
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.layout import TensorSpec
from rose.transfer.format.partition import cut_by_holdings
from rose.transfer.format.shard_plan import ShardPlan
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_UPDATES = 20


@pytest.fixture(scope="module")
def dedicated(engines_dir: Path, models: ModelDirs) -> Iterator[RealEngine]:
    """A rollout engine without a pool, whose head is tied to the embedding."""
    engine = RealEngine(models.tied[0], Role.ROLLOUT, engines_dir)
    try:
        yield engine.wait_ready()
    finally:
        engine.stop()


def go_through_versions(engine: RealEngine, folders: list[Path]) -> None:
    """Checks that each version answers differently, and that a version which comes again answers the same."""
    probed = []
    for number, folder in enumerate(folders):
        update(engine, folder, number)
        probed.append(probe(engine))
    assert all(first != second for first, second in pairwise(probed))
    for number in (2, len(folders) - 1):
        update(engine, folders[number], number)
        assert probe(engine) == probed[number]


def as_probed(answers: dict[tuple[int, ...], dict[str, list[float]]]) -> list[object]:
    return [(one["tokens"], one["logprobs"]) for one in answers.values()]


def test_after_each_of_many_updates_a_tied_model_answers_as_a_fresh_stock_engine(
    dedicated: RealEngine, models: ModelDirs, stock: StockAnswers
) -> None:
    fresh = [as_probed(stock.of(f"tied-{version}")) for version in range(len(models.tied))]
    assert all(first != second for first, second in combinations(fresh, 2))
    order, version = random.Random(0), 0
    for number in range(NUM_UPDATES):
        version = order.choice([other for other in range(len(fresh)) if other != version])
        update(dedicated, models.tied[version], number)
        assert probe(dedicated) == fresh[version], (number, version)


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[Mirrored]:
    made = Mirrored(tmp_path / "mirror")
    yield made
    made.close()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    (path,) = folder.glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = safetensors.torch.load_file(path)
    return tensors


def after_a_step(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Changes some 1% of the elements of every tensor, all of them by something that shows."""
    generator = torch.Generator().manual_seed(seed)
    later = {}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        later[name] = torch.where(torch.rand(tensor.shape, generator=generator) < 0.01, noise, tensor)
    return later


def deliver(engine: RealEngine, wanted: WeightUpdate) -> None:
    response = engine.update_weights(wanted)
    assert response.status_code == 200, response.text
    assert engine.status().weight_version == wanted.version


def answers(engine: RealEngine) -> Probed:
    """Greedy tokens and logprobs, whatever the prefix cache holds."""
    found = (engine.complete(turn, PROBE_TOKENS) for turn in probes())
    return [(answer.tokens, answer.logprobs) for answer in found]


def check_follows_in_place(
    engine: RealEngine,
    model: Path,
    mirrored: Mirrored,
    folder: Path,
    probe: Callable[[RealEngine], Probed] = probe,
) -> Probed:
    """Checks that changes leave the engine with the bits of a whole load of the same checkpoint. Returns its
    last answers.
    """
    tensors = tensors_of(model)
    deliver(engine, mirrored.put(tensors))
    before = engine.status()
    assert before.whole_because == "this is the first delivery to this engine"
    probed = probe(engine)
    for seed in (1, 2):
        tensors = after_a_step(tensors, seed)
        deliver(engine, mirrored.put(tensors))
        found = probe(engine)
        assert found != probed
        probed = found
    behind = mirrored.version
    for seed in (3, 4):
        tensors = after_a_step(tensors, seed)
        mirrored.put(tensors)
    deliver(engine, mirrored.update_from(behind))
    after = engine.status()
    assert after.weights_in_place == before.weights_in_place + 3
    assert (after.weights_whole, after.whole_because) == (before.weights_whole, before.whole_because)
    probed = probe(engine)
    safetensors.torch.save_file(tensors, folder / "whole.safetensors")
    deliver(engine, staged_update(folder, "whole/0"))
    assert engine.status().weights_whole == after.weights_whole + 1
    assert probe(engine) == probed
    return probed


def test_changes_of_a_tied_model_leave_the_bits_of_a_whole_load(
    dedicated: RealEngine, models: ModelDirs, mirrored: Mirrored, tmp_path: Path
) -> None:
    check_follows_in_place(dedicated, models.tied[1], mirrored, tmp_path)


def test_changes_of_a_model_that_is_packed_on_a_cpu_leave_the_bits_of_a_whole_load(
    gpu: SharedGpu, rollout: RealEngine, models: ModelDirs, mirrored: Mirrored, tmp_path: Path
) -> None:
    """Float32, of which oneDNN packs every linear layer on any processor."""
    check_follows_in_place(rollout, models.untied[1], mirrored, tmp_path)
    update(rollout, models.untied[0], 0)


def test_changes_of_an_int8_model_leave_the_bits_of_a_whole_load(
    engines_dir: Path, mirrored: Mirrored, tmp_path: Path
) -> None:
    """They come back with the same bits after the engine was inactive, too."""
    model = make_int8_model(tmp_path / "model")
    engine = RealEngine(model, Role.ROLLOUT, engines_dir)
    try:
        probed = check_follows_in_place(engine.wait_ready(), model, mirrored, tmp_path)
        active = engine.status().device_weights_bytes
        engine.deactivate()
        assert active > engine.status().device_weights_bytes == 0
        engine.activate()
        assert engine.status().device_weights_bytes == active
        assert probe(engine) == probed
    finally:
        engine.stop()


def test_changes_of_a_model_with_latent_attention_and_experts_leave_the_bits_of_a_whole_load(
    engines_dir: Path, mirrored: Mirrored, tmp_path: Path
) -> None:
    model = make_mla_model(tmp_path / "model", num_dense=1)
    engine = RealEngine(model, Role.ROLLOUT, engines_dir)
    try:
        # Its blocks are smaller than probe() takes for granted.
        check_follows_in_place(engine.wait_ready(), model, mirrored, tmp_path, answers)
    finally:
        engine.stop()


def test_a_mamba2_model_answers_after_changes_as_a_fresh_engine_of_the_same_checkpoint(
    engines_dir: Path, mirrored: Mirrored, tmp_path: Path
) -> None:
    """Its loader computes with tensors, so its layers are loaded from the mirror."""
    model = make_mamba_model(tmp_path / "model")
    tensors = tensors_of(model)
    engine = RealEngine(model, Role.ROLLOUT, engines_dir)
    try:
        deliver(engine.wait_ready(), mirrored.put(tensors))
        found = answers(engine)
        for seed in (1, 2):
            tensors, before = after_a_step(tensors, seed), found
            deliver(engine, mirrored.put(tensors))
            found = answers(engine)
            assert found != before
        assert engine.status().weights_in_place == 2
    finally:
        engine.stop()
    safetensors.torch.save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    fresh = RealEngine(model, Role.ROLLOUT, engines_dir)
    try:
        assert answers(fresh.wait_ready()) == found
    finally:
        fresh.stop()


def test_changes_reach_the_speculative_head_in_the_models_checkpoint(
    engines_dir: Path, mirrored: Mirrored, tmp_path: Path
) -> None:
    model = make_mtp_model(tmp_path / "model")
    tensors = tensors_of(model)
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    engine = RealEngine(model, Role.ROLLOUT, engines_dir, "--speculative-config", speculation)
    try:
        deliver(engine.wait_ready(), mirrored.put(tensors))
        probed = [engine.complete(turn, PROBE_TOKENS).tokens for turn in probes()]
        stepped = after_a_step(tensors, 1)
        later = {name: stepped[name] if "mtp_layers" in name else each for name, each in tensors.items()}
        deliver(engine, mirrored.put(later))
        assert engine.status().weights_in_place == 1
        log = engine.process.log_tail(10_000)
        assert re.search(r"in place elements=[1-9]\d* write_s=", log)
        assert "steps held back for weights: version=" in log
        assert [engine.complete(turn, PROBE_TOKENS).tokens for turn in probes()] == probed
    finally:
        engine.stop()


def test_bad_changes_or_a_mirror_that_moved_on_leave_the_old_version(
    dedicated: RealEngine, models: ModelDirs, mirrored: Mirrored
) -> None:
    tensors = tensors_of(models.tied[1])
    deliver(dedicated, mirrored.put(tensors))
    probed = probe(dedicated)
    late = mirrored.put(after_a_step(tensors, 1))
    newest = mirrored.put(after_a_step(tensors, 2))
    path = Path(late.changes[0])
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused = dedicated.update_weights(late)
    assert refused.status_code == 500 and "weights kept" in refused.text
    again = [dedicated.complete(turn, PROBE_TOKENS) for turn in probes()]
    assert [(answer.tokens, answer.logprobs) for answer in again] == probed
    assert dedicated.status().weight_version == "test/0"
    deliver(dedicated, mirrored.update_from("test/0"))
    assert "does not have its checksum" in str(dedicated.status().whole_because)
    assert probe(dedicated) != probed
    assert newest.version == dedicated.status().weight_version


def test_an_engine_that_was_inactive_comes_back_with_the_mirrors_newest_version(
    dedicated: RealEngine, models: ModelDirs, mirrored: Mirrored
) -> None:
    tensors = tensors_of(models.tied[1])
    deliver(dedicated, mirrored.put(tensors))
    dedicated.deactivate()
    tensors = after_a_step(tensors, 1)
    deliver(dedicated, mirrored.put(tensors))
    tensors = after_a_step(tensors, 2)
    mirrored.put(tensors)
    dedicated.activate()
    assert dedicated.status().weight_version == "test/2"
    tensors = after_a_step(tensors, 3)
    in_place = dedicated.status().weights_in_place
    deliver(dedicated, mirrored.put(tensors))
    assert dedicated.status().weights_in_place == in_place + 1


def test_a_mirror_that_is_cut_for_several_ranks_loads_like_a_whole_checkpoint(
    dedicated: RealEngine, models: ModelDirs, stock: StockAnswers, tmp_path: Path
) -> None:
    update(dedicated, models.tied[2], 2)
    specs = [spec for spec, _ in read_checkpoint(models.tied[1]).values()]
    plans = plans_of_ranks(models.tied[1], specs, num_ranks=2)
    cuts = cut_by_holdings(specs, [plan.boxes() for plan in plans])
    assert sum(bool(cut.points) for cut in cuts.values()) > len(specs) // 2
    mirrored = Mirrored(tmp_path / "mirror", cuts)
    tensors = tensors_of(models.tied[1])
    deliver(dedicated, mirrored.put(tensors))
    assert probe(dedicated) == as_probed(stock.of("tied-1"))
    in_place = dedicated.status().weights_in_place
    deliver(dedicated, mirrored.put(after_a_step(tensors, 1)))
    deliver(dedicated, mirrored.put(tensors))
    assert dedicated.status().weights_in_place == in_place + 2
    assert probe(dedicated) == as_probed(stock.of("tied-1"))
    mirrored.close()


def plans_of_ranks(model: Path, specs: list[TensorSpec], num_ranks: int) -> list[ShardPlan]:
    """Returns what each rank of a larger engine takes from the checkpoint."""
    from lib.transfer.pretended_rank import pretended_rank
    from vllm.engine.arg_utils import EngineArgs

    from rose.engine.weights.shard_recorder import record_loading

    config = EngineArgs(str(model), skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
    plans = []
    for rank in range(num_ranks):
        with pretended_rank(config, tp_rank=rank, tp_size=num_ranks) as ranked:
            plans.append(record_loading(ranked, specs).plan)
    return plans


def test_an_untied_model_in_the_pool_answers_with_each_version_as_a_fresh_stock_engine(
    gpu: SharedGpu, rollout: RealEngine, models: ModelDirs, stock: StockAnswers
) -> None:
    go_through_versions(rollout, models.untied)
    update(rollout, models.untied[-1], 9)
    assert probe(rollout) == as_probed(stock.of("untied"))
    update(rollout, models.untied[0], 0)


def test_slabs_of_forgotten_cache_return_to_the_pool(
    gpu: SharedGpu, rollout: RealEngine, models: ModelDirs
) -> None:
    rollout.complete(prompt("forgotten", 600), 4)
    assert gpu.ledger.num_held(Role.ROLLOUT) > 1
    update(rollout, models.untied[0], 0)
    assert rollout.status().kv_cached_blocks == 0
    until(lambda: gpu.ledger.num_held(Role.ROLLOUT) == 1, "slabs returned")


def test_requests_in_flight_keep_all_their_tokens_across_an_update(
    gpu: SharedGpu, rollout: RealEngine, models: ModelDirs
) -> None:
    tokens_before = rollout.status().generated_tokens
    requests: list[Future[Answer]] = rollout.start_requests(
        [prompt(f"in-flight-{i}", 100) for i in range(4)], max_tokens=200
    )
    until(lambda: rollout.status().generated_tokens > tokens_before + 20, "tokens of the old weights")
    update(rollout, models.untied[1], 1)
    for request in requests:
        answer = request.result()
        assert (answer.finish_reason, len(answer.tokens)) == ("length", 200)
    update(rollout, models.untied[0], 0)


def test_weights_with_a_wrong_hash_are_refused_and_the_old_ones_stay_in_use(
    dedicated: RealEngine, models: ModelDirs
) -> None:
    update(dedicated, models.tied[1], 1)
    before = probe(dedicated)
    wrong = staged_update(models.tied[2], "test/2").model_copy(
        update={"state_hash": staged_update(models.tied[3], "test/3").state_hash}
    )
    response = dedicated.update_weights(wrong)
    assert response.status_code == 500
    assert "weights kept at the old version" in response.text and "state hash" in response.text
    assert dedicated.status().weight_version == "test/1"
    again = [dedicated.complete(turn, PROBE_TOKENS) for turn in probes()]
    assert [(answer.tokens, answer.logprobs) for answer in again] == before
    # The failed update left nothing half done, so a good one still succeeds.
    update(dedicated, models.tied[2], 2)
    assert probe(dedicated) != before


def test_impossible_updates_are_refused_with_a_reason(serving: RealEngine, models: ModelDirs) -> None:
    good = staged_update(models.untied[1], "test/1")
    refused = serving.update_weights(good)
    assert refused.status_code == 409
    assert "this serving engine takes no weights" in refused.text


def test_a_missing_checkpoint_is_reported_as_a_bad_request(rollout: RealEngine, models: ModelDirs) -> None:
    missing = staged_update(models.untied[1], "test/1").model_copy(update={"path": "/nowhere/x.safetensors"})
    response = rollout.update_weights(missing)
    assert response.status_code == 422
    assert "no staged checkpoint at" in response.text and "--ipc=host" in response.text
