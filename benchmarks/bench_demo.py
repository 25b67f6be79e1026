"""The demo as a benchmark: runs it and writes its figures.

Claim: rollouts run in a serving engine's slack within its SLOs, with unchanged greedy output and
bit-exact weights, at 0.6 or more of the rollout engine's throughput alone.

    python benchmarks/bench_demo.py --quick --json demo.json
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from lib.harness import run_benchmark

from rose.measure.figures import Figure


def measure(args: argparse.Namespace) -> list[Figure]:
    # Heavy, and not needed for --help.
    from rose.demo.figures import compute_figures
    from rose.demo.plan import DemoOptions, DemoPlan
    from rose.demo.report import write_report
    from rose.demo.run import run_demo
    from rose.measure.environment import collect_env

    with TemporaryDirectory(prefix="rose-bench-") as scratch_dir:
        out_dir = args.out_dir if args.out_dir is not None else Path(scratch_dir)
        result = run_demo(DemoPlan.of(DemoOptions(quick=args.quick, seed=args.seed, out_dir=out_dir)))
        figures, env = compute_figures(result), collect_env(seed=args.seed, quick=args.quick)
        write_report(result, figures, env, out_dir / "report.html")
    return list(figures.values())


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out-dir", type=Path, help="keep the report and the records here")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
