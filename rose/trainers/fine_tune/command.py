"""The trainer behind `rose serve --fine-tune`: transformers' Trainer, or TRL's for preferences and rewards,
as a guest of the serving engine.

`python -m rose.trainers.fine_tune.command --model MODEL --fine-tune DATA --pool NAME --relay URL --run
RUN`, with the settings of `rose serve --fine-tune`.

Owns the model that is trained, in single precision, and its optimizer. Promises one JSON line for each step
if asked, a last version when the data ends, and exit status 0 at the end of the data and after a stop signal.
If asked, saves the model whatever ends training. Never touches the served model: new weights go through the
relay.
"""

import argparse
import copy
import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from rose.arguments import CommandParser, run_command
from rose.errors import ConfigError, WorkerError
from rose.node.fine_tune.examples import Example, Preference, read_examples, read_prompts
from rose.node.fine_tune.options import PUBLISH_S, FineTuneOptions, add_flags, take_options
from rose.node.signals import take_sigterm_as_sigint
from rose.trainers.fine_tune.adapters import Adapters, MergingPublisher, merge_for_good
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.preferences import Preferences, preference_trainer
from rose.trainers.fine_tune.ranks import HUNG_S, Ranks
from rose.trainers.fine_tune.rewards import RewardedPrompts, load_reward, reward_trainer
from rose.trainers.fine_tune.sequences import Sequences, padded
from rose.trainers.fine_tune.trainer import (
    FiniteGradients,
    GuestTrainer,
    PublishTrained,
    StepLines,
    on_one_gpu,
)
from rose.trainers.publishing import PublishWeights
from rose.transfer.publish.file_names import as_in_files, names_in_files
from rose.transfer.publish.published_dtypes import PublishedDtypes
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.publish.torch_source import named_tensors, shard_of

logger = logging.getLogger(__name__)

_LIVE_S = HUNG_S / 2
"""How long a version may take until the engine runs it. The first one is the whole model."""
_MEASURED_PARTS = (4, 2, 1)
"""The pieces are measured at the longest sequence's length, divided by each of these."""


def main(argv: Sequence[str]) -> int:
    """Trains until the data ends or a signal comes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    place, options = parse(argv)
    take_sigterm_as_sigint()
    with redirect_stdout(sys.stderr), suppress(KeyboardInterrupt), ExitStack() as stack:
        _train(place, options, stack)  # transformers prints its metrics
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, FineTuneOptions]:
    """Returns the model with its place beside the engine, and the settings. Raises: ConfigError."""
    given = {key: value for key, value in vars(_parser().parse_args(list(argv))).items() if value is not None}
    options = take_options(given)
    if options is None:
        raise ConfigError("--fine-tune DATA is missing: there is nothing to train on")
    return argparse.Namespace(**{"cpus": None, "engine": None, **given}), options


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The model that is trained, and its data."""

    model: Any
    """The model, in single precision."""
    tokenizer: Any
    published: PublishedDtypes
    """The data types in which weights are published and saved: those of the checkpoint."""
    data: Sequences | Preferences | RewardedPrompts
    reference: Any = None
    """The model as it is before training, which preferences are compared with."""


