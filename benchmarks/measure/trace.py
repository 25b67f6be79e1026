"""Arrival traces for the demo's serving load: draw one with the shape of a known one, and scale it.

Owns drawn traces and the scaling of traces to a tiny model. Promises the same requests for the same seed.
Never sends anything.

The Azure LLM inference traces (conversation) are published by Microsoft under CC-BY:
Patel et al., Splitwise, ISCA 2024.
"""

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.scheduler.sim.requests import TraceRow, load_trace

MIN_OUTPUT_TOKENS = 2
"""TPOT needs two tokens."""

SYNTHETIC_ROWS = 20_000

# Quantile functions fitted to the conversation trace (19 366 requests in 58 minutes), drawn by
# interpolating the logarithm of the length between these points.
_LENGTH_QUANTILES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
_PROMPT_LENGTHS = (3.0, 29.0, 181.0, 207.0, 396.0, 1020.0, 1189.0, 2734.0, 4083.0, 4142.0, 14050.0)
_OUTPUT_LENGTHS = (7.0, 16.0, 41.0, 54.0, 85.0, 129.0, 395.0, 424.0, 451.0, 601.0, 1000.0)

# Arrivals of the same trace: 5.53 requests/s; gaps with a coefficient of variation of 1.09; counts
# per 10 s and per 60 s four and twenty times as dispersed as Poisson. A Poisson process whose rate
# drifts does that: log-normal, coefficient of variation 0.24, correlation time about ten minutes,
# with gamma gaps (1.06) for the rest.
_RATE_RPS = 5.53
_RATE_CV = 0.24
_RATE_CORRELATION_S = 600.0
_RATE_STEP_S = 10.0
_GAP_CV = 1.06


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """One request to send, ``at_s`` after the start of its window."""

    request_id: str
    at_s: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


def trace_or_synthetic(path: Path | None, seed: int) -> list[TraceRow]:
    """The trace in a file, or without one a stand-in of its usual length. Raises: ConfigError."""
    return load_trace(path) if path is not None else synthetic_trace(num_requests=SYNTHETIC_ROWS, seed=seed)


def synthetic_trace(*, num_requests: int, seed: int) -> list[TraceRow]:
    """A seeded stand-in with the conversation trace's burstiness and length distributions."""
    rng = random.Random(seed)
    sigma = math.sqrt(math.log1p(_RATE_CV**2))
    keep = math.exp(-_RATE_STEP_S / _RATE_CORRELATION_S)
    shape = 1.0 / _GAP_CV**2
    drift, now_s, next_step_s = rng.gauss(0.0, sigma), 0.0, _RATE_STEP_S
    rows: list[TraceRow] = []
    for _ in range(num_requests):
        while now_s >= next_step_s:
            drift = keep * drift + rng.gauss(0.0, sigma * math.sqrt(1.0 - keep**2))
            next_step_s += _RATE_STEP_S
        rate_rps = _RATE_RPS * math.exp(drift - sigma**2 / 2)
        rows.append(
            TraceRow(
                arrival_s=now_s,
                prompt_tokens=_draw_length(rng.random(), _PROMPT_LENGTHS),
                output_tokens=_draw_length(rng.random(), _OUTPUT_LENGTHS),
            )
        )
        now_s += rng.gammavariate(shape, 1.0 / (shape * rate_rps))
    return rows


def _draw_length(quantile: float, lengths: Sequence[float]) -> int:
    right = min(bisect.bisect_right(_LENGTH_QUANTILES, quantile), len(lengths) - 1)
    low, high = _LENGTH_QUANTILES[right - 1], _LENGTH_QUANTILES[right]
    share = (quantile - low) / (high - low)
    return round(math.exp((1 - share) * math.log(lengths[right - 1]) + share * math.log(lengths[right])))


def scaled(
    trace: Sequence[TraceRow],
    rate_rps: float,
    max_prompt_tokens: int,
    max_output_tokens: int,
    duration_s: float,
    seed: int,
    *,
    vocab_size: int,
    burst_size: int = 1,
    repeats: int = 1,
) -> list[ReplayRequest]:
    """A random stretch of the trace as requests for a small model: ``rate_rps * duration_s`` of them.

    Time is stretched evenly, so the gaps keep their shape. Lengths shrink evenly so that the
    trace's 99th percentile meets the maximum; longer ones are clipped. ``burst_size`` > 1 lets that
    many neighbours arrive at once, at the same mean rate: a harder load than the trace's own.
    The stretch is played ``repeats`` times, with new token ids, so that no prefix is cached.
    """
    count = round(rate_rps * duration_s)
    if count < 1 or burst_size < 1 or repeats < 1:
        raise ValueError(f"nothing to replay: {rate_rps=} {duration_s=} {burst_size=} {repeats=}")
    if len(trace) <= count:
        raise ValueError(f"need a trace of more than {count} rows, got {len(trace)}")
    rng = random.Random(seed)
    start = rng.randrange(len(trace) - count)
    rows, end_s = trace[start : start + count], trace[start + count].arrival_s
    stretch = duration_s / max(end_s - rows[0].arrival_s, 1e-9)
    prompt_scale = max_prompt_tokens / _p99([row.prompt_tokens for row in trace])
    output_scale = max_output_tokens / _p99([row.output_tokens for row in trace])
    requests: list[ReplayRequest] = []
    for number in range(count * repeats):
        repeat, index = divmod(number, count)
        row, burst_head = rows[index], rows[index - index % burst_size]
        num_prompt = _clip(row.prompt_tokens * prompt_scale, 1, max_prompt_tokens)
        requests.append(
            ReplayRequest(
                request_id=f"{seed}-{number:05d}",
                at_s=repeat * duration_s + (burst_head.arrival_s - rows[0].arrival_s) * stretch,
                prompt_token_ids=tuple(rng.randrange(vocab_size) for _ in range(num_prompt)),
                max_tokens=_clip(row.output_tokens * output_scale, MIN_OUTPUT_TOKENS, max_output_tokens),
            )
        )
    return requests


def _p99(lengths: Sequence[int]) -> int:
    return max(1, sorted(lengths)[min(len(lengths) - 1, math.ceil(0.99 * len(lengths)) - 1)])


def _clip(length: float, low: int, high: int) -> int:
    return max(low, min(high, round(length)))
