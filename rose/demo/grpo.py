"""GRPO on multi-turn FrozenLake: TRL's trainer, with our rollouts, publishes and event log hung into it.

Owns: the rollout function, the tokens of a trajectory, what happens around an optimizer step, the training
settings. Promises: the ids sent in a turn are exactly prompt + completion so far, never re-tokenized, so that
a worker's prefix cache always matches; a generated token is masked 1, a token of the environment 0; one JSON
line per step; a step's weights are published after its optimizer step and before the next rollout starts; a
request to stop ends the run between two lines, without waiting for turns in flight. Never opens a connection:
endpoint, announcement and publish are handed in.
"""

import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, TextIO

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from rose.demo.frozenlake import LEVELS, FrozenLakeGame
from rose.measure.records import RequestRecord
from rose.measure.turns import TurnEndpoint
from rose.trainers.router import Announce

logger = logging.getLogger(__name__)

ENTROPY_COEF = 0.02
"""Keeps the policy trying other moves while most groups still see no progress."""

Publish = Callable[[], dict[str, Any]]
"""Makes the trained weights the rollout workers' weights; returns what to log about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """What a run is tuned by.

    With the defaults six seeds went from a mean reward near 0.02 to 0.34-0.91 in 40 steps (mean of the last
    five); the slowest was still climbing, hence 60.
    """

    model_dir: Path
    num_steps: int = 60
    time_limit_s: float = 300.0
    learning_rate: float = 2e-3
    group_size: int = 8
    max_reply_tokens: int = 4
    seed: int = 0

    @property
    def batch_trajectories(self) -> int:
        """Trajectories per step: one group per level."""
        return self.group_size * len(LEVELS)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One finished game as tokens: ``completion_ids`` is everything after the first prompt."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    num_turns: int = 0
    reward: float = 0.0
    is_success: bool = False

    @property
    def num_generated_tokens(self) -> int:
        """Tokens the model wrote."""
        return sum(self.env_mask)

    def append_reply(self, reply: RequestRecord) -> None:
        """Adds generated tokens."""
        self.completion_ids += reply.token_ids
        self.logprobs += reply.logprobs
        self.env_mask += [1] * len(reply.token_ids)

    def append_feedback(self, token_ids: Sequence[int]) -> None:
        """Adds tokens the environment wrote; their logprobs are 0 and never enter the loss."""
        self.completion_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.env_mask += [0] * len(token_ids)


async def play(
    game: FrozenLakeGame,
    tokenizer: PreTrainedTokenizerBase,
    endpoint: TurnEndpoint,
    *,
    session_id: str,
    max_reply_tokens: int,
) -> Trajectory:
    """Plays ``game`` to its end, one completion per turn."""
    trajectory = Trajectory(prompt_ids=encode(tokenizer, game.opening()))
    while not game.is_done:
        context = [*trajectory.prompt_ids, *trajectory.completion_ids]
        reply = await endpoint.complete(session_id, context, max_reply_tokens)
        trajectory.append_reply(reply)
        feedback = game.play(str(tokenizer.decode(reply.token_ids)))
        trajectory.append_feedback(encode(tokenizer, feedback))
    trajectory.num_turns = game.num_turns
    trajectory.reward, trajectory.is_success = game.reward, game.is_success
    return trajectory


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of ``text``, nothing added around them."""
    return list(tokenizer.encode(text, add_special_tokens=False))


class StopTraining(Exception):
    """Ends the run from within a rollout, after a request to stop."""


