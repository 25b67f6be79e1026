"""transformers' Trainer with microbatches that are split until their pieces fit, and that wait for memory.

Owns the split and the wait. Promises that a split microbatch has the gradients of the whole one. Promises
that a microbatch which finds no memory in time is left out with a line in the log, and that a step whose
microbatches were all left out makes no version. Source: LeMix §IV-B and §IV-D, Algorithm 2 (wait-or-drop).
"""

import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rose.errors import WorkerError
from rose.host_memory import available_and_total
from rose.scheduler.node.memory import MemoryVerdict, WaitOrDrop
from rose.scheduler.node.pieces import Work, num_parts
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.publishing import PublishWeights
from rose.transfer.publish.publisher import WeightPublisher

logger = logging.getLogger(__name__)
_Arguments = TypeVar("_Arguments", bound=TrainingArguments)

_MAX_WAIT_S = 5.0
"""How long a microbatch waits for memory before it is left out."""
_WAIT_S = 0.05

Batch = dict[str, Any]


class GuestTrainer(Trainer):
    """A Trainer beside a serving engine. ``slack`` must be among its callbacks."""

    def __init__(self, *, slack: SlackCallback, **trainer: Any) -> None:
        super().__init__(**trainer)
        self._slack = slack
        self._memory = WaitOrDrop(max_wait_s=_MAX_WAIT_S)

    def training_step(
        self, model: torch.nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Runs the passes of one microbatch, in parts. Returns its loss."""
        total = torch.zeros((), device=self.args.device)
        for part in self._parts(inputs, num_items_in_batch):
            if self._has_memory(part):
                total = total + super().training_step(model, part, num_items_in_batch)
                self._slack.num_trained += 1
            else:
                self._slack.num_left_out += 1
        return total

    def _parts(self, inputs: Batch, num_items: torch.Tensor | int | None) -> Iterator[Batch]:
        guest, ids = self._slack.guest, inputs["input_ids"]
        # Without the number of items, each part's loss would be a mean over the part, and the losses would
        # not add up.
        if guest is None or num_items is None:
            yield inputs
            return
        # All of the trainer's processes have as many.
        parts = int(guest.agree(num_parts(guest.times, Work(*ids.shape), guest.give_way_s)))
        split = {name: tensor.chunk(parts) for name, tensor in inputs.items()}
        for number in range(len(split["input_ids"])):
            yield {name: chunks[number] for name, chunks in split.items()}

    def _has_memory(self, part: Batch) -> bool:
        need_bytes = part["input_ids"].numel() * self._slack.activation_token_bytes
        began_s = time.monotonic()
        while True:
            used_bytes, total_bytes = _memory_use(self.args.device)
            verdict = self._agreed(
                self._memory.decide(
                    need_bytes=need_bytes,
                    used_bytes=used_bytes,
                    total_bytes=total_bytes,
                    waited_s=time.monotonic() - began_s,
                )
            )
            if verdict is MemoryVerdict.RUN:
                return True
            if verdict is not MemoryVerdict.WAIT:
                logger.warning(
                    "a microbatch of %s is left out: it needs %d MB, and %d of %d MB are in use",
                    list(part["input_ids"].shape),
                    need_bytes >> 20,
                    used_bytes >> 20,
                    total_bytes >> 20,
                )
                return False
            if self._slack.guest is not None:
                self._slack.guest.leave()  # serving may be able to free memory only by a step
            time.sleep(_WAIT_S)

    def _agreed(self, verdict: MemoryVerdict) -> MemoryVerdict:
        """Returns the worst verdict of all the trainer's processes."""
        guest, verdicts = self._slack.guest, list(MemoryVerdict)
        return verdicts[int(guest.agree(verdicts.index(verdict)))] if guest is not None else verdict


def _memory_use(device: torch.device) -> tuple[int, int]:
    """Returns the bytes in use and in total on the trainer's device."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        # torch keeps memory that it has freed, and will use that first.
        kept_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return total_bytes - free_bytes - kept_bytes, total_bytes
    available_bytes, total_bytes = available_and_total()
    return total_bytes - available_bytes, total_bytes


class FiniteGradients(TrainerCallback):
    """Ends training ahead of an update that would turn weights into NaN, which would go live and be saved.

    transformers hides such a loss: it logs the mean of the earlier ones in its place.
    """

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises: WorkerError if a gradient is infinite or NaN."""
        gradients = [each.grad for each in kwargs["model"].parameters() if each.grad is not None]
        largest = float(torch.nn.utils.get_total_norm(gradients, math.inf))
        if not math.isfinite(largest):
            raise WorkerError(
                f"step {state.global_step + 1}: a gradient is {largest:g}, so the update is not made, and "
                "the weights stay as they are: use a lower --fine-tune-learning-rate, or look for extreme "
                "examples or rewards"
            )


class PublishTrained(PublishWeights):
    """Publishes weights, but not after optimizer steps that trained nothing."""

    def __init__(self, slack: SlackCallback, publisher: WeightPublisher, every_s: float) -> None:
        super().__init__(publisher, every_s=every_s)
        self._slack = slack
        self._num_trained = 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publishes after a step that has trained something. Raises: RelayError."""
        if self._slack.num_trained > self._num_trained:
            self._num_trained = self._slack.num_trained
            super().on_step_end(args, state, control, **kwargs)


def on_one_gpu(arguments: _Arguments) -> _Arguments:
    """Keeps a trainer from the host's other GPUs. The first one is the engine's, and a model on several would
    get no grants. Call it before the trainer is made."""
    if arguments.device.type == "cuda":  # this counts the GPUs
        arguments._n_gpu = 1
    return arguments


class StepLines(TrainerCallback):
    """Adds a JSON line to a file for each optimizer step: its loss, its reward if there is one, its number,
    and the guest's totals so far. Training goes on without the lines that can't be written."""

    def __init__(self, path: Path, slack: SlackCallback, publisher: WeightPublisher) -> None:
        self._path = path
        self._slack = slack
        self._publisher = publisher
        self._has_failed = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the line once the step's loss is known; t_s is CLOCK_MONOTONIC."""
        guest = self._slack.guest
        if logs is None or "loss" not in logs or guest is None:
            return
        version = self._publisher.version
        line = {
            "t_s": time.monotonic(),
            "step": state.global_step,
            "loss": logs["loss"],
            **({"reward": logs["reward"]} if "reward" in logs else {}),
            "grants": guest.num_grants,
            "computed_s": guest.computed_s,
            "waited_s": guest.waited_s,
            "left_out": self._slack.num_left_out,
            "version": version.number if version is not None else None,
        }
        try:
            with self._path.open("a") as lines:
                lines.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s lacks lines from step %d on: %s", self._path, state.global_step, error)
            self._has_failed = True
