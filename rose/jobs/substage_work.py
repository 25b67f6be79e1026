"""The work that `rose sched slowdown` measures: each kind of sub-stage, as a small transformer in torch.

Owns the process that runs it on the cores it is told. Memory shares act as they do in a pipeline: they bound
the rows of a microbatch, and the sequences that decode at once. torch is imported in that process alone.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from rose.scheduler.gpu.substages import SubStageKind
from rose.scheduler.runtime.job.share import confine

if TYPE_CHECKING:
    import torch

WIDTH, NUM_LAYERS, CONTEXT = 256, 4, 256
DECODING = {SubStageKind.ROLLOUT_SMALL: 8, SubStageKind.ROLLOUT_MEDIUM: 256}
"""Sequences that decode a token."""
SEQUENCES = {SubStageKind.ROLLOUT_LARGE: 4, SubStageKind.REFERENCE: 8, SubStageKind.TRAIN: 4}
"""Sequences of `CONTEXT` tokens that are prefilled, scored or trained on."""
DECODE_STEPS = 8
NUM_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOrder:
    """Run a kind on these cores until told to stop."""

    kind: SubStageKind
    memory: float
    cores: tuple[int, ...]


def serve(pipe: Connection) -> None:
    """Runs requests until None comes. Answers each when it is warm, and at its end with a unit's seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, which ends this process
    while (request := pipe.recv()) is not None:
        _move(request.cores)
        work = _work(request.kind, request.memory)
        for _ in range(NUM_WARM_UP):
            work()
        pipe.send("ready")
        pipe.recv()
        began_s = ended_s = time.monotonic()
        num_units = 0
        while num_units == 0 or not pipe.poll():
            work()
            num_units, ended_s = num_units + 1, time.monotonic()
        pipe.recv()
        pipe.send((ended_s - began_s) / num_units)


def _move(cores: Sequence[int]) -> None:
    """Confines all of the process's threads to these cores."""
    import torch

    torch.set_num_threads(len(cores))
    confine(cores)


def _work(kind: SubStageKind, memory: float) -> Callable[[], None]:
    """Returns one unit of a kind's work. The unit is the same for any share of memory."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
    if kind in DECODING:
        return _decode(model, DECODING[kind], memory)
    inputs = torch.randn(SEQUENCES[kind], CONTEXT, WIDTH)
    parts = _parts(inputs, max(1, int(len(inputs) * memory)))

    def forward() -> None:
        with torch.no_grad():
            for part in parts:
                model(part)

    def train() -> None:
        for part in parts:
            model(part).square().mean().backward()
        model.zero_grad()

    return train if kind is SubStageKind.TRAIN else forward


def _decode(model: "torch.nn.Module", num_sequences: int, memory: float) -> Callable[[], None]:
    """Decode steps: every sequence's next token through all weights, and over its cached context."""
    import torch

    cache = torch.randn(num_sequences, CONTEXT, WIDTH)
    parts = _parts(cache, max(8, int(num_sequences * memory)))

    def decode() -> None:
        with torch.no_grad():
            for _ in range(DECODE_STEPS if num_sequences == DECODING[SubStageKind.ROLLOUT_SMALL] else 1):
                for part in parts:
                    query = model(part[:, -1:])
                    torch.nn.functional.scaled_dot_product_attention(query, part, part)

    return decode


def _parts(rows: "torch.Tensor", num: int) -> "list[torch.Tensor]":
    return [rows[start : start + num] for start in range(0, len(rows), num)]
