"""The trainer behind `rose serve --fine-tune`: transformers' Trainer, or TRL's for preferences and rewards,
as a guest of the serving engine.

`python -m rose.trainers.fine_tune.command --model MODEL --data FILE --pool NAME --relay URL --run RUN ...`

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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from rose.arguments import CommandParser, positive_int, run_command
from rose.errors import ConfigError
from rose.node.fine_tune.examples import Example, Preference, read_examples, read_prompts
from rose.node.signals import take_sigterm_as_sigint
from rose.trainers.fine_tune.adapters import Adapters, MergingPublisher, merge_for_good
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.preferences import Preferences, preference_trainer
from rose.trainers.fine_tune.ranks import HUNG_S, Ranks
from rose.trainers.fine_tune.rewards import RewardedPrompts, load_reward, reward_trainer
from rose.trainers.fine_tune.sequences import Sequences, padded
from rose.trainers.fine_tune.trainer import GuestTrainer, PublishTrained, StepLines, on_one_gpu
from rose.trainers.publishing import PublishWeights
from rose.transfer.publish.publisher import WeightPublisher

logger = logging.getLogger(__name__)

_LIVE_S = HUNG_S / 2
"""How long a version may take until the engine runs it. The first one is the whole model."""
_MEASURED_PARTS = (4, 2, 1)
"""The pieces are measured at the longest sequence's length, divided by each of these."""


def main(argv: Sequence[str]) -> int:
    """Trains until the data ends or a signal comes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    args = parser().parse_args(list(argv))
    take_sigterm_as_sigint()
    with redirect_stdout(sys.stderr), suppress(KeyboardInterrupt), ExitStack() as stack:
        _train(args, stack)  # transformers prints its metrics
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The model that is trained, and its data."""

    model: Any
    """The model, in single precision."""
    tokenizer: Any
    published: str
    """The data type in which weights are published: that of the checkpoint."""
    data: Sequences | Preferences | RewardedPrompts
    reference: Any = None
    """The model as it is before training, which preferences are compared with."""


def load(args: argparse.Namespace) -> Loaded:
    """Reads the model and the examples. Raises: ConfigError."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{args.model}: not a causal language model ({error})") from error
    published = str(model.dtype).removeprefix("torch.")
    most = getattr(model.config, "max_position_embeddings", args.tokens)
    length = min(args.tokens, most)
    data = _data(args, tokenizer, length)
    model = model.float().to("cuda" if torch.cuda.is_available() else "cpu")
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        published=published,
        data=data,
        reference=copy.deepcopy(model) if isinstance(data, Preferences) else None,
    )


def _data(args: argparse.Namespace, tokenizer: Any, length: int) -> Sequences | Preferences | RewardedPrompts:
    if args.reward is not None:
        prompts, reward = read_prompts(args.data), load_reward(args.reward)
        return RewardedPrompts(prompts, reward, tokenizer, length, args.answer_tokens, args.samples)
    examples = read_examples(args.data)
    pairs = [each for each in examples if isinstance(each, Preference)]
    if pairs:
        return Preferences(pairs, tokenizer, length)
    return Sequences([each for each in examples if isinstance(each, Example)], tokenizer, length)


def make_trainer(
    args: argparse.Namespace,
    loaded: Loaded,
    slack: SlackCallback,
    folder: str,
    callbacks: list[TrainerCallback],
) -> Trainer:
    """Returns a trainer for the loaded model. It is a guest only if ``slack`` is among ``callbacks``."""
    settings, data = _settings(args, folder, is_cpu=not torch.cuda.is_available()), loaded.data
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
        trainer = reward_trainer(data, engine_url=args.engine, **guest)
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
    return trainer


def _publisher(args: argparse.Namespace, loaded: Loaded, adapters: Adapters | None) -> WeightPublisher:
    if adapters is None:
        return WeightPublisher(loaded.model, args.relay, args.run, dtype=loaded.published)
    return MergingPublisher(adapters, args.relay, args.run, loaded.published)


def _publishing(
    args: argparse.Namespace, loaded: Loaded, slack: SlackCallback, publisher: WeightPublisher
) -> TrainerCallback:
    if isinstance(loaded.data, RewardedPrompts):
        # The next answers come from the new weights.
        return PublishWeights(publisher, num_workers=1, ack_timeout_s=_LIVE_S)
    if isinstance(loaded.data, Preferences):
        return PublishWeights(publisher, every_s=args.publish_s)
    return PublishTrained(slack, publisher, args.publish_s)


def save(loaded: Loaded, folder: Path) -> None:
    """Saves the tokenizer and whole weights, in the checkpoint's data type. The model can't be trained after
    it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    merge_for_good(loaded.model)
    loaded.model.to(getattr(torch, loaded.published)).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    logger.info("saved the trained model to %s", folder)


