"""One rollout phase: groups of samples of the same prompt, all asked for at once, with long-tailed lengths.

Owns the turns' prompts and lengths. Promises the same turns for the same seed, each of exactly its length,
and that every turn is waited for. Never retries: that is the router's part. Runs as a process of its own:
``python benchmarks/lib/load/groups.py --url http://127.0.0.1:8100 --model rollout --out phase.json``
"""

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp

from rose.measure.completions import SESSION_HEADER, open_session, stream_completion
from rose.measure.records import RequestRecord
from rose.measure.rollout_load import NICE
from rose.node.control import completion_body

MEDIAN_TOKENS, SIGMA = 96, 0.8
"""The lengths are distributed log-normally: three quarters end within a third of the longest."""
MIN_TOKENS, MAX_TOKENS = 8, 512
PROMPT_TOKENS = 160
"""A block of the KV cache, which the samples of a group share, and a part of another."""
STREAM_INTERVAL = 8
"""Tokens per event."""
MAX_KEPT_ERRORS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTurn:
    """One turn of the phase."""

    name: str
    prompt: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """What became of a phase; times on CLOCK_MONOTONIC."""

    start_s: float
    end_s: float
    """When the last turn ended."""
    num_turns: int
    num_failed: int
    errors: list[str]
    """The first ones."""
    tokens: dict[str, int]
    """How many each worker made, by its id."""
    p75_s: float
    """When three quarters of the turns had ended, from the start."""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))


def samples(num_groups: int, group_size: int, vocab_size: int, seed: int) -> list[GroupTurn]:
    """Draws a phase's turns, group by group."""
    by_chance = random.Random(seed)
    found = []
    for group in range(num_groups):
        prompt = [by_chance.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        for number in range(group_size):
            length = round(by_chance.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))
            num_tokens = max(MIN_TOKENS, min(MAX_TOKENS, length))
            found.append(GroupTurn(name=f"{seed}-{group}-{number}", prompt=prompt, num_tokens=num_tokens))
    return found


async def play(
    url: str, model: str, turns: Sequence[GroupTurn], start_s: float, cache_salt: str | None
) -> PhaseResult:
    """Sends all turns at ``start_s``; returns once the last one has ended."""
    async with open_session() as session:
        await asyncio.sleep(max(start_s - time.monotonic(), 0.0))
        records = await asyncio.gather(*(_turn(session, url, model, turn, cache_salt) for turn in turns))
    is_failed = [not record.is_complete for record in records]
    tokens: Counter[str] = Counter()
    for record in records:
        for span in record.rose.get("spans", ()):
            tokens[span["worker"]] += span["tokens"]
    ends_s = sorted(record.ended_s for record in records)
    return PhaseResult(
        start_s=start_s,
        end_s=ends_s[-1],
        num_turns=len(turns),
        num_failed=sum(is_failed),
        errors=[str(record.error) for record in records if record.error is not None][:MAX_KEPT_ERRORS],
        tokens=dict(tokens),
        p75_s=ends_s[math.ceil(0.75 * len(ends_s)) - 1] - start_s,
    )


async def _turn(
    session: aiohttp.ClientSession, url: str, model: str, turn: GroupTurn, cache_salt: str | None
) -> RequestRecord:
    record = RequestRecord(request_id=turn.name, prompt=turn.prompt, max_tokens=turn.num_tokens)
    body: dict[str, Any] = completion_body(model, turn.prompt, turn.num_tokens, temperature=1.0)
    body["stream_interval"] = STREAM_INTERVAL
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    await stream_completion(session, url, body, record, headers={SESSION_HEADER: turn.name})
    return record


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="One rollout phase of groups that share prompts.")
    parser.add_argument("--url", required=True, help="router, e.g. http://127.0.0.1:8100")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--out", required=True, type=Path, help="JSON object with the result")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=64)
    parser.add_argument("--start-at", type=float, help="time.monotonic() to start at")
    parser.add_argument("--cache-salt", help="keeps this phase out of other phases' prefix cache")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    """Plays one phase and writes its result."""
    args = _parser().parse_args()
    os.nice(NICE)
    turns = samples(args.groups, args.group_size, args.vocab_size, args.seed)
    start_s = args.start_at if args.start_at is not None else time.monotonic()
    found = asyncio.run(play(args.url, args.model, turns, start_s, args.cache_salt))
    args.out.write_text(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
