"""Taking in the stream of an attempt, event by event.

Owns: what a stream says besides its tokens, and the stall clock between events.
Promises: tokens are noted at their place, added to the generation and handed to the client in this order.
Never does: send requests (stream.py), decide how an attempt ended (attempt.py).
"""

import time
from collections.abc import AsyncIterator

from rose.scheduler.rollout.formats.bodies import TokenIds
from rose.scheduler.rollout.formats.completions import Single
from rose.scheduler.rollout.formats.events import Chunk, Event, chunk_of
from rose.scheduler.rollout.formats.shape import Sink
from rose.scheduler.rollout.turn.counters import Counters
from rose.scheduler.rollout.turn.journey import Journey
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.workers.watch import Watch
from rose.types import WeightVersion


def versioned_name(version: WeightVersion) -> str:
    """Returns the model name by which an engine knows one version of an adapter."""
    return f"{version.run_id}@{version.number}"


def named_version(model: str, known: WeightVersion | None) -> WeightVersion | None:
    """Returns the version of the adapter that a stream says it has; the one that is known if it says none."""
    run_id, _, number = model.rpartition("@")
    if known is None or run_id != known.run_id or not number.isdigit():
        return known
    return WeightVersion(run_id=run_id, number=int(number))


class Receiver:
    """Receives one attempt's stream. Lives on the router's event loop."""

    def __init__(
        self,
        single: Single,
        place: Place,
        journey: Journey,
        sink: Sink | None,
        counters: Counters,
        adapter: WeightVersion | None = None,
    ) -> None:
        """`adapter`: the version of the LoRA adapter that makes the tokens, unless the stream names another;
        None: they are the weights'."""
        self._adapter = adapter
        self._single = single
        self._epoch = single.generation.epoch
        self._place = place
        self._journey = journey
        self._sink = sink
        self._counters = counters
        self.cached_tokens: int | None = None
        self.prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: object = None

    async def read(
        self,
        events: AsyncIterator[tuple[Event, TokenIds | None]],
        watch: Watch,
        first_token_s: float,
        stall_s: float,
    ) -> None:
        """Reads to the end; the watch runs out after `first_token_s`, or `stall_s` after tokens."""
        began, allowance_s = time.monotonic(), first_token_s
        watch.allow(allowance_s)
        async for event, prompt_token_ids in events:
            chunk = self._note(event, prompt_token_ids)
            if chunk is None:
                continue
            if chunk.token_ids:
                now, allowance_s = time.monotonic(), stall_s
                self._place.received(len(chunk.token_ids), now, began)
                if self._journey.first_token_at is None:
                    self._journey.first_token_at, self._journey.num_first_tokens = now, len(chunk.token_ids)
            watch.pause()  # a slow client is no stall
            await self._add(chunk)
            watch.allow(allowance_s)

    def _note(self, event: Event, prompt_token_ids: TokenIds | None) -> Chunk | None:
        if event.error is not None:
            self.error = event.error
            return None
        if event.model is not None:
            # By the name that was asked for: the version stands in the answer's spans.
            self._journey.served_model = event.model if self._adapter is None else self._adapter.run_id
            self._adapter = named_version(event.model, self._adapter)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            if event.usage.prompt_tokens_details is not None:
                self.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        if not event.choices:
            return None
        choice = event.choices[0]
        if choice.finish_reason is not None:
            self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason
        return chunk_of(event, prompt_token_ids)

    async def _add(self, chunk: Chunk) -> None:
        worker = self._place.worker
        version = self._adapter if self._adapter is not None else worker.weight_version
        if not self._single.generation.add(self._epoch, chunk, worker.id, version):
            self._counters.late_chunks += 1
        elif self._sink is not None and (chunk.token_ids or chunk.text):
            await self._sink.chunk(self._single, chunk, self._journey.served_model)
