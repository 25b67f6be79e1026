"""Memory that rollout lends to serving's bursts, and prefix cache in what is left, beat a fixed split.

Three variants, each with a serving and a rollout engine of its own over as many slabs in all. All six engines
run from the start, and windows of the demo's trace replay beside the closed rollout loop alternate between
the pairs. The gate is always off, so only memory differs.
  static       two pools, each half of the slabs: neither can get more; rollout caches nothing
  preemption   one pool: rollout's budget follows serving's use and is cut in its bursts; no cache either
  caching      the same with rollout's prefix cache on its default lease of 10 s: ROSE as it comes

Per variant: `rollout_tokens_per_s`, `ttft_p99_ms` and `tpot_p99_ms` of serving, `rollout_hit_share` (cached
prompt tokens over prompt tokens, from vLLM's own counters) and `rollout_aborts` (turns that a cut ended, per
window; each goes on from its partial tokens). Where rollout's throughput isn't bound by prefill, as with the
demo's tiny model, prefix hits save little.

ROSE Table 2 (§6.2; five GRPO steps on H800s without the gate, memory split evenly; other models and machines,
hence only here), rollout time, TTFT P99, TPOT P99:
  Qwen3-8B    static 776.7 s, 331.0 ms, 1488.2 ms; + preemption 591.7 s, 517.9 ms, 162.8 ms;
              + prefix caching 469.3 s, 333.6 ms, 186.3 ms
  Qwen3-32B   static 1310.5 s, 603.0 ms, 7021.1 ms; + preemption 959.7 s, 651.3 ms, 503.8 ms;
              + prefix caching 920.4 s, 640.6 ms, 483.2 ms

    python benchmarks/bench_policy.py --json policy.json
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from lib.harness import median_figure, run_benchmark
from lib.load.traffic import add_trace, latency_ms, note_foreign_share, plan_traffic, window_runner

from rose.demo.plan import DemoPlan
from rose.demo.records import PhaseName
from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.measure.records import Window
from rose.measure.rig import Rig
from rose.measure.windows import RlSteps, WindowSpec
from rose.node.control import EngineControl
from rose.types import GateMode, Role

CONCURRENCY = 24
"""Rollout trajectories at a time: together they want more memory than they get in any variant."""
NO_CACHE = ("--no-enable-prefix-caching",)
SERVING_WINDOW_S = 10.0
"""How long serving keeps its recent peak; shorter than the default, as windows here are short."""
PROMPT_TOKENS, CACHED_TOKENS = "vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """A variant as the product's settings. ``is_split``: a pool of half the slabs for each engine."""

    name: str
    is_split: bool = False
    rollout_args: tuple[str, ...] = ()


SETTINGS = (
    _Setting(name="static", is_split=True, rollout_args=NO_CACHE),
    _Setting(name="preemption", rollout_args=NO_CACHE),
    _Setting(name="caching"),
)


@dataclass(slots=True)
class _Variant:
    """A running pair of engines, and its windows so far."""

    name: str
    serving: EngineControl
    rollout: EngineControl
    rl_steps: RlSteps
    windows: list[Window] = field(default_factory=list)
    hit_shares: list[float] = field(default_factory=list)

    def measure(self, plan: DemoPlan, rig: Rig, index: int, window_s: float) -> None:
        """One window on the ``index``-th sample of the trace."""
        spec = WindowSpec(
            name=PhaseName.NAIVE,
            index=index,
            duration_s=window_s,
            has_serving=True,
            rollout_url=self.rollout.url,
        )
        prompt_tokens, cached_tokens = _prompt_counters(self.rollout.url)
        self.windows.append(
            window_runner(plan, rig, self.serving, self.rollout).run(spec, self.rl_steps.tick)
        )
        all_prompt_tokens, all_cached_tokens = _prompt_counters(self.rollout.url)
        self.hit_shares.append((all_cached_tokens - cached_tokens) / (all_prompt_tokens - prompt_tokens))