def load(model_name: str, options: FineTuneOptions) -> Loaded:
    """Reads the model and the examples. Raises: ConfigError."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_name)
        said = AutoConfig.from_pretrained(model_name).dtype
        # In a model of another type, what the checkpoint has in float32 would be rounded as it is read.
        model: Any = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_name}: not a causal language model ({error})") from error
    most = getattr(model.config, "max_position_embeddings", options.tokens)
    length = min(options.tokens, most)
    data = _data(options, tokenizer, length)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        published=_published(model, said),
        data=data,
        reference=copy.deepcopy(model) if isinstance(data, Preferences) else None,
    )


def _published(model: Any, said: torch.dtype | None) -> PublishedDtypes:
    """said: what the checkpoint's configuration says of its type, which counts where its files don't tell."""
    found = PublishedDtypes.find(None, model.name_or_path)
    if found is not None:
        return found
    pairs = [(name, shard_of(value)) for name, value in named_tensors(as_in_files(model))]
    most = str(said if said is not None else torch.float32).removeprefix("torch.")
    return replace(PublishedDtypes.of_tensors(pairs, model), most=most)


def _data(options: FineTuneOptions, tokenizer: Any, length: int) -> Sequences | Preferences | RewardedPrompts:
    if options.reward is not None:
        prompts, reward = read_prompts(options.data), load_reward(options.reward)
        return RewardedPrompts(prompts, reward, tokenizer, length, options.answer_tokens, options.samples)
    examples = read_examples(options.data)
    pairs = [each for each in examples if isinstance(each, Preference)]
    if pairs:
        return Preferences(pairs, tokenizer, length)
    return Sequences([each for each in examples if isinstance(each, Example)], tokenizer, length)


def make_trainer(
    options: FineTuneOptions,
    loaded: Loaded,
    slack: SlackCallback,
    folder: str,
    callbacks: list[TrainerCallback],
    engine_url: str | None = None,
) -> Trainer:
    """Returns a trainer for the loaded model. It is a guest only if ``slack`` is among ``callbacks``.

    ``engine_url``: who answers the prompts of a reward; None: that of ROSE_ROUTER_URL.
    """
    settings, data = _settings(options, folder, is_cpu=not torch.cuda.is_available()), loaded.data
    guest: dict[str, Any] = {
        "model": loaded.model,
        "tokenizer": loaded.tokenizer,
        "slack": slack,
        "settings": settings,
        "callbacks": callbacks,
    }
    trainer: Trainer
    if isinstance(data, Preferences):
        trainer = preference_trainer(data, reference=loaded.reference, **guest)
    elif isinstance(data, RewardedPrompts):
        trainer = reward_trainer(data, engine_url=engine_url, **guest)
    else:
        pad_id = data.pad_id
        trainer = GuestTrainer(
            slack=slack,
            model=loaded.model,
            args=on_one_gpu(TrainingArguments(**settings)),
            train_dataset=data,
            data_collator=lambda batch: padded(batch, pad_id),
            callbacks=callbacks,
        )
    trainer.remove_callback(PrinterCallback)  # it prints a line for each step
    trainer.add_callback(FiniteGradients())
    return trainer


def _publisher(place: argparse.Namespace, loaded: Loaded, adapters: Adapters | None) -> WeightPublisher:
    if adapters is None:
        return WeightPublisher(loaded.model, place.relay, place.run, loaded.published)
    return MergingPublisher(adapters, place.relay, place.run, loaded.published)


def _publishing(
    options: FineTuneOptions, loaded: Loaded, slack: SlackCallback, publisher: WeightPublisher
) -> TrainerCallback:
    if isinstance(loaded.data, RewardedPrompts):
        # The next answers come from the new weights.
        return PublishWeights(publisher, num_workers=1, ack_timeout_s=_LIVE_S)
    every_s = options.publish_s if options.publish_s is not None else PUBLISH_S
    if isinstance(loaded.data, Preferences):
        return PublishWeights(publisher, every_s=every_s)
    return PublishTrained(slack, publisher, every_s)


def save(loaded: Loaded, folder: Path) -> None:
    """Saves the tokenizer and whole weights, each in the checkpoint's data type. The model can't be trained
    after it.

    Raises: WorkerError if the folder can't hold them.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    merge_for_good(loaded.model)
    model, dtypes, names = loaded.model, loaded.published, names_in_files(loaded.model)
    wide = {
        name: each.clone()
        for name, each in model.state_dict().items()
        if any(dtypes.keeps(in_file, each) for in_file in names[name])
    }
    model.to(getattr(torch, dtypes.most))
    try:
        model.save_pretrained(folder, state_dict={**model.state_dict(), **wide})
        loaded.tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise WorkerError(
            f"--fine-tune-output {folder}: the trained model is not saved, what is there is incomplete "
            f"({error}): the engine alone has the version that went live last"
        ) from error
    logger.info("saved the trained model to %s", folder)


def _train(place: argparse.Namespace, options: FineTuneOptions, stack: ExitStack) -> None:
    # This joins the trainer's other processes, if there are any, and chooses this one's GPU.
    hung = timedelta(seconds=HUNG_S)
    is_first = PartialState(cpu=not torch.cuda.is_available(), timeout=hung).is_main_process
    stack.enter_context(Ranks.parting("fine-tune"))
    loaded = load(place.model, options)
    if options.output is not None and is_first:
        stack.callback(save, loaded, options.output)  # runs after everything that is added below has ended
    slack = SlackCallback(
        place.pool,
        give_way_s=options.give_way_ms / 1000,
        lengths=sorted({max(2, loaded.data.longest // part) for part in _MEASURED_PARTS}),
        cpus=[int(cpu) for cpu in place.cpus.split(",")] if place.cpus is not None else [],
    )
    stack.callback(slack.close)
    adapters = Adapters(loaded.model, options.lora_rank) if options.lora_rank is not None else None
    callbacks: list[TrainerCallback] = [slack]
    if is_first:  # all of them have the same weights
        publisher = _publisher(place, loaded, adapters)
        stack.callback(publisher.close)
        callbacks.append(_publishing(options, loaded, slack, publisher))
        if options.log is not None:
            callbacks.append(StepLines(options.log, slack, publisher))
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rose-fine-tune-"))
    make_trainer(options, loaded, slack, folder, callbacks, place.engine).train()


def _settings(options: FineTuneOptions, folder: str, *, is_cpu: bool) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "num_train_epochs": options.epochs,
        "per_device_train_batch_size": options.micro_batch,
        "optim": "adamw_torch",
        "use_cpu": is_cpu,
        "dataloader_pin_memory": not is_cpu,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


def _parser() -> CommandParser:
    program = "python -m rose.trainers.fine_tune.command"
    flags = CommandParser(
        program,
        "Fine-tunes a model in the slack of the engine that serves it. rose serve --fine-tune starts it.",
        f"{program} --model ./model --fine-tune texts.jsonl --pool gpu0 --relay embedded://host:8400 "
        "--run chat",
    )
    flags.add_argument("--model", required=True, help="the model that is served: its folder or hub id")
    flags.add_argument("--pool", required=True, help="the serving engine's pool")
    flags.add_argument("--relay", required=True, help="where new weights go")
    flags.add_argument("--run", required=True, help="the run that the engine follows")
    flags.add_argument("--cpus", help="CPUs that stand for the GPU on a host without one")
    flags.add_argument(
        "--engine", help="URL of who answers the prompts of a reward (default: ROSE_ROUTER_URL)"
    )
    add_flags(flags)
    return flags


if __name__ == "__main__":
    sys.exit(run_command("fine-tune", main, sys.argv[1:]))
