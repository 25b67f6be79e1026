"""Publishing a trainer's weights after optimizer steps: a callback for transformers' and TRL's trainers.

Needs only transformers.
"""

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rose.errors import WorkerError
from rose.transfer.publish.publisher import SyncReport, WeightPublisher

ACK_TIMEOUT_S = 60.0
_ACK_POLL_S = 0.05


def publish_and_wait(publisher: WeightPublisher, num_workers: int, ack_timeout_s: float) -> SyncReport:
    """Publishes a version, and returns when this many workers run it, whichever they are. Raises: RelayError;
    WorkerError if they don't in time."""
    report = publisher.publish()
    number = report.version.number
    deadline_s = time.monotonic() + ack_timeout_s
    while (num_acked := _num_acked(publisher, number) if num_workers else 0) < num_workers:
        if time.monotonic() >= deadline_s:
            raise WorkerError(
                f"version {number}: {num_acked} of {num_workers} workers run it after {ack_timeout_s:g} s"
            )
        time.sleep(_ACK_POLL_S)
    return report


def _num_acked(publisher: WeightPublisher, number: int) -> int:
    return sum(acked >= number for acked in publisher.acked().values())


class PublishWeights(TrainerCallback):
    """``Trainer(callbacks=[PublishWeights(publisher)], ...)``: each optimizer step becomes a version.

    ``every_s``: steps within this many seconds become one version. The last steps always become one.
    ``num_workers``: the number of workers, whichever they are, that must run a version before training goes
    on. Workers that die are not waited for, because the router gives turns only to the newest version. With
    0, training goes on at once, and the router's version_mode says how far rollouts may lag behind, if
    ROSE_ROUTER_URL names the router, so that it is told of each version. Otherwise the first turns of a step
    may get older weights. A trainer that publishes faster than workers take versions needs version_mode
    max-lag, or ``num_workers`` of 1 or more.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        num_workers: int = 0,
        ack_timeout_s: float = ACK_TIMEOUT_S,
        every_s: float = 0.0,
    ) -> None:
        self.report: SyncReport | None = None
        """What the last publish sent; None until the first one."""
        self._publisher = publisher
        self._num_workers = num_workers
        self._ack_timeout_s = ack_timeout_s
        self._every_s = every_s
        self._due_s = 0.0
        self._is_behind = False
        """Whether steps were taken since the last version."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publishes the first version. Raises: RelayError, WorkerError."""
        self._publish()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publishes after an optimizer step, if it is time. Raises: RelayError, WorkerError."""
        self._is_behind = True
        if time.monotonic() >= self._due_s:
            self._publish()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Publishes the steps that are not in a version yet. Raises: RelayError, WorkerError."""
        if self._is_behind:
            self._publish()

    def _publish(self) -> None:
        self._is_behind, self._due_s = False, time.monotonic() + self._every_s
        self.report = publish_and_wait(self._publisher, self._num_workers, self._ack_timeout_s)
