"""Reinforcement learning of what is served: TRL's GRPOTrainer with the settings of `--fine-tune-reward`.

Owns the prompts as TRL wants them, and the way of their answers: the serving engine gives them, to requests
like those of its users. Promises that a chat is rendered by the tokenizer's chat template, that the trainer
holds no grant while it waits for answers, and that one answer at a time is computed. Source: Shao et al.,
DeepSeekMath (2024), with TRL's default loss, the token-level one of DAPO.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from accelerate import PartialState
from jinja2 import TemplateError
from transformers import Trainer, TrainerCallback

from rose.errors import ConfigError
from rose.node.fine_tune.examples import Messages, Prompt
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.trainer import on_one_gpu

logger = logging.getLogger(__name__)

_ROW = "rose_row"
"""The dataset's column with the number of the prompt."""

Reward = Callable[..., Sequence[float | None]]
"""A reward function of TRL: it gets ``prompts``, ``completions``, ``completion_ids`` and the data's columns,
each a list with an item for each answer."""


def load_reward(name: str) -> Reward:
    """Imports MODULE:FUNCTION. Raises: ConfigError if there is no such function."""
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except Exception as error:
        raise ConfigError(
            f"--fine-tune-reward {name}: {module_name} can't be imported ({error!r})"
        ) from error
    if not callable(function) or not hasattr(function, "__name__"):
        raise ConfigError(f"--fine-tune-reward {name}: {module_name} has no function {function_name}")
    reward: Reward = function
    return reward


class RewardedPrompts:
    """The prompts that leave room for an answer of ``answer_tokens`` within ``length``, and their reward.

    Raises: ConfigError if there is none, or for a chat that the tokenizer has no template for.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        reward: Reward,
        tokenizer: Any,
        length: int,
        answer_tokens: int,
        samples: int,
    ) -> None:
        self.reward = reward
        self.answer_tokens = answer_tokens
        self.samples = samples
        self.kept: list[Prompt] = []
        self.longest = 0
        """The number of tokens of the longest prompt with its longest answer."""
        for each in prompts:
            num_tokens = len(_encoded(each.prompt, tokenizer)) + answer_tokens
            if num_tokens <= length:
                self.kept.append(each)
                self.longest = max(self.longest, num_tokens)
        if not self.kept:
            raise ConfigError(
                f"of {len(prompts)} prompts none leaves room for an answer of {answer_tokens} tokens within "
                f"{length}: shorten the prompts, lower --fine-tune-answer-tokens or raise --fine-tune-tokens"
            )
        if len(self.kept) < len(prompts):
            logger.warning(
                "%d of %d prompts are left out: with an answer they are longer than %d tokens",
                len(prompts) - len(self.kept),
                len(prompts),
                length,
            )

    def judge(self) -> Reward:
        """Returns the reward as TRL is to call it: it gets the columns as they stand in the file, while a
        dataset would give all values of a column one type."""
        reward = self.reward

        def arguments(given: dict[str, Any]) -> dict[str, Any]:
            columns = [self.kept[number].columns for number in given.pop(_ROW)]
            return {**given, **{name: [each[name] for each in columns] for name in columns[0]}}

        @functools.wraps(reward)
        def judged(**given: Any) -> Sequence[float | None]:
            return reward(**arguments(given))

        @functools.wraps(reward)
        async def judged_later(**given: Any) -> Sequence[float | None]:
            awaited: Any = reward(**arguments(given))
            found: Sequence[float | None] = await awaited
            return found

        later: Any = judged_later
        return later if inspect.iscoroutinefunction(reward) else judged


def reward_trainer(
    prompts: RewardedPrompts,
    *,
    model: Any,
    tokenizer: Any,
    engine_url: str | None,
    slack: SlackCallback,
    settings: dict[str, Any],
    callbacks: list[TrainerCallback],
) -> Trainer:
    """Returns TRL's trainer. Publish the weights of each step before the next one: answers are not corrected
    for older weights. ``engine_url``: who answers, an engine or a router; None: that of ROSE_ROUTER_URL.

    ``settings`` are those of transformers' TrainingArguments; the batch of a device becomes the number of
    prompts in an optimizer step. Raises: ConfigError if there are fewer prompts than processes.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    num_processes = PartialState().num_processes
    # TRL leaves out what does not fill a batch: of fewer prompts than a batch has, nothing would be left.
    num_prompts = min(settings.pop("per_device_train_batch_size"), len(prompts.kept) // num_processes)
    if num_prompts == 0:
        raise ConfigError(
            f"{len(prompts.kept)} prompts for {num_processes} trainer processes: add prompts, or lower "
            "--fine-tune-processes"
        )
    arguments = on_one_gpu(
        GRPOConfig(
            per_device_train_batch_size=1,
            gradient_accumulation_steps=num_prompts * prompts.samples,
            num_generations=prompts.samples,
            max_completion_length=prompts.answer_tokens,
            gradient_checkpointing=False,
            **settings,
        )
    )
    rows = [{"prompt": each.prompt, _ROW: number} for number, each in enumerate(prompts.kept)]
    trainer: Trainer = GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=prompts.judge(),
        rollout_func=_answers(engine_url, slack, tokenizer),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    return trainer


def _encoded(prompt: str | Messages, tokenizer: Any) -> list[int]:
    """Returns a prompt's tokens. Raises: ConfigError for a chat that can't be rendered."""
    if isinstance(prompt, str):
        text: list[int] = tokenizer.encode(prompt)
        return text
    if tokenizer.chat_template is None:
        raise ConfigError(
            "--fine-tune: the prompts are chats, and the model's tokenizer has no chat template: add one to "
            "its folder, or give prompts as texts"
        )
    try:
        chat: list[int] = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in prompt)
        raise ConfigError(
            f"--fine-tune: the model's chat template refuses messages of {roles}: {error}"
        ) from error
    return chat


def _answers(
    engine_url: str | None, slack: SlackCallback, tokenizer: Any
) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    from rose.trainers.trl import RouterRollouts

    ask = RouterRollouts(engine_url)  # the engine has the routes that TRL uses of a router

    def answers(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        if slack.guest is not None:
            slack.guest.leave()
            slack.guest.agree(0.0)  # rank 0 comes here once the newest weights are live
        is_chat = bool(prompts) and not isinstance(prompts[0], str)
        return ask([_encoded(each, tokenizer) for each in prompts] if is_chat else prompts, trainer)

    return answers
