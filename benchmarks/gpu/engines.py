"""A serving and a rollout engine in one pool, beside stock vLLM: answers, moves of slabs, and step times.

The pool is on the GPU (in a dry run in host memory), and too small for the requests of both. All three
engines run the same random model. On a GPU they have the features that vLLM turns on by itself: async
scheduling and CUDA graphs. A slab that leaves an engine is filled with NaN. In each round rollouts lose half
of their slabs while they decode, and then a burst to serving needs some, too. There the gate is off, so both
engines compute at once.

`greedy_equal_moves[ROLE]`: the share of answers that are token for token stock vLLM's; a rollout that was cut
counts as far as it came. Prompts whose greedy tokens rounding decides are left out, as in bench_moves.py.
`slab_moves`: how often slabs changed hands. `cut_ms`: from the cut of rollouts' budget until they hold no
more than it. With the gate on: `step_ratio`, serving's time per output token over stock's, while rollouts are
idle and while they take each moment in which serving is; `yield_ms`, what these add to serving's time to
first token.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from bench_moves import CLEAR_MARGIN
from lib.harness import median_figure

from gpu.rig import MIB, GpuRig
from rose.errors import WorkerError
from rose.measure.completions import open_session, stream_completion
from rose.measure.figures import Figure, latencies_s, percentile
from rose.measure.models import SERVING_SPEC
from rose.measure.records import RequestRecord
from rose.measure.rig import Rig
from rose.memory.pool.pool import PoolClient
from rose.node.control import EngineControl, completion_body
from rose.types import GateMode, Role

POOL, SLAB_BYTES, HEADROOM_SLABS = "kit", 2 * MIB, 3
NUM_SLABS, NUM_HOST_SLABS = 14, 24
"""Either engine's requests take about 10 slabs, on a CPU with its larger blocks 18."""
FEWEST_LEFT = 4
"""Slabs that a cut leaves: the longest request fits, beside the slab that an engine always keeps."""
NUM_PROMPTS, PROMPT_TOKENS, MAX_TOKENS = 12, (64, 320), 96
NUM_MOVES, QUICK_MOVES = 1000, 60
TOKENS_BEFORE_CUT = 4
ROUNDS_S = 200.0
"""The longest time for all rounds, so that their figures come within the ten minutes of a part."""
ANSWER_S, STALL_S, QUIET_S = 120.0, 15.0, 5.0
PAUSE_S = 0.05
"""How long serving is idle between two requests, so that rollouts compute."""
STOCK_FLAGS = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(256 * MIB))
"""Leave room for the other engines."""

Prompts = list[list[int]]
Answers = list[tuple[list[int], str]]
"""The tokens and the finish reason of each prompt."""


def measure(rig: GpuRig) -> list[Figure]:
    """Compares answers and step times with stock vLLM's while slabs move between two engines."""
    flags = () if rig.is_dry else ("--no-enforce-eager",)
    num_moves = QUICK_MOVES if rig.is_quick else NUM_MOVES
    with Rig() as machine, ThreadPoolExecutor(1) as threads:
        server = machine.start_stock_engine("stock", Role.SERVING, *flags, *STOCK_FLAGS)
        num_slabs, model = NUM_HOST_SLABS if rig.is_dry else NUM_SLABS, machine.model(Role.SERVING)
        pool = machine.pool(POOL, num_slabs=num_slabs, slab_bytes=SLAB_BYTES, headroom_slabs=HEADROOM_SLABS)
        settings: dict[str, Any] = {"pool": POOL, "poison_slabs": True, "serving_window_s": 0.5}
        settings |= {"model": model, "vllm_args": flags, "stall_s": STALL_S}
        for role in Role:
            machine.start_engine(str(role), role, **settings)
        stock = EngineControl(machine.wait_stock(server), str(Role.SERVING))
        serving, rollout = (machine.wait_engine(str(role)) for role in (Role.SERVING, Role.ROLLOUT))
        pair = _Pair(serving, rollout, pool, threads)
        prompts, expected = _clear_prompts(stock)
        pair.set_gate(GateMode.OFF)
        rounds = pair.play(prompts, num_moves)
        pair.set_gate(GateMode.IDLE)
        steps = _step_figures(stock, pair, prompts[:4], num_rounds=rig.count(20), is_dry=rig.is_dry)
        stock.close()
    return [*_round_figures(rounds, expected, num_moves), *steps]


