"""An RL job on its own rollout GPUs and on lent serving GPUs ends its steps sooner and cheaper. SIMULATED.

ROSE's Figures 1, 3, 7, 8, 14, 15 and Tables 1 to 3 at paper scale: Qwen3-8B and Qwen3-32B jobs of many turns,
beside a serving fleet that answers a conversation trace. What decides is what ships: the router's queue,
policies and heartbeats, the gate, the permits that order a job's phases, the codec's choice and bytes. What
is modelled: engines and their step times, trajectories, environments, training, rented GPUs
(benchmarks/sim/e2e/calibration.py has every number and its source). 32B is simulated at half of its size, at
the same load per engine, and `--quick` halves both. Figure 7d, critic scores, has no simulation: `make demo`
trains.

  e2e_vs_fixed[MODEL RECIPE]   time of a step on own GPUs alone over that with lent ones, the same pipeline:
                               one-step-off GRPO and DAPO (ROLL), asynchronous (AReaL)
  e2e_vs_elastic[MODEL]        rollout time of the better of spot and serverless GPUs over that with lent ones
  cost_saving[MODEL]           dollars of a step on as many owned GPUs as make it as fast, over ours
  right_sizing[MODEL, SLO] dollars of a step on all own nodes over those on the nodes that the policy of
                           right-sizing keeps within this SLO, with the same lent GPUs
  rollout_over_rose[MODEL, SYSTEM]   rollout time under other ways to share serving GPUs over ours; beside it
                               in ttft_p99 and tpot_p99 what their serving clients see

Every row stands beside the paper's number, with the reason why they differ. `--trace` is an Azure-style CSV
of requests; without it one is drawn with the conversation trace's shape. Progress is on stderr.

`--parts real` is the miniature on this machine, MEASURED and in a table of its own: three real engines on two
cores, one of which stands for a GPU that a serving engine lends.

  e2e_real             time of a rollout phase on one own engine over that with a borrowed one as well, round
                       by round on the same turns: groups that share prompts, lengths with a long tail
  e2e_real_attainment  serving's requests during the phases with the borrowed engine that met the TTFT, or the
                       TPOT, that the engines are told to keep (500 and 150 ms): the worse of both shares
  e2e_real_attainment[medians]   the same for three times the median TTFT and twice the median TPOT of the
                       other phases, of which the gate knows nothing
  e2e_real_failed      turns that did not end as asked for, in either kind of phase

    python benchmarks/bench_e2e.py --trace AzureLLMInferenceTrace_conv.csv --json e2e.json
    python benchmarks/bench_e2e.py --quick --parts jobs
    python benchmarks/bench_e2e.py --quick --parts real --trace AzureLLMInferenceTrace_conv.csv
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lib.e2e import real
from lib.e2e.background import characterize, demand_and_traffic, prefix_cache, transfers
from lib.e2e.dollars import saving
from lib.e2e.elastic import against_elastic, against_fixed, lent_gpus
from lib.e2e.right_size import right_sized
from lib.e2e.rows import Row, markdown, notes, rows_table
from lib.e2e.sharing import engines, placement
from lib.e2e.worlds import FULL, QUICK, Scale, WorldPool, make_world, workloads
from lib.harness import run_benchmark
from rich.console import Console
from sim.e2e.systems import World

from rose.measure.figures import Figure
from rose.measure.trace import trace_or_synthetic

THEMES = {
    "background": "The workloads, and a transfer of weights",
    "jobs": "Whole jobs against fixed GPUs",
    "elastic": "Rollouts against elastic GPUs",
    "lent": "Rollouts with more lent GPUs",
    "sharing": "Other ways to share serving GPUs",
    "placement": "Placement of turns",
    "cost": "Dollars",
    "sizes": "Fewer own nodes beside lent GPUs",
}
QUICK_PARTS = ("background", "jobs", "elastic", "cost")
REAL = "real"
Part = Callable[[WorldPool, World, Scale, int], list[Row]]
PARTS: dict[str, Part] = {
    "jobs": against_fixed,
    "elastic": against_elastic,
    "sharing": engines,
    "placement": placement,
    "cost": saving,
    "sizes": right_sized,
}


def measure(args: argparse.Namespace) -> list[Figure]:
    parts = args.parts if args.parts is not None else QUICK_PARTS if args.quick else tuple(THEMES)
    themes = [part for part in parts if part != REAL]
    console = Console()
    figures = _simulated(args, themes, console) if themes else []
    return figures + (real.measure(args, console) if REAL in parts else [])


def _simulated(args: argparse.Namespace, parts: Sequence[str], console: Console) -> list[Figure]:
    trace = trace_or_synthetic(args.trace, args.seed)
    scale = QUICK if args.quick else FULL
    themes: dict[str, list[Row]] = {part: [] for part in parts}
    with WorldPool() as runner:
        for workload in workloads(is_quick=args.quick):
            if workload.name not in args.models:
                continue
            world = make_world(runner, workload, trace, scale, args.seed)
            for part, run in PARTS.items():
                if part in themes:
                    themes[part] += run(runner, world, scale, args.seed)
            if "background" in themes:
                themes["background"] += characterize(runner, world, scale, args.seed)
                themes["background"] += transfers(world)
            if workload.name == "8B" and "background" in themes:
                themes["background"] += prefix_cache(runner, world, scale, args.seed)
                themes["background"] += demand_and_traffic(workload, world, trace, args.seed)
            if workload.name == "8B" and "lent" in themes:
                themes["lent"] += lent_gpus(runner, world, scale, args.seed)
    rows = [row for part in THEMES for row in themes.get(part, [])]
    console.print(rows_table(rows), markup=False)
    console.print(notes(rows), markup=False, highlight=False)
    if args.markdown is not None:
        args.markdown.write_text(markdown({THEMES[part]: themes[part] for part in THEMES if part in themes}))
    return [row.figure() for row in rows]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="Azure-style CSV; default: a generated trace like it")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=(*THEMES, REAL),
        help="default: all that are simulated; with --quick the first ones",
    )
    parser.add_argument("--rounds", type=int, help="of the real part; default: 5, with --quick 2")
    parser.add_argument(
        "--records", type=Path, metavar="FOLDER", help="of the real part, keep requests and logs there"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="PATH", help="write the tables of a results page here"
    )
    parser.add_argument("--models", nargs="+", choices=("8B", "32B"), default=("8B", "32B"))


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
