"""TRL on a ROSE router: its own client for the turns, the relay for the weights.

TRL lets its users plug in these pieces: a ``rollout_func`` and a callback for GRPOTrainer, and a
``weight_transfer`` for AsyncGRPOTrainer (whose rollout worker needs only the router's URL). TRL's classes
stay unmodified. An optimizer step's weights are in the relay before the next rollout. No weight-update group
is opened: TRL's own goes over NCCL from each worker to the trainer, through routes that a router must not
expose, and ends with the first dead worker.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.data_utils import is_conversational
from trl.generation.vllm_client import VLLMClient

from rose.errors import WorkerError
from rose.trainers.router import Announce
from rose.transfer.publish.publisher import WeightPublisher
from rose.types import WeightVersion

ACK_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 60.0
_ACK_POLL_S = 0.05


class RouterRollouts:
    """``GRPOTrainer(rollout_func=RouterRollouts(url), ...)``: TRL's own VLLMClient, pointed at the router.

    The sampling settings are the trainer's. ``announce``: called at the start of each RL step. The router is
    asked for nothing before the first rollout: by then the first weights are published.
    """

    def __init__(self, router_url: str, announce: Announce | None = None) -> None:
        self._router_url = router_url
        self._client: VLLMClient | None = None
        self._announce = announce
        self._announced = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Answers as TRL expects. ``prompts`` has each prompt as often as it is to be answered."""
        step = trainer.state.global_step + 1
        if self._announce is not None and step != self._announced:
            self._announce(step)
            self._announced = step
        if self._client is None:  # waits until the router has a worker
            self._client = VLLMClient(base_url=self._router_url, connection_timeout=CONNECT_TIMEOUT_S)
        ask = self._client.chat if is_conversational({"prompt": prompts[0]}) else self._client.generate
        answer = ask(prompts, **_sampling(trainer.args))
        # Of each position the sampled token alone: the client was asked for no others.
        logprobs = [[position[0] for position in sequence] for sequence in answer["logprobs"]]
        return {**{key: answer[key] for key in ("prompt_ids", "completion_ids")}, "logprobs": logprobs}


def _sampling(args: Any) -> dict[str, Any]:
    return {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p if args.min_p is not None else 0.0,
        "repetition_penalty": args.repetition_penalty,
        "generation_kwargs": args.generation_kwargs,
    }


class PublishWeights(TrainerCallback):
    """``GRPOTrainer(callbacks=[PublishWeights(publisher)], ...)``: each optimizer step becomes a version.

    ``num_workers``: so many must run it before training goes on, whichever: those that die are not waited
    for, and the router gives turns to the newest version alone. 0: rollouts may lag behind by some steps.
    """

    def __init__(
        self, publisher: WeightPublisher, num_workers: int = 0, ack_timeout_s: float = ACK_TIMEOUT_S
    ) -> None:
        self._publisher = publisher
        self._num_workers = num_workers
        self._ack_timeout_s = ack_timeout_s

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Does its part when transformers calls it. Raises: RelayError, WorkerError."""
        self._publish()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publishes after each optimizer step. Raises: RelayError, WorkerError."""
        self._publish()

    def _publish(self) -> None:
        number = self._publisher.publish().version.number
        deadline_s = time.monotonic() + self._ack_timeout_s
        while self._num_acked(number) < self._num_workers:
            if time.monotonic() >= deadline_s:
                raise WorkerError(
                    f"version {number}: {self._num_acked(number)} of {self._num_workers} workers run it "
                    f"after {self._ack_timeout_s:g} s"
                )
            time.sleep(_ACK_POLL_S)

    def _num_acked(self, number: int) -> int:
        return sum(acked >= number for acked in self._publisher.acked().values()) if self._num_workers else 0


class RelayWeights:
    """``AsyncGRPOTrainer(weight_transfer=RelayWeights(relay_url), ...)``: the relay instead of NCCL.

    Workers go on generating while weights are on their way, and change between two steps. Keeps a copy of
    the weights on the host, as TRL hands out each tensor only for a moment.
    """

    def __init__(self, relay_url: str, run_id: str | None = None, **publisher: Any) -> None:
        """``publisher`` has further settings of WeightPublisher."""
        self._relay_url = relay_url
        self._run_id = run_id
        self._settings = publisher
        self._weights: dict[str, torch.Tensor] = {}
        self._publisher: WeightPublisher | None = None

    @property
    def version(self) -> WeightVersion | None:
        """The version that was published last."""
        return self._publisher.version if self._publisher is not None else None

    def init_weight_transfer(self) -> None:
        """Does nothing: there is no group to join."""

    def pause(self) -> None:
        """Does nothing: nothing has to stop."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publishes what TRL streams. Raises: RelayError."""
        for name, tensor in iterator:
            kept = self._weights.get(name)
            if kept is None:
                self._weights[name] = tensor.detach().to("cpu", copy=True)
            else:
                kept.copy_(tensor.detach())
        if self._publisher is None:
            self._publisher = WeightPublisher(self._weights, self._relay_url, self._run_id, **self._settings)
        self._publisher.publish()

    def resume(self) -> None:
        """Does nothing: nothing was stopped."""

    def destroy(self) -> None:
        """Closes the connection. What was published stays in the relay."""
        if self._publisher is not None:
            self._publisher.close()
