"""Profiling a real model's stages, on the CPU."""

from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.jobs.stage_times import main, measure
from rose.scheduler.node.profile import read_profile
from rose.scheduler.sim.levels import simulate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_a_profile_of_a_real_model_feeds_the_simulation(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stages.json"
    argv = ["--stages", "2", "--lengths", "8", "16", "32", "64", "--repeats", "2", "-o", str(path)]
    assert main([str(model), *argv]) == 0
    profile = read_profile(path)
    first, second = profile.stages
    assert (first.kv_token_bytes, second.kv_token_bytes) == (3 * 2 * 2 * 8 * 4, 2 * 2 * 2 * 8 * 4)
    assert first.activation_token_bytes > 3 * 32 * 4  # more than one value a layer and unit
    assert all(
        cost.seconds(64, 64**2) > 0 for stage in profile.stages for cost in (stage.forward, stage.backward)
    )
    assert "stage 1 backward" in capsys.readouterr().out
    assert simulate(["--level", "node", "--profile", str(path), "--tasks", "20"]) == 0


def test_every_stage_is_timed_at_every_length(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    samples = measure(AutoModelForCausalLM.from_pretrained(model), 3, [4, 8], 2)
    for one in samples:
        assert {length: len(each) for length, each in one.forward.items()} == {4: 2, 8: 2}
        assert {length: len(each) for length, each in one.backward.items()} == {4: 2, 8: 2}
        assert min(min(each) for each in (*one.forward.values(), *one.backward.values())) > 0
        assert one.activation_bytes[8] > one.activation_bytes[4] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stages", "6"], "the model has 5 layers: --stages is at most 5, got 6"),
        (["--lengths", "8", "16"], "at least 3 different lengths"),
        (["--lengths", "8", "16", "512"], "takes at most 128 tokens"),
        (["--device", "cuda"], "torch sees no CUDA device here"),
        (["--device", "gpu"], "--device gpu: no device of torch; use cpu or cuda"),
        (["--device", "meta"], "--device meta: only cpu and cuda can be measured"),
    ],
)
def test_wrong_input_is_named(model: Path, tmp_path: Path, argv: list[str], message: str) -> None:
    import torch

    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("this host has a CUDA device")
    short = [] if "--lengths" in argv else ["--lengths", "4", "8", "16"]
    with pytest.raises(ConfigError) as error:
        main([str(model), *argv, *short, "-o", str(tmp_path / "stages.json")])
    assert message in str(error.value)


def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "exists; remove it"), (tmp_path / "no" / "x", "there is no folder")):
        with pytest.raises(ConfigError, match=message):
            main(["a model that is not even looked for", "-o", str(path)])


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a causal language model"):
        main([str(tmp_path), "-o", str(tmp_path / "stages.json")])
