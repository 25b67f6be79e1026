"""Unmodified trainers with a SlackCallback: guests of a pool's board that train as they do without it."""

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from rose.admission.board_snapshot import EngineState, snapshot
from rose.errors import ConfigError, PoolError
from rose.measure.models import numbered_words, word_tokenizer
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.sequences import padded

ROWS = [
    {"input_ids": list(range(start, start + 8)), "labels": list(range(start, start + 8))}
    for start in range(4, 20)
]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def transformers_trainer(model: Any, folder: Path, callbacks: list[Any]) -> Any:
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), remove_unused_columns=False, **SETTINGS),
        train_dataset=ROWS,
        data_collator=lambda batch: padded(batch, 0),
        callbacks=callbacks,
    )


def trl_trainer(model: Any, folder: Path, callbacks: list[Any]) -> Any:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(folder), **SETTINGS),
        train_dataset=datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in ROWS]),
        processing_class=word_tokenizer(numbered_words(40), 64),
        callbacks=callbacks,
    )


def dpo_trainer(model: Any, folder: Path, callbacks: list[Any]) -> Any:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{"prompt": f"w{n}", "chosen": f"w{n + 1} w{n + 2}", "rejected": f"w{n + 3}"} for n in range(16)]
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=trl.DPOConfig(output_dir=str(folder), **SETTINGS),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=word_tokenizer(numbered_words(40), 64),
        callbacks=callbacks,
    )
    for slack in callbacks:
        slack.guard(trainer.ref_model)
    return trainer


def grpo_trainer(model: Any, folder: Path, callbacks: list[Any]) -> Any:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    settings = {"num_generations": 4, "max_completion_length": 6, "use_vllm": False}
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(each.split()))) for each in completions],
        args=trl.GRPOConfig(output_dir=str(folder), **settings, **SETTINGS),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"w{n} w{n + 1}"} for n in range(16)]),
        processing_class=word_tokenizer(numbered_words(40), 64),
        callbacks=callbacks,
    )


@pytest.mark.parametrize("make_trainer", [transformers_trainer, trl_trainer, dpo_trainer, grpo_trainer])
@pytest.mark.slow
def test_a_stock_trainer_trains_as_a_guest_what_it_trains_alone(
    model: Any, runtime_dir: Path, tmp_path: Path, make_trainer: Any
) -> None:
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    make_trainer(model, tmp_path, []).train()
    alone = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any(not torch.equal(alone[name], tensor) for name, tensor in start.items())

    model.load_state_dict(start)
    with (
        start_daemon("gpu0", num_slabs=4, slab_bytes=1 << 20, headroom_slabs=1),
        PoolClient.observe("gpu0") as observer,
    ):
        slack = SlackCallback("gpu0")
        make_trainer(model, tmp_path, [slack]).train()
        left = snapshot(observer.board_words).rollout
    assert all(torch.equal(alone[name], tensor) for name, tensor in model.state_dict().items())
    assert slack.guest is not None and slack.guest.num_grants > 3
    assert left.num_steps == slack.guest.num_grants and left.state is EngineState.DETACHED


def test_a_trainer_that_an_error_has_stopped_trains_again_in_the_same_process(
    model: Any, runtime_dir: Path, tmp_path: Path
) -> None:
    errors = [RuntimeError("once")]

    def fails_once(*_: object) -> None:
        if errors:
            raise errors.pop()

    model.model.layers[1].register_forward_hook(fails_once)
    with (
        start_daemon("gpu0", num_slabs=4, slab_bytes=1 << 20, headroom_slabs=1),
        PoolClient.observe("gpu0") as observer,
    ):
        slack = SlackCallback("gpu0")
        trainer = transformers_trainer(model, tmp_path, [slack])
        with pytest.raises(RuntimeError, match="once"):
            trainer.train()
        trainer.train()
        left = snapshot(observer.board_words).rollout
    assert trainer.state.global_step == 3
    assert slack.guest is not None and left.num_steps > slack.guest.num_grants > 0
    assert left.state is EngineState.DETACHED


@pytest.mark.slow
def test_a_pool_without_a_daemon_is_refused_before_the_first_step(
    model: Any, runtime_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(PoolError, match="nobody"):
        transformers_trainer(model, tmp_path, [SlackCallback("nobody")]).train()


def test_a_trainer_on_several_gpus_is_refused(model: Any, tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), **SETTINGS)
    assert args.device.type == "cpu"
    args._n_gpu = 2
    with pytest.raises(ConfigError, match=r"use 2 GPUs.*CUDA_VISIBLE_DEVICES"):
        SlackCallback("gpu0").on_train_begin(args, TrainerState(), TrainerControl(), model=model)
