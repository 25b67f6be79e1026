"""The options of `rose serve --fine-tune`, and the checks that are possible before anything is started.

Promises one clear line about bad input. Imports neither torch nor vllm.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rose.config import Section, parse_config
from rose.errors import ConfigError, install_hint
from rose.host_memory import available_bytes
from rose.memory.pool.sizing import model_folder
from rose.node.fine_tune.examples import Preference, read_examples, read_prompts
from rose.scheduler.node.pieces import GIVE_WAY_S

PREFIX = "fine_tune_"
PUBLISH_S = 60.0
"""Seconds between two versions, unless they are set or a reward makes each step one."""
_PACKAGES = ("transformers", "accelerate")
_TRL_PACKAGES = ("trl", "datasets")
"""What preferences and rewards need besides."""
_TRAINED_BYTES = 16
"""Bytes of a parameter in the trainer: weight, gradient and Adam's two moments, in single precision."""
_ADAPTED_BYTES = 8
"""The same with adapters: the frozen weight and the merged weight."""
_REFERENCE_BYTES = 4
"""The same for the reference model, which preferences need: the weight."""
_COPIES = 4
"""Copies of the published weights on the host: the trainer's kept copy, the relay's snapshot and deltas, and
the mirror."""
_WEIGHT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class FineTuneOptions(Section):
    """The settings of one fine-tuning."""

    data: Path
    """The JSON Lines file with the examples, or with prompts if there is a reward."""
    reward: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] | None = None
    """The function that judges answers of the served model, as MODULE:FUNCTION. The model is trained by GRPO
    to get more of it."""
    samples: Annotated[int, Field(gt=1)] = 8
    """The answers to each prompt, which GRPO compares with each other. Only with a reward."""
    answer_tokens: Annotated[int, Field(gt=0)] = 256
    """The longest answer that a reward judges, in tokens. Only with a reward."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """The constant learning rate of AdamW."""
    lora_rank: Annotated[int, Field(gt=0)] | None = None
    """The rank of the adapters that are trained instead of all weights. None trains all weights."""
    micro_batch: Annotated[int, Field(gt=0)] = 4
    """Sequences of one optimizer step; with a reward, prompts. They are trained in parts if a part of a layer
    would take longer than a request may wait."""
    processes: Annotated[int, Field(gt=0)] = 1
    """The trainer's processes, each on a GPU of its own among those of the engine. Each has a microbatch.

    Without GPUs they share the engine's CPUs."""
    tokens: Annotated[int, Field(gt=1)] = 512
    """Tokens of an example that are trained on; the rest is cut off."""
    epochs: Annotated[int, Field(gt=0)] = 1
    """How often the data is gone through. Then the trainer ends, and serving goes on."""
    publish_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds between two versions that go live. Each empties serving's prefix cache. None: `PUBLISH_S`,
    and with a reward each step, whose answers have to come from the newest weights."""
    give_way_ms: Annotated[float, Field(gt=0)] = 1000 * GIVE_WAY_S
    """How long a request may wait for a piece of training, where a layer's pass can be made so short."""
    log: Path | None = None
    """A file to which each optimizer step adds a JSON line."""
    output: Path | None = None
    """The folder that gets the trained model and its tokenizer when training ends or is stopped. None keeps
    the trained weights only in the engine."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The seed of the examples' order."""

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        if self.reward is None:
            for name in ("samples", "answer_tokens"):
                if name in self.model_fields_set:
                    raise ValueError(f"{flag(name)} needs {flag('reward')}")
        elif self.publish_s is not None:
            raise ValueError(
                f"{flag('publish_s')} does not go with {flag('reward')}, where each step makes a version: "
                f"leave it out, or make steps longer with {flag('micro_batch')}"
            )
        elif self.answer_tokens >= self.tokens:
            raise ValueError(
                f"{flag('answer_tokens')} {self.answer_tokens} leaves no token for prompts: use less, or "
                f"raise {flag('tokens')} {self.tokens}"
            )
        return self

    def within(self, max_model_len: str | None) -> Self:
        """Returns the settings for an engine with this --max-model-len. It refuses a request whose prompt and
        longest answer have more tokens, so such prompts of a reward are left out.

        Raises: ConfigError if the answers alone are longer.
        """
        if self.reward is None or max_model_len is None or not max_model_len.isdigit():
            return self
        most = int(max_model_len)
        if self.answer_tokens >= most:
            raise ConfigError(
                f"{flag('answer_tokens')} {self.answer_tokens} leaves no token for prompts within "
                f"--max-model-len {most}: lower the one or raise the other"
            )
        return self.model_copy(update={"tokens": most}) if most < self.tokens else self