def _clear_prompts(stock: EngineControl) -> tuple[Prompts, list[list[int]]]:
    """Returns prompts whose greedy tokens rounding does not decide, and stock vLLM's answers to them."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(SERVING_SPEC.vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS))]
        for _ in range(NUM_PROMPTS)
    ]
    body = completion_body(stock.model, prompts, MAX_TOKENS)
    body |= {"logprobs": 2, "return_tokens_as_token_ids": True}
    answer = httpx.post(f"{stock.url}/v1/completions", json=body, timeout=ANSWER_S, trust_env=False)
    choices = sorted(answer.raise_for_status().json()["choices"], key=lambda choice: choice["index"])
    margins = [min(map(_margin, choice["logprobs"]["top_logprobs"])) for choice in choices]
    clear = [index for index, nats in enumerate(margins) if nats >= CLEAR_MARGIN]
    if len(clear) < NUM_PROMPTS // 2:
        raise WorkerError(f"rounding decides too many of {NUM_PROMPTS} answers: margins {margins}")
    return [prompts[index] for index in clear], [choices[index]["token_ids"] for index in clear]


def _margin(logprobs: dict[str, float]) -> float:
    """Returns by how many nats the likeliest token is likelier than the next one."""
    first, second = sorted(logprobs.values(), reverse=True)[:2]
    return first - second


@dataclass(slots=True)
class _Rounds:
    """What the engines answered in each round."""

    answers: dict[Role, list[Answers]] = field(default_factory=lambda: {role: [] for role in Role})
    cuts_s: list[float] = field(default_factory=list)
    num_moves: int = 0


class _Pair:
    """Two engines in one pool, and what is asked of them."""

    def __init__(
        self, serving: EngineControl, rollout: EngineControl, pool: PoolClient, threads: ThreadPoolExecutor
    ) -> None:
        self.serving, self.rollout = serving, rollout
        self._ledger, self._num_slabs, self._threads = pool.ledger, pool.num_slabs, threads
        self._step = 0

    def set_gate(self, mode: GateMode) -> None:
        """Returns once both engines obey."""
        for engine in (self.serving, self.rollout):
            engine.set_gate(mode)
            while engine.status().gate.mode is not mode:
                time.sleep(0.01)

    def play(self, prompts: Prompts, num_moves: int) -> _Rounds:
        """Plays rounds until slabs have changed hands so often, or the time is over."""
        rounds, before, ends_s = _Rounds(), self._num_changes(), time.monotonic() + ROUNDS_S
        while rounds.num_moves < num_moves and time.monotonic() < ends_s:
            self._wait_until_quiet()
            enough = self.rollout.status().generated_tokens + TOKENS_BEFORE_CUT * len(prompts)
            rolled = self._threads.submit(self._roll, prompts)
            while not rolled.done() and self.rollout.status().generated_tokens < enough:
                time.sleep(0.01)
            rounds.cuts_s.append(self._cut())
            rounds.answers[Role.SERVING].append(self.serving.complete(prompts, MAX_TOKENS))
            rounds.answers[Role.ROLLOUT].append(rolled.result())
            rounds.num_moves = self._num_changes() - before
        return rounds

    @contextmanager
    def rolling(self, prompts: Prompts) -> Iterator[None]:
        """Rollouts that always want the GPU."""
        is_over = False

        def roll() -> None:
            while not is_over:
                self._roll(prompts)

        rolled = self._threads.submit(roll)
        try:
            yield
        finally:
            is_over = True
        rolled.result()

    def _roll(self, prompts: Prompts) -> Answers:
        """Has rollouts answer in an RL step of its own, which gives them a new budget."""
        self._step += 1
        self.rollout.begin_rl_step(self._step)
        return self.rollout.complete(prompts, MAX_TOKENS)

    def _wait_until_quiet(self) -> None:
        """Waits until serving's recent peak has passed, which an RL step's budget leaves to serving."""
        ends_s = time.monotonic() + QUIET_S
        while self._ledger.serving_reserve_slabs and time.monotonic() < ends_s:
            time.sleep(0.02)

    def _num_changes(self) -> int:
        return sum(self._ledger.entry(slab).epoch for slab in range(self._num_slabs))

    def _cut(self) -> float:
        """Halves what rollouts hold, as serving does in need; returns the seconds until they have obeyed."""
        ledger, start_s = self._ledger, time.monotonic()
        left = max(FEWEST_LEFT, ledger.num_held(Role.ROLLOUT) // 2)
        while not ledger.swap_policy(seen := ledger.policy, replace(seen, rollout_budget_slabs=left)):
            pass
        while ledger.num_held(Role.ROLLOUT) > left:
            if time.monotonic() - start_s > ANSWER_S:
                held = ledger.num_held(Role.ROLLOUT)
                raise WorkerError(f"rollouts hold {held} slabs {ANSWER_S:.0f} s after a cut to {left}")
            ledger.wait_change(ledger.change_seq, 0.0005)
        return time.monotonic() - start_s


async def _stream(engines: Sequence[EngineControl], prompts: Prompts) -> list[list[RequestRecord]]:
    """Asks the engines one prompt after the other, in turns; returns each one's answers."""
    found: list[list[RequestRecord]] = [[] for _ in engines]
    async with open_session() as session:
        for prompt in prompts:
            for engine, records in zip(engines, found, strict=True):
                record, body = RequestRecord(max_tokens=MAX_TOKENS), completion_body("", prompt, MAX_TOKENS)
                await asyncio.sleep(PAUSE_S)
                record.scheduled_s = time.monotonic()
                await stream_completion(session, engine.url, {**body, "model": engine.model}, record)
                if record.error is not None:
                    raise WorkerError(record.error)
                records.append(record)
    return found


