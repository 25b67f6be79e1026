"""The trainer of `rose serve --fine-tune`: its batches, its parts, and what it does without memory."""

import math
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from rose._shm import Words
from rose.errors import ConfigError, WorkerError
from rose.host_memory import available_and_total
from rose.measure.models import numbered_words, word_tokenizer
from rose.node.fine_tune.examples import Example
from rose.node.fine_tune.options import FineTuneOptions
from rose.scheduler.node.pieces import Piece, Work
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.command import Loaded, make_trainer, save
from rose.trainers.fine_tune.guest import TrainingGuest
from rose.trainers.fine_tune.sequences import IGNORED, Sequences, padded
from rose.trainers.fine_tune.trainer import GuestTrainer, PublishTrained, StepLines
from rose.transfer.publish.published_dtypes import PublishedDtypes

TOKENIZER = word_tokenizer(numbered_words(40), 64)


def sequences(length: int = 64) -> Sequences:
    examples = [Example(prompt="w1 w2 w3", completion="w4 w5"), Example(prompt="", completion="w6 w7")]
    return Sequences(examples, TOKENIZER, length)


def test_prompts_and_padding_never_enter_the_loss_and_answers_end() -> None:
    end = TOKENIZER.eos_token_id
    batch = padded([sequences()[0], sequences()[1]], TOKENIZER.pad_token_id)
    first, second = batch["labels"].tolist()
    assert first[:3] == [IGNORED] * 3 and first[5] == end and IGNORED not in first[3:]
    assert second[2:] == [end, IGNORED, IGNORED, IGNORED]
    assert batch["attention_mask"].sum(1).tolist() == [6, 3]
    assert batch["input_ids"].shape == (2, 6)


def test_examples_without_a_token_to_learn_are_left_out_and_none_left_is_refused() -> None:
    assert len(sequences(length=3)) == 1
    with pytest.raises(ConfigError, match="of 1 examples none has a token to learn within its first 3"):
        Sequences([Example(prompt="w1 w2 w3", completion="w4")], TOKENIZER, 3)


class Parts(GuestTrainer):
    """Notes the sequences of each part that is trained."""

    parts: list[int]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.parts = [*getattr(self, "parts", []), len(inputs["input_ids"])]
        return super().compute_loss(model, inputs, *args, **kwargs)


def trained(model: Any, folder: Path, slack: SlackCallback) -> tuple[Parts, dict[str, torch.Tensor]]:
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        learning_rate=1e-2,
        optim="sgd",
        max_grad_norm=0.0,
    )
    data = [{"input_ids": list(range(i, i + 8)), "labels": list(range(i, i + 8))} for i in range(4)]
    trainer = Parts(
        slack=slack, model=model, args=args, train_dataset=data, data_collator=lambda batch: padded(batch, 0)
    )
    trainer.train()
    return trainer, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
def test_a_split_microbatch_trains_as_the_whole_one(model: Any, words: Words, tmp_path: Path) -> None:
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slack = SlackCallback("none")
    whole, weights = trained(model, tmp_path, slack)
    model.load_state_dict(start)
    slack.guest = TrainingGuest(words, give_way_s=0.02)
    for _ in range(5):  # a sequence takes 9 ms, so two fit into the 20 ms
        slack.guest.times.add(Piece("backward", 0), Work(1, 8), 0.009)
    split, weights_of_parts = trained(model, tmp_path, slack)
    assert (whole.parts, split.parts) == ([4], [2, 2])
    for name, tensor in weights.items():
        assert torch.allclose(tensor, weights_of_parts[name], atol=1e-6), name
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights.items())


@pytest.mark.slow
def test_a_microbatch_that_never_fits_is_left_out_at_once(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    slack = SlackCallback("none")
    slack.activation_token_bytes = 1 << 50
    _, weights = trained(model, tmp_path, slack)
    assert (slack.num_left_out, slack.num_trained) == (1, 0)
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights.items())
    assert "a microbatch of [4, 8] is left out" in caplog.text


@pytest.mark.slow
def test_a_microbatch_that_waits_for_memory_holds_no_grant(
    model: Any,
    words: Words,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("rose.trainers.fine_tune.trainer._MAX_WAIT_S", 0.2)
    slack = SlackCallback("none")
    slack.guest = TrainingGuest(words)
    slack.guest.begin(Piece("gradients", 0), Work(1, 1))  # what is left of the microbatch before
    slack.activation_token_bytes = round(0.89 * available_and_total()[1]) // 8  # a part is one sequence
    trained(model, tmp_path, slack)
    assert slack.num_left_out >= 1 and "is left out: it needs" in caplog.text
    assert not slack.guest.is_computing
    slack.guest.close()


def loaded(model: Any) -> Loaded:
    return Loaded(model=model, tokenizer=TOKENIZER, published=PublishedDtypes("float32"), data=sequences())


@pytest.mark.slow
def test_training_ends_before_a_loss_that_is_no_number_reaches_the_weights(
    model: Any, tmp_path: Path
) -> None:
    with torch.no_grad():
        model.lm_head.weight[6] = math.inf  # w6, of an example
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = FineTuneOptions(data=tmp_path / "data")
    trainer = make_trainer(options, loaded(model), SlackCallback("none"), str(tmp_path), [])
    with pytest.raises(WorkerError, match="step 1: a gradient is nan, so the update is not made"):
        trainer.train()
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


def test_training_goes_on_if_its_log_is_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    slack, publisher = SlackCallback("none"), SimpleNamespace(version=None)
    slack.guest = SimpleNamespace(num_grants=0, computed_s=0.0, waited_s=0.0)  # type: ignore[assignment]
    lines = StepLines(Path("/dev/full"), slack, publisher)  # type: ignore[arg-type]
    args: Any = None
    for _ in range(2):
        lines.on_log(args, TrainerState(global_step=7), TrainerControl(), {"loss": 1.0})
    (told,) = caplog.messages
    assert told.startswith("/dev/full lacks lines from step 7 on:") and "No space left" in told


@pytest.mark.slow
def test_a_disk_that_fills_while_the_model_is_saved_is_one_clear_line(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(WorkerError, match=f"--fine-tune-output {tmp_path}: the trained model is not sav"):
            save(loaded(model), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Versions:
    """Counts what is published."""

    num = 0

    def publish(self) -> SimpleNamespace:
        self.num += 1
        return SimpleNamespace(version=SimpleNamespace(number=self.num))


def test_an_epoch_without_memory_ends_with_an_error_and_makes_no_version(tmp_path: Path) -> None:
    slack, versions = SlackCallback("none"), Versions()
    publishing = PublishTrained(slack, versions, 0.0)  # type: ignore[arg-type]
    args: Any = None
    state, control = TrainerState(), TrainerControl()
    slack.num_trained = 1
    publishing.on_step_end(args, state, control)
    slack.on_epoch_end(args, state, control)
    slack.num_left_out = 3
    publishing.on_step_end(args, state, control)
    publishing.on_train_end(args, state, control)
    assert versions.num == 1
    with pytest.raises(WorkerError, match="3 parts of microbatches were left out for lack of memory"):
        slack.on_epoch_end(args, state, control)
