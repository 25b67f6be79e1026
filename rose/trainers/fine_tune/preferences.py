"""Direct preference optimization of what is served: TRL's DPOTrainer with the settings of `--fine-tune`.

Owns the preferences as TRL wants them, and the reference model. Promises that one pair at a time is computed,
because TRL's loss is a mean over its batch, and that an optimizer step has the gradients of all its pairs.
Source: Rafailov et al., Direct Preference Optimization (2023).
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers import Trainer, TrainerCallback

from rose.errors import ConfigError
from rose.node.fine_tune.examples import Preference
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.trainer import on_one_gpu


class Preferences:
    """The pairs that have a token to learn within ``length``. Raises: ConfigError if there is none."""

    def __init__(self, pairs: Sequence[Preference], tokenizer: Any, length: int) -> None:
        self.length = length
        self.longest = 0
        """The number of tokens of the longest prompt with an answer."""
        self.kept: list[Preference] = []
        for pair in pairs:
            prompt, *answers = (
                len(tokenizer.encode(text)) for text in (pair.prompt, pair.chosen, pair.rejected)
            )
            if prompt < length:
                self.kept.append(pair)
                self.longest = max(self.longest, min(length, prompt + max(answers) + 1))
        if not self.kept:
            raise ConfigError(
                f"of {len(pairs)} preferences none has an answer within its first {length} tokens: shorten "
                "the prompts or raise --fine-tune-tokens"
            )


def preference_trainer(
    preferences: Preferences,
    *,
    model: Any,
    reference: Any,
    tokenizer: Any,
    slack: SlackCallback,
    settings: dict[str, Any],
    callbacks: list[TrainerCallback],
) -> Trainer:
    """Returns TRL's trainer. ``reference``: the model before training, whose passes ask for grants too.

    ``settings`` are those of transformers' TrainingArguments; the batch of a device becomes the number of
    pairs in an optimizer step.
    """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = settings.pop("per_device_train_batch_size")
    arguments = on_one_gpu(
        DPOConfig(
            max_length=preferences.length,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=pairs,
            gradient_checkpointing=False,
            **settings,
        )
    )
    slack.guard(reference)
    trainer: Trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=Dataset.from_list([asdict(pair) for pair in preferences.kept]),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    return trainer
