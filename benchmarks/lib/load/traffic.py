"""The demo's traffic for benchmarks: the trace replay against serving, the closed loop against rollout.

Owns how a rig's engines get the demo's windows (rose.measure.windows). Promises the demo's rate and
layout on the CPUs. Never measures anything but what a window measures.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rose.demo.plan import SERVING_LOAD as DEMO_LOAD
from rose.demo.plan import DemoOptions, DemoPlan
from rose.measure.figures import latency_s, pooled_requests
from rose.measure.records import Window
from rose.measure.rig import Rig
from rose.measure.windows import WindowRunner
from rose.node.control import EngineControl

SERVING_LOAD = replace(DEMO_LOAD, burst_size=3, max_prompt_tokens=256)
"""The benchmarks' serving traffic: smaller bursts of longer prompts than the demo's."""
MAX_FOREIGN_SHARE = 0.05
"""The share of the machine's CPU time in a window beyond which latencies are other processes' as well."""


def add_trace(parser: argparse.ArgumentParser) -> None:
    """The flag for the arrivals; without it the demo's choice."""
    parser.add_argument("--trace", type=Path, metavar="CSV", help="Azure-style trace of serving arrivals")


def plan_traffic(args: argparse.Namespace, rig: Rig, concurrency: int) -> DemoPlan:
    """The demo's plan, its records in the rig's folder, with ``concurrency`` rollout trajectories."""
    out_dir = rig.folder / "windows"
    out_dir.mkdir()
    plan = DemoPlan.of(DemoOptions(out_dir=out_dir, quick=args.quick, seed=args.seed, trace=args.trace))
    rig.others = plan.cpus.others
    return replace(plan, serving=SERVING_LOAD, rollout=replace(plan.rollout, concurrency=concurrency))


def window_runner(plan: DemoPlan, rig: Rig, serving: EngineControl, rollout: EngineControl) -> WindowRunner:
    """Runs windows on two of the rig's engines, its clients on the CPUs that don't stand for the GPU."""
    return WindowRunner(plan.traffic, plan.options.out_dir, rig, serving, rollout)


def latency_ms(windows: Sequence[Window], kind: str, percent: float) -> float | None:
    """A percentile of "ttft" or "tpot" over all serving requests of the windows; None without answers."""
    seconds = latency_s(pooled_requests(windows), kind, percent)
    return seconds * 1e3 if seconds is not None else None


def note_foreign_share(windows: Sequence[Window]) -> None:
    """Print a warning where other processes took CPU during the windows: the figures are theirs as well."""
    shares = [window.foreign_cpu_share for window in windows]
    if max(shares) > MAX_FOREIGN_SHARE:
        listed = ", ".join(f"{share:.0%}" for share in shares)
        print(f"other processes used much of the machine's CPU during the windows: {listed}")
