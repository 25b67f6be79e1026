"""Updates of a live engine: a trainer, a relay, a subscriber and an engine that streams tokens all the time.

Owns the processes and the times of each update, from the trainer's publish() to the first token under the new
weights. The parts come from the publisher's report, the subscriber's log and the engine's log, and add up to
the whole. Promises that an update that was not written in place is an error.
"""

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from lib.engines.lone import VOCABULARY, LoneModel, write_model
from lib.engines.token_stream import TokenStream
from rose.errors import WorkerError
from rose.measure.rig import Rig
from rose.node.control import EngineControl
from rose.node.processes import ServerProcess
from rose.transfer.format.manifest import worker_name
from rose.transfer.publish.publisher import WeightPublisher
from rose.types import Role

RUN = "live"
CHANGED = 0.01
PROMPT_TOKENS = 100
TOKENS_BEFORE, TOKENS_BEHIND = 24, 8
RELAY_BYTES = 6 << 30
WAIT_S = 300.0
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveUpdate:
    """One version's times, in seconds. The first six follow each other."""

    encode_s: float
    relay_s: float
    """The rest of publish()."""
    follow_s: float
    """From publish()'s end until the mirror of the host has the version: fetched, checked and applied."""
    stage_s: float
    """The engine prepares the changes beside its steps, of which the last one ends here."""
    pause_s: float
    """The engine holds back its steps."""
    token_s: float
    """From there to the next token: the prefix of the stream is computed again."""
    write_s: float
    """Of the pause: the changed elements are written."""
    load_s: float
    """Of the pause: layers that take no elements are loaded from the mirror. On a CPU, vLLM packs them."""
    gap_s: float
    """The longest time between two tokens of the stream while the update was under way."""
    step_s: float
    """The mean time between two tokens ahead of it."""

    @property
    def total_s(self) -> float:
        """From publish() to the first token under the new weights."""
        parts = (self.encode_s, self.relay_s, self.follow_s, self.stage_s, self.pause_s, self.token_s)
        return sum(parts)


class LiveTrainer:
    """Publishes the weights of a checkpoint, of which 1% of the elements change in each version."""

    def __init__(self, model: Path, relay_url: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._weights = {name: each.detach() for name, each in loaded.named_parameters()}
        self.num_bytes = sum(each.nbytes for each in self._weights.values())
        self.publisher = WeightPublisher(self._weights, relay_url, RUN)
        self.close = self.publisher.close

    def step(self, seed: int) -> None:
        change(self._weights, CHANGED, seed)


class EngineLogs:
    """What the subscriber's log and the engine's say of an update."""

    def __init__(self, subscriber: ServerProcess, engine_log: Path) -> None:
        assert subscriber.log_path is not None
        self._subscriber = subscriber.log_path
        self._engine = engine_log
        self._offset_s = time.time() - time.monotonic()

    def at_s(self, text: str) -> float:
        """Returns when the subscriber logged it, on the monotonic clock. Raises: WorkerError."""
        for line in self._subscriber.read_text().splitlines():
            if text in line and (stamp := _STAMP.match(line)) is not None:
                at = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S").timestamp()
                return at + int(stamp[2]) / 1000 - self._offset_s
        raise WorkerError(f"{self._subscriber} does not say {text!r}")

    def last(self, pattern: str) -> re.Match[str]:
        """Returns the last match in the engine's log. Raises: WorkerError."""
        found = list(re.finditer(pattern, self._engine.read_text()))
        if not found:
            raise WorkerError(f"{self._engine} has nothing like {pattern!r}")
        return found[-1]


def change(weights: dict[str, Any], share: float, seed: int) -> None:
    """Moves this share of the elements by one unit of their last place, as an optimizer's step does most of
    them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        bits = tensor.view(torch.int16)
        bits += (torch.rand(bits.shape, generator=generator) < share).to(torch.int16)


def live_updates(size: LoneModel, count: int, seed: int) -> tuple[list[LiveUpdate], int]:
    """Returns the times of `count` updates, behind one that is not counted, and the bytes of the weights."""
    with Rig() as rig:
        model = write_model(rig.folder / "model", size, seed)
        _, relay_url = rig.start_relay("relay", capacity_bytes=RELAY_BYTES)
        with closing(LiveTrainer(model, relay_url)) as trainer, _followed(rig, model, relay_url) as followed:
            engine, logs = followed
            first = trainer.publisher.publish().version
            trainer.publisher.wait_acked(first, [worker_name(engine.url)], WAIT_S)
            rng = Random(seed)
            prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
            engine.complete([prompt], TOKENS_BEFORE)
            found = [_update(engine, logs, trainer, prompt, number) for number in range(1, count + 2)]
            status = engine.status()
            if status.weights_in_place != count + 1:
                raise WorkerError(
                    f"{status.weights_in_place} of {count + 1} updates were written in place: "
                    f"{status.whole_because}"
                )
            return found[1:], trainer.num_bytes  # the first one records the plans


@contextmanager
def _followed(rig: Rig, model: Path, relay_url: str) -> Iterator[tuple[EngineControl, EngineLogs]]:
    """Yields an engine in bfloat16 that follows the run, without a pool."""
    dtype = ("--dtype", "bfloat16", "--max-num-seqs", "2")
    rig.start_engine("live", Role.ROLLOUT, model=model, vllm_args=dtype, relay=relay_url, run=RUN)
    engine = rig.wait_engine("live")
    yield engine, EngineLogs(rig.start_subscriber("live"), rig.log("live"))


def _update(
    engine: EngineControl, logs: EngineLogs, trainer: LiveTrainer, prompt: list[int], number: int
) -> LiveUpdate:
    trainer.step(number)
    with TokenStream(engine, prompt) as stream:
        stream.wait_for(TOKENS_BEFORE)
        began_s = time.monotonic()
        report = trainer.publisher.publish()
        sent_s = time.monotonic()
        trainer.publisher.wait_acked(report.version, [worker_name(engine.url)], WAIT_S)
        stream.wait_for(len(stream.times_s) + TOKENS_BEHIND)
        times_s = list(stream.times_s)
    mirrored_s = logs.at_s(f"mirror moved: version={report.version} ")
    taken_s = logs.at_s(f"worker moved: name={worker_name(engine.url)} version={report.version}")
    held_s = float(logs.last(rf"steps held back for weights: version={report.version} seconds=([\d.]+)")[1])
    written = logs.last(r"elements=\d+ write_s=([\d.]+) layers_loaded=\d+ load_s=([\d.]+)")
    gaps = [(end - begin, begin, end) for begin, end in pairwise(times_s)]
    gap_s, last_at_s, token_at_s = max(gap for gap in gaps if gap[2] > began_s and gap[1] < taken_s)
    before_s = [time_s for time_s in times_s[1:] if time_s < began_s]
    return LiveUpdate(
        encode_s=report.encode_s,
        relay_s=sent_s - began_s - report.encode_s,
        follow_s=mirrored_s - sent_s,
        stage_s=last_at_s - mirrored_s,
        pause_s=held_s,
        token_s=token_at_s - last_at_s - held_s,
        write_s=float(written[1]),
        load_s=float(written[2]),
        gap_s=gap_s,
        step_s=(before_s[-1] - before_s[0]) / (len(before_s) - 1),  # some arrive together
    )
