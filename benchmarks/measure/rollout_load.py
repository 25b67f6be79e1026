"""Closed-loop rollout load: a fixed number of multi-turn trajectories, always busy.

Owns the shape of the rollout traffic and its token count. Promises the same prompts for the same
seed and the same answers, and that a turn aborted by ROSE goes on from its partial tokens. Never trains:
actions are sampled tokens, observations are random ones. Runs as a process of its own:
``python -m rose.measure.rollout_load --url http://127.0.0.1:8001 --model tiny --out load.json``
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from rose.measure.completions import SESSION_HEADER, Clock, open_session, stream_completion
from rose.measure.load_process import add_load_arguments, reporting
from rose.measure.records import RequestRecord
from rose.node.control import completion_body

STREAM_INTERVAL = 8
"""Tokens per event: enough to count by the second, at an eighth of the client's CPU."""
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
MAX_KEPT_ERRORS = 5
NICE = 10
"""A trainer's machine is another one: its work must not take the serving host's CPUs first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorkload:
    """Shape of the trajectories: a task prompt, then turns of an action and an observation."""

    task_tokens: int = 96
    min_action_tokens: int = 16
    max_action_tokens: int = 64
    observation_tokens: int = 24
    turns: int = 6
    max_trajectories: int | None = None
    """How many each place plays; None: for as long as the window is open."""
    tool_s: tuple[float, float] = (0.0, 0.0)
    """Shortest and longest run of the tool between two turns."""
    vocab_size: int = 1000
    temperature: float = 1.0
    seed: int = 0

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence a trajectory can reach: what the engine's max_model_len must allow."""
        return self.task_tokens + self.turns * (self.max_action_tokens + self.observation_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLoadResult:
    """What one window of rollout load produced; times on CLOCK_MONOTONIC."""

    start_s: float
    duration_s: float
    rollout_tokens: int
    tokens_by_second: tuple[int, ...]
    turns: int
    trajectories: int
    aborts: dict[str, int]
    """Aborted turns by stop reason; each was resumed from its partial tokens."""
    errors: int
    first_errors: tuple[str, ...] = field(default=())
    later_prompt_tokens: int = 0
    """The prompts of all turns after their trajectory's first."""
    later_cached_tokens: int = 0
    """How many of these the prefix cache had; 0 unless the engine has --enable-prompt-tokens-details."""

    @property
    def tokens_per_s(self) -> float:
        """Mean rollout throughput of the window."""
        return self.rollout_tokens / self.duration_s if self.duration_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON object."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "RolloutLoadResult":
        """Inverse of to_json."""
        fields = {key: value for key, value in row.items() if key != "tokens_per_s"}
        fields["tokens_by_second"] = tuple(fields["tokens_by_second"])
        fields["first_errors"] = tuple(fields["first_errors"])
        return cls(**fields)


class RolloutLoad:
    """``concurrency`` trajectories at a time against a router or an engine."""

    def __init__(
        self,
        url: str,
        model: str,
        workload: RolloutWorkload,
        *,
        concurrency: int,
        now: Clock = time.monotonic,
        cache_salt: str | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"need at least one trajectory at a time, got {concurrency=}")
        self._url = url.rstrip("/")
        self._model = model
        self._workload = workload
        self._concurrency = concurrency
        self._now = now
        self._cache_salt = cache_salt
        self._stop = asyncio.Event()
        self._start_s = 0.0
        self._end_s: float | None = None
        self._by_second: Counter[int] = Counter()
        self._aborts: Counter[str] = Counter()
        self._turns = self._trajectories = self._errors = 0
        self._later_prompt = self._later_cached = 0
        self._first_errors: list[str] = []

    async def run(self, *, duration_s: float, start_s: float | None = None) -> RolloutLoadResult:
        """Keep the trajectories running for at most ``duration_s``; turns in flight are cancelled then."""
        self._start_s = start_s if start_s is not None else self._now()
        await asyncio.sleep(max(self._start_s - self._now(), 0.0))
        async with open_session() as session:
            tasks = [asyncio.create_task(self._play(session, slot)) for slot in range(self._concurrency)]
            ends: list[asyncio.Future[Any]] = [asyncio.gather(*tasks), asyncio.create_task(self._stop.wait())]
            remaining_s = self._start_s + duration_s - self._now()
            await asyncio.wait(ends, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
            self._end_s = self._now()
            for end in ends:
                end.cancel()
            outcomes = await asyncio.gather(*tasks, *ends, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return self.result()

    def stop(self) -> None:
        """End the window now."""
        self._stop.set()

    def result(self) -> RolloutLoadResult:
        """The window so far, or the whole one once ``run`` has returned."""
        duration_s = (self._end_s if self._end_s is not None else self._now()) - self._start_s
        seconds = max(1, int(duration_s + 0.999))
        return RolloutLoadResult(
            start_s=self._start_s,
            duration_s=duration_s,
            rollout_tokens=sum(self._by_second.values()),
            tokens_by_second=tuple(self._by_second[second] for second in range(seconds)),
            turns=self._turns,
            trajectories=self._trajectories,
            aborts=dict(self._aborts),
            errors=self._errors,
            first_errors=tuple(self._first_errors),
            later_prompt_tokens=self._later_prompt,
            later_cached_tokens=self._later_cached,
        )

    def progress(self) -> dict[str, Any]:
        """What to show so far; tok_s is the rate over the last five whole seconds."""
        elapsed_s = (self._end_s if self._end_s is not None else self._now()) - self._start_s
        second = int(elapsed_s)
        recent = range(max(0, second - 5), second)
        return {
            "t_s": round(elapsed_s, 3),
            "rollout_tokens": sum(self._by_second.values()),
            "tok_s": sum(self._by_second[s] for s in recent) / max(1, len(recent)),
            "turns": self._turns,
            "trajectories": self._trajectories,
            "aborts": dict(self._aborts),
            "errors": self._errors,
        }

    async def _play(self, session: aiohttp.ClientSession, slot: int) -> None:
        work = self._workload
        for number in itertools.count() if work.max_trajectories is None else range(work.max_trajectories):
            rng = random.Random(f"{work.seed}/{slot}/{number}")
            session_id = f"load-{work.seed}-{slot}-{number}"
            context = _random_tokens(rng, work.task_tokens, work.vocab_size)
            for turn in range(work.turns):
                if turn > 0:
                    await asyncio.sleep(rng.uniform(*work.tool_s))
                    self._later_prompt += len(context)
                num_action = rng.randint(work.min_action_tokens, work.max_action_tokens)
                context += await self._take_turn(session, session_id, context, num_action, is_first=turn == 0)
                context += _random_tokens(rng, work.observation_tokens, work.vocab_size)
                self._turns += 1
            self._trajectories += 1

    async def _take_turn(
        self,
        session: aiohttp.ClientSession,
        session_id: str,
        context: list[int],
        num_action: int,
        *,
        is_first: bool,
    ) -> list[int]:
        """One action of exactly ``num_action`` tokens, however often it is aborted on the way."""
        action: list[int] = []
        backoff_s = FIRST_BACKOFF_S
        while len(action) < num_action:
            body = self._body([*context, *action], num_action - len(action))
            record = RequestRecord(max_tokens=num_action - len(action))
            await stream_completion(
                session,
                self._url,
                body,
                record,
                now=self._now,
                headers={SESSION_HEADER: session_id},
                on_tokens=self._count_tokens,
            )
            if not is_first and not action:
                self._later_cached += record.num_cached_tokens or 0
            action += record.token_ids
            self._note_outcome(record)
            if len(action) >= num_action:
                break
            if record.token_ids:
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        return action

    def _body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        body = completion_body(self._model, prompt, max_tokens, temperature=self._workload.temperature)
        body |= {"stream_interval": STREAM_INTERVAL, "stream_options": {"include_usage": True}}
        if self._cache_salt is not None:
            body["cache_salt"] = self._cache_salt
        return body

    def _count_tokens(self, count: int) -> None:
        self._by_second[int(self._now() - self._start_s)] += count

    def _note_outcome(self, record: RequestRecord) -> None:
        if record.error is not None:
            self._errors += 1
            if len(self._first_errors) < MAX_KEPT_ERRORS:
                self._first_errors.append(record.error)
        elif record.finish_reason == "abort":
            self._aborts[record.stop_reason or "unknown"] += 1


def _random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


async def _run(args: argparse.Namespace) -> None:
    workload = RolloutWorkload(
        task_tokens=args.task_tokens, turns=args.turns, vocab_size=args.vocab_size, seed=args.seed
    )
    load = RolloutLoad(
        args.url, args.model, workload, concurrency=args.concurrency, cache_salt=args.cache_salt
    )
    async with reporting(load):
        result = await load.run(duration_s=args.duration_s, start_s=args.start_at)
        args.out.write_text(json.dumps(result.to_json()) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rose.measure.rollout_load", description="Closed-loop multi-turn rollout traffic."
    )
    add_load_arguments(
        parser, url="router or engine, e.g. http://127.0.0.1:8001", out="JSON object with the result"
    )
    parser.add_argument("--concurrency", type=int, default=8, help="trajectories at a time")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--task-tokens", type=int, default=96, help="tokens of a trajectory's first prompt")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 2 with one line for bad input."""
    args = _parser().parse_args(argv)
    if args.concurrency < 1:
        print(
            f"rose.measure.rollout_load: --concurrency must be at least 1, got {args.concurrency}",
            file=sys.stderr,
        )
        return 2
    os.nice(NICE)
    asyncio.run(_run(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
