"""The main job as a benchmark: runs the demo and writes its figures.

Claim: rollouts run in a serving engine's slack within its SLOs, with unchanged greedy output and
bit-exact weights, at 0.6 or more of the rollout engine's throughput alone.

    python benchmarks/bench_demo.py --quick --json demo.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from rose.demo.figures import compute_figures
from rose.demo.records import DemoResult
from rose.demo.report import figures_table, write_report
from rose.errors import RoseError
from rose.measure.environment import collect_env


def run(args: argparse.Namespace, out_dir: Path) -> DemoResult:
    """Run the demo in this process."""
    # Heavy, and not needed for --help.
    from rose.demo.run import DemoOptions, run_demo

    return run_demo(DemoOptions(quick=args.quick, seed=args.seed, out_dir=out_dir))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, write the JSON. Status 1 when the demo could not run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short windows: small samples, wide spreads")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write env and figures here")
    parser.add_argument("--out-dir", type=Path, help="keep the report and the records here")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    env = collect_env(seed=args.seed, quick=args.quick)
    try:
        if args.out_dir is not None:
            result = run(args, args.out_dir)
            write_report(result, args.out_dir / "report.html", env)
        else:
            with TemporaryDirectory(prefix="rose-bench-") as out_dir:
                result = run(args, Path(out_dir))
    except RoseError as error:
        print(f"bench_demo: {error}", file=sys.stderr)
        return 1
    figures = compute_figures(result, env)
    Console().print(figures_table(figures))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures.to_json(), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
