"""Makes any Hugging Face or TRL trainer a guest of a serving engine's GPU.

    slack = SlackCallback("gpu0")
    trainer = DPOTrainer(..., callbacks=[slack, PublishWeights(publisher, every_s=60.0)])
    slack.guard(trainer.ref_model)

Owns the trainer's place on the board, from the beginning of training to its end. Promises that the model's
passes and the optimizer's update run under grants, piece by piece, and that training computes the same
weights as without grants. A loss that is computed outside of the model, and work on the host, need no grant.
Tested with transformers' Trainer, and with TRL's SFTTrainer, DPOTrainer and GRPOTrainer.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rose.config import Settings
from rose.errors import ConfigError, WorkerError
from rose.memory.pool.pool import PoolClient
from rose.scheduler.node.pieces import GIVE_WAY_S
from rose.trainers.fine_tune.borders import PassBorders
from rose.trainers.fine_tune.guest import TrainingGuest
from rose.trainers.fine_tune.measuring import measure_pieces
from rose.trainers.fine_tune.ranks import Ranks

logger = logging.getLogger(__name__)


class SlackCallback(TrainerCallback):
    """Lets a trainer compute only while the serving engine of ``pool`` leaves the GPU idle, or lends its
    slack.

    ``give_way_s``: the longest time that a request waits for training, unless a single layer's pass takes
    longer. ``lengths``: sequence lengths at which the pieces are measured before the first step; without them
    the first microbatches are measured. ``cpus``: the CPUs that stand for the GPU on a host without one.
    """

    def __init__(
        self,
        pool: str,
        *,
        give_way_s: float = GIVE_WAY_S,
        lengths: Sequence[int] = (),
        cpus: Sequence[int] = (),
    ) -> None:
        self._pool = pool
        self._give_way_s = give_way_s
        self._lengths = lengths
        self._cpus = cpus
        self._client: PoolClient | None = None
        self._guarded: list[torch.nn.Module] = []
        self._borders: list[PassBorders] = []
        self.guest: TrainingGuest | None = None
        """The place on the board, while it trains."""
        self.activation_token_bytes = 0
        """The bytes that a token of a microbatch keeps until its backward pass; 0 if they were not
        measured."""
        self.num_trained = 0
        """The number of parts of microbatches that a GuestTrainer has trained."""
        self.num_left_out = 0
        """The number of parts that were left out for lack of memory."""
        self._num_trained_before = 0
        """The parts that were trained in the epochs before this one."""

    def guard(self, model: torch.nn.Module | None) -> None:
        """Makes the passes of a further model of the trainer ask for grants too, such as those of a reference
        model: ``slack.guard(trainer.ref_model)``, before training. Does nothing without a model."""
        if model is not None:
            self._guarded.append(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes a place on the board. Raises: PoolError without the pool's daemon; BoardError if every place
        is taken; ConfigError for a model without a list of layers, or on several GPUs."""
        if args.n_gpu > 1:
            raise ConfigError(
                f"the trainer would use {args.n_gpu} GPUs, and the place in pool {self._pool} is on one: set "
                "CUDA_VISIBLE_DEVICES to that of the serving engine"
            )
        self.close()  # what is left of a training that ended with an error
        model: torch.nn.Module = kwargs["model"]
        device = next(model.parameters()).device
        if self._cpus:
            torch.set_num_threads(len(self._cpus))
        runtime_dir = Settings.from_environment().runtime_dir
        ranks = Ranks.of_trainer()
        if ranks is None or ranks.is_leader:
            self._client = PoolClient.observe(self._pool, runtime_dir=runtime_dir)
        synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.guest = TrainingGuest(
            self._client.board_words if self._client is not None else None,
            give_way_s=self._give_way_s,
            synchronize=synchronize,
            cpus=self._cpus,
            ranks=ranks,
        )
        self._borders = [PassBorders(each, self.guest) for each in (model, *self._guarded)]
        for borders in self._borders:
            borders.attach()
        if self._lengths:
            self.activation_token_bytes = measure_pieces(model, self._lengths)
            self.guest.leave()
        optimizer = kwargs.get("optimizer")
        if optimizer is not None:
            self._borders[0].divide_step(getattr(optimizer, "optimizer", optimizer))
        logger.info("guest of pool=%s layers measured at lengths=%s", self._pool, list(self._lengths))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hands the GPU back after an update."""
        self._leave()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hands the GPU back after a microbatch whose gradients are kept for the next one."""
        self._leave()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises: WorkerError if every part of the epoch was left out for lack of memory."""
        if self.num_left_out and self.num_trained == self._num_trained_before:
            raise WorkerError(
                f"nothing of an epoch was trained, {self.num_left_out} parts of microbatches were left out "
                "for lack of memory: use fewer tokens or sequences, a smaller model or more memory"
            )
        self._num_trained_before = self.num_trained

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves the board."""
        self.close()

    def close(self) -> None:
        """Leaves the board and takes the hooks off the model. Idempotent."""
        for borders in self._borders:
            borders.detach()
        self._borders = []
        if self.guest is not None:
            self.guest.close()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _leave(self) -> None:
        if self.guest is not None:
            self.guest.leave()