def _step_figures(
    stock: EngineControl, pair: _Pair, prompts: Prompts, *, num_rounds: int, is_dry: bool
) -> list[Figure]:
    """Times serving's tokens: stock's and ROSE's in turns, then ROSE's beside rollouts."""
    asyncio.run(_stream([stock, pair.serving], prompts))  # not kept: first touch of code and caches
    stocks, alone = asyncio.run(_stream([stock, pair.serving], prompts * num_rounds))
    before = pair.rollout.status()
    with pair.rolling(prompts):
        (beside,) = asyncio.run(_stream([pair.serving], prompts * num_rounds))
    after = pair.rollout.status()
    stock_s = percentile(latencies_s(stocks, "tpot"), 50)
    first_s = percentile(latencies_s(alone, "ttft"), 50)
    assert stock_s is not None and first_s is not None
    num_steps = max(1, after.steps - before.steps)
    gate: dict[str, float | None] = {
        "rollout tokens": after.generated_tokens - before.generated_tokens,
        "a rollout step, ms": 1e3 * (after.busy_s - before.busy_s) / num_steps,
        "P99": 1e3 * ((percentile(latencies_s(beside, "ttft"), 99) or 0.0) - first_s),
    }
    return [
        *(
            median_figure(
                f"step_ratio[{name}]",
                [seconds / stock_s for seconds in latencies_s(records, "tpot")],
                "x",
                target=None if is_dry else "<= 1.02",
                peers={"stock's step, ms": 1e3 * stock_s},
            )
            for name, records in (("rollouts idle", alone), ("beside rollouts", beside))
        ),
        median_figure(
            "yield_ms", [1e3 * (each - first_s) for each in latencies_s(beside, "ttft")], "ms", peers=gate
        ),
    ]


def _round_figures(rounds: _Rounds, expected: list[list[int]], num_moves: int) -> list[Figure]:
    figures = []
    for role, of_rounds in rounds.answers.items():
        pairs = [pair for answers in of_rounds for pair in zip(answers, expected, strict=True)]
        is_cut = [role is Role.ROLLOUT and reason != "length" for (_, reason), _ in pairs]
        unequal = [
            (tokens, wanted)
            for ((tokens, _), wanted), ends_early in zip(pairs, is_cut, strict=True)
            if tokens != (wanted[: len(tokens)] if ends_early else wanted)
        ]
        for tokens, wanted in unequal:
            print(f"{role}: unlike stock's {wanted}: {tokens}")
        figures.append(
            Figure(
                name=f"greedy_equal_moves[{role}]",
                value=1 - len(unequal) / len(pairs),
                unit="share",
                target="== 1",
                peers={
                    "answers": len(pairs),
                    "whole answers": len(pairs) - sum(is_cut),
                    "tokens": sum(len(tokens) for (tokens, _), _ in pairs),
                    "prompts left out": NUM_PROMPTS - len(expected),
                },
            )
        )
    rounds_played: dict[str, float | None] = {"rounds": len(rounds.cuts_s)}
    return [
        *figures,
        Figure(
            name="slab_moves",
            value=rounds.num_moves,
            unit="moves",
            target=f">= {num_moves}",
            peers=rounds_played,
        ),
        median_figure("cut_ms", [1e3 * each for each in rounds.cuts_s], "ms"),
    ]