HELP = {
    "reward": (
        "MODULE:FUNCTION",
        "a reward function as TRL takes it: DATA has prompts, the served model answers them, and GRPO trains "
        "it to get more reward",
    ),
    "samples": ("N", "answers to each prompt of a reward (default: %(default)s)"),
    "answer_tokens": ("N", "tokens of the longest answer that a reward judges (default: %(default)s)"),
    "learning_rate": ("RATE", "learning rate of AdamW (default: %(default)s)"),
    "lora_rank": ("N", "train adapters of this rank, and publish the merged weights (default: all weights)"),
    "micro_batch": (
        "N",
        "sequences of one optimizer step; trained in parts if they take too long (default: %(default)s)",
    ),
    "processes": (
        "N",
        "trainer processes, one on each of the engine's GPUs; each has a microbatch (default: %(default)s)",
    ),
    "tokens": ("N", "tokens of an example that are trained on; the rest is cut off (default: %(default)s)"),
    "epochs": ("N", "passes over the data (default: %(default)s)"),
    "publish_s": (
        "S",
        f"seconds between two versions that go live (default: {PUBLISH_S:g}; with a reward, each step)",
    ),
    "give_way_ms": ("MS", "how long a request may wait for a piece of training (default: %(default)s)"),
    "log": ("FILE", "file that gets a JSON line for each optimizer step"),
    "output": (
        "DIR",
        "a new folder for the trained model, saved at the end and on a stop signal (default: the weights "
        "live as long as the engine)",
    ),
    "seed": ("N", "seed of the examples' order (default: %(default)s)"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --fine-tune and its options."""
    flags = parser.add_argument_group("fine-tuning in the slack of a serving engine")
    flags.add_argument(
        "--fine-tune",
        metavar="DATA",
        help='a file of JSON lines, {"text": ...}, {"prompt": ..., "completion": ...} or {"prompt": ..., '
        '"chosen": ..., "rejected": ...}, or {"prompt": ...} or {"messages": [...]} with --fine-tune-reward: '
        "the model is trained on them while it serves, and its new weights go live in the engine",
    )
    for name, (metavar, note) in HELP.items():
        default = FineTuneOptions.model_fields[name].default
        flags.add_argument(flag(name), metavar=metavar, help=note.replace("%(default)s", f"{default}"))


def flag(name: str) -> str:
    """Returns the flag of a setting."""
    return "--fine-tune" if name == "data" else f"--{(PREFIX + name).replace('_', '-')}"


def take_options(given: dict[str, Any]) -> FineTuneOptions | None:
    """Removes the settings from the flags that were ``given`` and returns them; None without --fine-tune.

    Raises: ConfigError for a bad value, or for a setting without --fine-tune.
    """
    found = {name.removeprefix(PREFIX): given.pop(name) for name in list(given) if name.startswith(PREFIX)}
    data = given.pop("fine_tune", None)
    if data is None:
        if found:
            raise ConfigError(f"{flag(min(found))}: there is nothing to train on; add --fine-tune DATA")
        return None
    return parse_config({"data": data, **found}, FineTuneOptions, "flags", flag)


def check(options: FineTuneOptions, model: str, num_gpus: int = 0) -> None:
    """Raises: ConfigError if data, packages, folders, GPUs or memory do not allow the trainer to start.

    num_gpus: those of the engine; 0 without GPUs, where all processes compute on the engine's CPUs.
    """
    if 0 < num_gpus < options.processes:
        raise ConfigError(
            f"{flag('processes')} {options.processes}: each process needs a GPU of the engine, which has "
            f"{num_gpus}; use at most {num_gpus}, or a larger --tensor-parallel-size"
        )
    has_preferences = False
    if options.reward is not None:
        read_prompts(options.data)
        check_reward(options.reward)
    else:
        has_preferences = isinstance(read_examples(options.data)[0], Preference)
    needs_trl = options.reward is not None or has_preferences
    needed = (*_PACKAGES, *(_TRL_PACKAGES if needs_trl else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--fine-tune needs {', '.join(missing)}, not installed; {install_hint('train')}")
    if options.log is not None:
        check_log(options.log)
    if options.output is not None:
        check_output(options.output)
    folder = model_folder(model)
    if folder is not None:
        if options.output is not None:
            check_space(options.output, _weight_bytes(folder))
        trained_bytes = _TRAINED_BYTES if options.lora_rank is None else _ADAPTED_BYTES
        trained_bytes += _REFERENCE_BYTES if has_preferences else 0
        trained_ratio = options.processes * trained_bytes / _dtype_bytes(folder)
        check_memory(_weight_bytes(folder), trained_ratio, available_bytes())


def check_reward(reward: str) -> None:
    """Raises: ConfigError if there is no such module. Imports nothing: that is left to the trainer."""
    package = reward.partition(":")[0].partition(".")[0]
    found = PathFinder.find_spec(package, [os.getcwd(), *sys.path]) or importlib.util.find_spec(package)
    if found is None:
        raise ConfigError(
            f"{flag('reward')} {reward}: there is no module {package} in this folder or among the installed "
            "ones; put it here, or add its folder to PYTHONPATH"
        )


def check_log(file: Path) -> None:
    """Raises: ConfigError if no line can be added to the file."""
    if not file.parent.is_dir():
        raise ConfigError(f"{flag('log')} {file}: there is no folder {file.parent}; make it")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{flag('log')} {file}: it is a folder or can't be written to; choose another")


def check_output(folder: Path) -> None:
    """Makes the output folder. Raises: ConfigError if the model can't be saved there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        reason = f"{error.strerror}: {str(error.filename)!r}"
        raise ConfigError(f"{flag('output')} {folder}: can't be made ({reason}); choose another") from error
    if not is_empty:
        raise ConfigError(f"{flag('output')} {folder}: it is not empty; choose another, or empty it")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag('output')} {folder}: it can't be written to; choose another")


def check_space(folder: Path, weight_bytes: int) -> None:
    """Raises: ConfigError if the disk of the output folder has no room for the model."""
    free_bytes = shutil.disk_usage(folder).free
    if weight_bytes > free_bytes:
        raise ConfigError(
            f"{flag('output')} {folder}: the model takes {weight_bytes / 1e9:.1f} GB, and its disk has "
            f"{free_bytes / 1e9:.1f} GB free: free some, or choose a folder on another disk"
        )


def check_memory(weight_bytes: int, trained_ratio: float, free_bytes: int) -> None:
    """Raises: ConfigError if the host's memory does not hold the served model, the trained one and the
    copies.

    ``trained_ratio``: the size of what the trainer keeps, in copies of the served weights.
    """
    need_bytes = (1 + trained_ratio + _COPIES) * weight_bytes
    if need_bytes > free_bytes:
        raise ConfigError(
            f"--fine-tune: a model of {weight_bytes / 1e9:.1f} GB needs {need_bytes / 1e9:.1f} GB to be "
            f"served and trained, and {free_bytes / 1e9:.1f} GB are free: use a smaller model, "
            "more memory, or --fine-tune-lora-rank"
        )


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _dtype_bytes(folder: Path) -> int:
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return 2
    return _WEIGHT_BYTES.get(str(config.get("dtype", config.get("torch_dtype"))), 2)
