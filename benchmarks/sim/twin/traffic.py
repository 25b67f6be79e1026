"""The traffic of modelled serving engines: stretches of a conversation trace at a known rate.

Owns the rates and how a stretch is cut. The same seed gives the same stretch.
"""

import random
from collections.abc import Sequence

from rose.errors import ConfigError
from rose.scheduler.sim.requests import TraceRow
from sim.twin.serving import ServingArrival

RATES_RPS = {"8B": 0.35, "32B": 0.25}
"""Rates of one engine at density 1. Serving alone then computes for about 30% of the time, as in the
prototype's runs; the paper's clusters show 19% (SM utilization)."""
MAX_PROMPT_TOKENS = 8192


def sample(trace: Sequence[TraceRow], count: int, horizon_s: float, seed: int) -> list[ServingArrival]:
    """A random stretch of the trace with its own lengths, its time stretched to the horizon.

    Raises: ConfigError if the trace is too short."""
    if len(trace) <= count:
        raise ConfigError(
            f"the trace has {len(trace)} requests, and {count + 1} are needed: give a longer one"
        )
    start = random.Random(seed).randrange(len(trace) - count)
    rows, end_s = trace[start : start + count], trace[start + count].arrival_s
    stretch = horizon_s / max(end_s - rows[0].arrival_s, 1e-9)
    return [
        ServingArrival(
            at_s=(row.arrival_s - rows[0].arrival_s) * stretch,
            prompt_tokens=min(row.prompt_tokens, MAX_PROMPT_TOKENS),
            output_tokens=max(2, row.output_tokens),
        )
        for row in rows
    ]