class FrozenLakeRollouts:
    """TRL's ``rollout_func``: plays a batch of games concurrently. Lives in the trainer's main thread."""

    def __init__(
        self,
        config: TrainingConfig,
        tokenizer: PreTrainedTokenizerBase,
        endpoint: TurnEndpoint,
        announce: Announce | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._endpoint = endpoint
        self._announce = announce
        self._levels = {level.name: level for level in LEVELS}
        self._runner = asyncio.Runner()
        self._playing: asyncio.Task[Any] | None = None
        self.is_stopping = False
        self.batch: list[Trajectory] = []
        self.started_s = self.finished_s = 0.0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """TRL's contract: ids, logprobs and mask per prompt; other keys reach the reward function."""
        if self.is_stopping:
            raise StopTraining
        step = trainer.state.global_step + 1
        self.started_s = time.monotonic()
        if self._announce is not None:
            self._announce(step)
        try:
            self.batch = self._runner.run(self._play_all(prompts, step))
        except asyncio.CancelledError as error:
            raise StopTraining from error
        self.finished_s = time.monotonic()
        return {
            "prompt_ids": [each.prompt_ids for each in self.batch],
            "completion_ids": [each.completion_ids for each in self.batch],
            "logprobs": [each.logprobs for each in self.batch],
            "env_mask": [each.env_mask for each in self.batch],
            "game_reward": [each.reward for each in self.batch],
        }

    def stop(self) -> None:
        """Cancels the rollout in flight, and refuses the next; may be called from a signal handler."""
        self.is_stopping = True
        if self._playing is not None:
            self._runner.get_loop().call_soon_threadsafe(self._playing.cancel)

    def close(self) -> None:
        """Closes the event loop and what lives in it."""
        self._runner.run(self._endpoint.close())
        self._runner.close()

    async def _play_all(self, prompts: list[str], step: int) -> list[Trajectory]:
        self._playing = asyncio.current_task()
        tasks = [
            asyncio.create_task(self._play_one(level_name, f"rl-{self._config.seed}-{step}-{index}"))
            for index, level_name in enumerate(prompts)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            self._playing = None
            for task in tasks:
                task.cancel()

    async def _play_one(self, level_name: str, session_id: str) -> Trajectory:
        return await play(
            FrozenLakeGame(self._levels[level_name]),
            self._tokenizer,
            self._endpoint,
            session_id=session_id,
            max_reply_tokens=self._config.max_reply_tokens,
        )


class StepLog(TrainerCallback):
    """After each optimizer step: publish, write the step's line, see whether to go on."""

    def __init__(
        self, rollouts: FrozenLakeRollouts, events: TextIO, publish: Publish | None, deadline_s: float
    ) -> None:
        self._rollouts = rollouts
        self._events = events
        self._publish = publish
        self._deadline_s = deadline_s

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Called by transformers in the training thread."""
        trained_s = time.monotonic()
        published = self._publish() if self._publish is not None else None
        line = step_record(state.global_step, self._rollouts, trained_s, published)
        self._events.write(json.dumps(line) + "\n")
        self._events.flush()
        if self._rollouts.is_stopping or time.monotonic() >= self._deadline_s:
            control.should_training_stop = True
        return control


def step_record(
    step: int, rollouts: FrozenLakeRollouts, trained_s: float, published: dict[str, Any] | None
) -> dict[str, Any]:
    """The event line of ``step``; ``t_s`` is on CLOCK_MONOTONIC, at the end of the publish."""
    rewards = [each.reward for each in rollouts.batch]
    return {
        "step": step,
        "t_s": time.monotonic(),
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        "success_rate": fmean(each.is_success for each in rollouts.batch),
        "rollout_s": rollouts.finished_s - rollouts.started_s,
        "train_s": trained_s - rollouts.finished_s,
        "publish_s": time.monotonic() - trained_s,
        "publish": published,
        "tokens": sum(each.num_generated_tokens for each in rollouts.batch),
        "turns": sum(each.num_turns for each in rollouts.batch),
        "trajectories": len(rollouts.batch),
    }


def game_reward(game_reward: list[float], **_: Any) -> list[float]:
    """TRL reward function: the environment already scored the trajectory."""
    return game_reward


def load_master(model_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The checkpoint as float32 master weights, and its tokenizer; never asks the hub."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    return model, tokenizer


def run_training(
    config: TrainingConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rollouts: FrozenLakeRollouts,
    events: TextIO,
    publish: Publish | None = None,
) -> None:
    """Trains until ``num_steps``, the time limit or `FrozenLakeRollouts.stop`, whichever comes first."""
    deadline_s = time.monotonic() + config.time_limit_s
    rows = {"prompt": [level.name for level in LEVELS]}
    with tempfile.TemporaryDirectory(prefix="rose-trainer-") as scratch_dir:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            args=_grpo_config(config, scratch_dir),
            train_dataset=Dataset.from_dict(rows),
            reward_funcs=game_reward,
            rollout_func=rollouts,
            callbacks=[StepLog(rollouts, events, publish, deadline_s)],
        )
        try:
            trainer.train()
        except StopTraining:
            logger.info("stopped step=%d", trainer.state.global_step)


def _grpo_config(config: TrainingConfig, output_dir: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=output_dir,
        seed=config.seed,
        max_steps=config.num_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=config.batch_trajectories,
        num_generations=config.group_size,
        max_completion_length=512,
        beta=0.0,
        entropy_coef=ENTROPY_COEF,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=10**9,
        disable_tqdm=True,
    )