def _train(args: argparse.Namespace, stack: ExitStack) -> None:
    # This joins the trainer's other processes, if there are any, and chooses this one's GPU.
    hung = timedelta(seconds=HUNG_S)
    is_first = PartialState(cpu=not torch.cuda.is_available(), timeout=hung).is_main_process
    stack.enter_context(Ranks.parting("fine-tune"))
    loaded = load(args)
    if args.output is not None and is_first:
        stack.callback(save, loaded, args.output)  # runs after everything that is added below has ended
    slack = SlackCallback(
        args.pool,
        give_way_s=args.give_way_ms / 1000,
        lengths=sorted({max(2, loaded.data.longest // part) for part in _MEASURED_PARTS}),
        cpus=[int(cpu) for cpu in args.cpus.split(",")] if args.cpus is not None else [],
    )
    stack.callback(slack.close)
    adapters = Adapters(loaded.model, args.lora_rank) if args.lora_rank is not None else None
    callbacks: list[TrainerCallback] = [slack]
    if is_first:  # all of them have the same weights
        publisher = _publisher(args, loaded, adapters)
        stack.callback(publisher.close)
        callbacks.append(_publishing(args, loaded, slack, publisher))
        if args.log is not None:
            callbacks.append(StepLines(args.log, slack, publisher))
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rose-fine-tune-"))
    make_trainer(args, loaded, slack, folder, callbacks).train()


def _settings(args: argparse.Namespace, folder: str, *, is_cpu: bool) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "seed": args.seed,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "constant",
        "num_train_epochs": args.epochs,
        "per_device_train_batch_size": args.micro_batch,
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


def parser() -> CommandParser:
    """The command's flags."""
    program = "python -m rose.trainers.fine_tune.command"
    flags = CommandParser(
        program,
        "Fine-tunes a model in the slack of the engine that serves it. rose serve --fine-tune starts it.",
        f"{program} --model ./model --data texts.jsonl --pool gpu0 --relay embedded://host:8400 --run chat",
    )
    flags.add_argument("--model", required=True, help="the model that is served: its folder or hub id")
    data = "JSON lines of texts, of prompts and completions, of preferences, or of prompts for a reward"
    flags.add_argument("--data", required=True, type=Path, help=data)
    flags.add_argument("--pool", required=True, help="the serving engine's pool")
    flags.add_argument("--relay", required=True, help="where new weights go")
    flags.add_argument("--run", required=True, help="the run that the engine follows")
    _add_reward_flags(flags)
    flags.add_argument("--cpus", help="CPUs that stand for the GPU on a host without one")
    flags.add_argument(
        "--learning-rate", type=_positive, default=1e-5, help="learning rate of AdamW (default: %(default)g)"
    )
    flags.add_argument(
        "--lora-rank", type=positive_int, help="train adapters of this rank (default: all weights)"
    )
    flags.add_argument(
        "--micro-batch",
        type=positive_int,
        default=4,
        help="sequences of one optimizer step (default: %(default)s)",
    )
    flags.add_argument(
        "--tokens",
        type=positive_int,
        default=512,
        help="tokens of an example that are trained on (default: %(default)s)",
    )
    flags.add_argument(
        "--epochs",
        type=positive_int,
        default=1,
        help="passes over the data (default: %(default)s)",
    )
    flags.add_argument(
        "--publish-s",
        type=_positive,
        default=60.0,
        help="seconds between two versions that go live; with --reward, each step makes one (default: "
        "%(default)g)",
    )
    flags.add_argument(
        "--give-way-ms",
        type=_positive,
        default=20.0,
        help="how long a request may wait for a piece of training (default: %(default)g)",
    )
    flags.add_argument("--log", type=Path, help="one JSON line for each optimizer step")
    flags.add_argument("--output", type=Path, help="a folder for the trained model")
    flags.add_argument(
        "--seed", type=int, default=0, help="seed of the examples' order (default: %(default)s)"
    )
    return flags


def _add_reward_flags(flags: CommandParser) -> None:
    flags.add_argument("--reward", help="MODULE:FUNCTION that judges the served model's answers")
    flags.add_argument("--engine", help="with --reward: the URL of who answers (default: ROSE_ROUTER_URL)")
    flags.add_argument(
        "--samples", type=positive_int, default=8, help="answers to each prompt (default: %(default)s)"
    )
    flags.add_argument(
        "--answer-tokens",
        type=positive_int,
        default=256,
        help="tokens of the longest answer that a reward judges (default: %(default)s)",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(run_command("fine-tune", main, sys.argv[1:]))