def measure(args: argparse.Namespace) -> list[Figure]:
    num_rounds, window_s = (3, 10.0) if args.quick else (6, 20.0)
    with Rig() as rig:
        plan = plan_traffic(args, rig, concurrency=CONCURRENCY)
        for setting in SETTINGS:
            _start(rig, plan, setting)
        variants = [_wait(rig, setting) for setting in SETTINGS]
        for index in range(num_rounds):
            # Rounds by threes: each comes first, second and last equally often, as the machine drifts.
            for shift in range(len(variants)):
                variants[(index + shift) % len(variants)].measure(plan, rig, index, window_s)
    note_foreign_share([window for variant in variants for window in variant.windows])
    return [figure for variant in variants for figure in _figures(variant)]


def _start(rig: Rig, plan: DemoPlan, setting: _Setting) -> None:
    """Begins to start both engines of a variant, over as many slabs as every other variant has."""
    name = f"{plan.pool_name}-{setting.name}"
    pools = dict.fromkeys(Role, name)
    if setting.is_split:
        # Nobody shares these: all of a half is its engine's own, so nothing is set aside.
        pools = {role: f"{name}-{role}" for role in Role}
        for pool in pools.values():
            rig.pool(
                pool,
                num_slabs=plan.pool["num_slabs"] // 2,
                slab_bytes=plan.pool["slab_bytes"],
                headroom_slabs=0,
            )
    else:
        rig.pool(name, **plan.pool)
    shared: dict[str, Any] = {
        "gate": GateMode.OFF,
        "compute_cpus": plan.cpus.compute,
        "serving_window_s": SERVING_WINDOW_S,
    }
    for role in Role:
        vllm_args = setting.rollout_args if role is Role.ROLLOUT else ()
        engine = _engine_name(setting, role)
        rig.start_engine(engine, role, vllm_args=vllm_args, pool=pools[role], **shared)


def _wait(rig: Rig, setting: _Setting) -> _Variant:
    serving, rollout = (rig.wait_engine(_engine_name(setting, role)) for role in (Role.SERVING, Role.ROLLOUT))
    for engine in (serving, rollout):
        engine.complete([[1] * 200], max_tokens=4)  # what only a first step pays
    return _Variant(setting.name, serving, rollout, RlSteps(rollout))


def _engine_name(setting: _Setting, role: Role) -> str:
    return f"{setting.name}-{role}"


def _prompt_counters(url: str) -> tuple[float, float]:
    """(prompt tokens, cached ones) of an engine since its start. Raises: WorkerError."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise WorkerError(f"{url}/metrics: {error!r}") from error
    lines = answer.text.splitlines()
    prompt_tokens, cached_tokens = (
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))
        for name in (PROMPT_TOKENS, CACHED_TOKENS)
    )
    return prompt_tokens, cached_tokens


def _figures(variant: _Variant) -> list[Figure]:
    windows, case = variant.windows, f"[{variant.name}]"
    rates = [window.rollout_tokens / window.duration_s for window in windows]
    aborts = [float(sum(window.rollout_aborts.values())) for window in windows]
    return [
        median_figure(f"rollout_tokens_per_s{case}", rates, "tokens/s"),
        *(_latency_figure(windows, kind, case) for kind in ("ttft", "tpot")),
        median_figure(f"rollout_hit_share{case}", variant.hit_shares, "share of prompt"),
        median_figure(f"rollout_aborts{case}", aborts, "turns per window"),
    ]


def _latency_figure(windows: Sequence[Window], kind: str, case: str) -> Figure:
    """P99 over all windows' requests; the spread is that of single windows."""
    each = [p99 for window in windows if (p99 := latency_ms([window], kind, 99)) is not None]
    requests = [request for window in windows for request in window.requests]
    return Figure(
        name=f"{kind}_p99_ms{case}",
        value=latency_ms(windows, kind, 99),
        unit="ms",
        peers={
            "P95": latency_ms(windows, kind, 95),
            "requests": len(requests),
            "not answered in full": sum(not request.is_complete for request in requests),
        },
        spread=(min(each), max(each)) if each else None,
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, add_trace))
