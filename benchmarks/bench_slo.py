"""Serving keeps its SLOs while rollouts take the time it leaves: every sharing policy on the same traffic.

Without flags: two real engines on this machine, rollouts with steps longer than serving's, all figures
measured. With --simulate: a discrete-event twin of the shipped gate at the scale of H800 GPUs, 8B and 32B
pairs, densities 1, 1.5 and 2, an on/off burst and a heavy load; all figures simulated. The two never share a
table.

    python benchmarks/bench_slo.py --trace AzureLLMInferenceTrace_conv.csv --json slo_real.json
    python benchmarks/bench_slo.py --simulate --trace AzureLLMInferenceTrace_conv.csv --json slo_twin.json
"""

import argparse
import sys
from pathlib import Path

from lib.harness import run_benchmark
from lib.slo import measured
from lib.slo.simulated import Sampling, TwinBench
from rich.console import Console

from rose.measure.figures import Figure
from rose.measure.trace import trace_or_synthetic


def measure(args: argparse.Namespace) -> list[Figure]:
    if not args.simulate:
        return measured.measure(args, Console())
    trace = trace_or_synthetic(args.trace, args.seed)
    horizon_s, repeats = (100.0, 1) if args.quick else (200.0, 3)
    sampling = Sampling(horizon_s=horizon_s, repeats=repeats, seed=args.seed)
    return TwinBench(trace, sampling, Console()).figures()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulate", action="store_true", help="the discrete-event twin; no engines")
    cases = ", ".join(f'"{name}"' for name in measured.CASES)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=list(measured.CASES),
        default=list(measured.CASES),
        metavar="CASE",
        help=f"of the real runs, which workloads: {cases}; default: all",
    )
    parser.add_argument("--rounds", type=int, help="of the real runs; default: 4, with --quick 1")
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FOLDER",
        help="of the real runs, keep every request there",
    )
    parser.add_argument("--trace", type=Path, help="Azure-style CSV; default: a generated trace like it")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, add_arguments))
