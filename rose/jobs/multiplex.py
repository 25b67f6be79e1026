"""`rose sched multiplex`: runs two jobs on this machine, together where that is faster than one by one.

The jobs' files and programs are those of `rose sched submit`. A program says with `progress.step` where it
can be moved or paused. Refuses bad input before it starts anything. Source: JigsawRL §4.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rose.arguments import CommandParser, check_output
from rose.config import Settings, default_variable, make_private_dir, mps_folder
from rose.errors import ConfigError
from rose.jobs.dashboard import DashboardProcess
from rose.jobs.pair import PairRun
from rose.jobs.serve import add_folder_and_page, cache_root, make_page
from rose.jobs.slowdown import core_counts, hardware, splittable_cores
from rose.node.signals import StopOnSignals
from rose.scheduler.gpu.pairing import Pairing
from rose.scheduler.gpu.slowdown import SlowdownTable
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.command.connection import channel_parser
from rose.scheduler.runtime.job.multiprocessors import Multiprocessors
from rose.scheduler.runtime.job.spec import RunSpec, read_job
from rose.scheduler.sim.gpu_spec import SlowdownFile, load_table

logger = logging.getLogger(__name__)

INSTEAD = "leave out --slowdown, and the pair is measured while it runs"


def main(argv: Sequence[str]) -> int:
    """Runs both jobs to their ends. Returns 1 if one of them failed, and 130 if a signal came first."""
    settings = Settings.from_environment()
    arguments = _parser(settings).parse_args(list(argv))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    cores, here = _device(is_gpu=arguments.gpu)
    specs = read_pair(arguments.jobs, len(cores), is_gpu=arguments.gpu)
    pairing = _pairing(specs, cores, here, arguments)
    folder = make_private_dir(arguments.folder.absolute(), "choose another with --folder")
    page = make_page(arguments, settings)
    # Threads that spin for work would take the core from threads that have work.
    default_variable("OMP_WAIT_POLICY", "PASSIVE")
    with StopOnSignals():
        channel = ChannelUrl.parse(arguments.channel)
        side = channel.serve()
        try:
            try:
                root = cache_root(settings, f"{channel.url} pair")
                run = PairRun(specs, pairing, cores, (channel.url, side), folder, root, is_gpu=arguments.gpu)
                run.run(_Watch(pairing, page, is_quiet=arguments.json))
            finally:
                if page is not None:
                    page.stop()
                side.close()
            report = _report(run, pairing)
            print(json.dumps(report, indent=2) if arguments.json else "\n".join(_lines(report)))
            return int(any(side.has_failed for side in run.sides))
        finally:  # measurements are kept after a signal too
            if arguments.output is not None:
                _write(pairing.table, arguments.output)
    return 130  # a signal


class _Watch:
    """Runs between two calls: checks the dashboard, and prints a line when the mode changes."""

    def __init__(self, pairing: Pairing, page: DashboardProcess | None, *, is_quiet: bool) -> None:
        self._pairing = pairing
        self._check: Callable[[], object] = page.check if page is not None else lambda: None
        self._is_quiet = is_quiet
        self._seen = ""
        self._began_s = time.monotonic()

    def __call__(self) -> None:
        self._check()
        said = f"{self._pairing.mode}: {self._pairing.why}"
        if said != self._seen and not self._is_quiet:
            print(f"{time.monotonic() - self._began_s:7.1f} s  {said}", flush=True)
        self._seen = said


def read_pair(paths: Sequence[Path], num_cores: int, *, is_gpu: bool) -> tuple[RunSpec, RunSpec]:
    """Reads both job files. Raises: ConfigError for jobs that can't share this machine."""
    found = []
    for path in paths:
        spec = read_job(path)[1]
        folder = str((path.parent / spec.folder).resolve())
        found.append(spec.model_copy(update={"folder": folder}))
        for name, phase in spec.phases.items():
            if phase.nodes > 1 and (name != "rollout" or is_gpu):
                raise ConfigError(
                    f"{path}: {name} with nodes: {phase.nodes}; pipelines that share "
                    + ("a GPU have one" if is_gpu else "this machine have one, except for a rollout")
                )
        num_workers = spec.phases["rollout"].nodes
        if num_workers > 1 and num_cores % num_workers:
            raise ConfigError(
                f"{path}: rollout with nodes: {num_workers}; the {num_cores} cores here can't be divided "
                f"into {num_workers} equal parts, one for each"
            )
        if spec.num_ranks > 1:
            raise ConfigError(f"{path}: num_ranks: {spec.num_ranks}; only jobs of one process can be moved")
        if spec.ray is not None:
            raise ConfigError(f"{path}: `ray` has processes that can't be moved; remove it")
    one, two = found
    if one.name == two.name:
        raise ConfigError(f"both jobs are named {one.name}; give each a name of its own")
    parts = sorted({num for num in _num_workers((one, two)) if num > 1})
    if len(parts) > 1:
        raise ConfigError(
            f"rollouts with nodes: {parts[0]} and {parts[1]}; the cores are divided in one way, so give both "
            "jobs the same number of nodes"
        )
    return one, two


def _num_workers(specs: tuple[RunSpec, RunSpec]) -> tuple[int, int]:
    return specs[0].phases["rollout"].nodes, specs[1].phases["rollout"].nodes


def _device(*, is_gpu: bool) -> tuple[list[int], str]:
    """Returns what a device is split into, and its name. Raises: ConfigError; WorkerError."""
    if not is_gpu:
        cores = splittable_cores()
        return cores, hardware(len(cores))
    gpu = Multiprocessors()
    pipe = mps_folder() / "control"
    if not pipe.exists():
        raise ConfigError(
            f"no MPS server at {pipe}, without which two processes take turns on a GPU; start it: "
            "nvidia-cuda-mps-control -d (CUDA_MPS_PIPE_DIRECTORY says where it is)"
        )
    return list(range(gpu.num)), f"{gpu.name}, {gpu.num} multiprocessors"


def _pairing(
    specs: tuple[RunSpec, RunSpec], cores: Sequence[int], here: str, arguments: argparse.Namespace
) -> Pairing:
    levels = [count / len(cores) for count in core_counts(len(cores))]
    if arguments.output is not None:
        if arguments.slowdown is not None:
            raise ConfigError("--output is for slowdowns that are measured here; omit it with --slowdown")
        check_output(arguments.output)
    table = (
        load_table(arguments.slowdown, here, otherwise=INSTEAD) if arguments.slowdown is not None else None
    )
    names = (specs[0].name, specs[1].name)
    workers = _num_workers(specs)
    return Pairing(names, here, levels, num_workers=workers, table=table, is_serial=arguments.serial)


def _write(table: SlowdownTable, path: Path) -> None:
    if not table.entries:
        said = "no pair of sub-stages ran side by side for long enough to be measured"
        print(f"{said}; {path} is not written", file=sys.stderr)
        return
    content = SlowdownFile.of(table).model_dump(mode="json")
    path.write_text(json.dumps(content, indent=1) + "\n")


def _report(run: PairRun, pairing: Pairing) -> dict[str, Any]:
    mode, why = pairing.together if pairing.together is not None else (pairing.mode, pairing.why)
    return {
        "kind": "measured",
        "hardware": pairing.table.hardware,
        "mode": mode.value,
        "why": why,
        "window": pairing.plan.window if pairing.plan is not None else None,
        "predicted_gain": round(pairing.plan.gain, 3) if pairing.plan is not None else None,
        "gain": round(pairing.gain, 3) if pairing.gain is not None else None,
        "merges": pairing.num_merges,
        "elapsed_s": round(run.elapsed_s, 3),
        "pipelines": [
            {
                "name": side.spec.name,
                "iterations": side.num_done,
                "exit_status": side.exit_status,
                "log": str(side.process.log_path),
            }
            for side in run.sides
        ],
        "slowdown": {
            f"{kind} beside {beside}": [row[0] for row in grid]
            for (kind, beside), grid in pairing.table.entries.items()
        },
    }


def _lines(report: dict[str, Any]) -> Sequence[str]:
    done = ", ".join(f"{each['name']} {each['iterations']} iterations" for each in report["pipelines"])
    lines = [f"{done} in {report['elapsed_s']:.1f} s"]
    if report["gain"] is not None:
        lines.append(
            f"measured: {report['gain']:.2f} times the serial throughput since the profile"
            + (f" ({report['predicted_gain']:.2f} predicted)" if report["predicted_gain"] is not None else "")
        )
    return lines


def _parser(settings: Settings) -> CommandParser:
    parser = channel_parser(
        "multiplex",
        "Runs two RL jobs on this machine. Their sub-stages run side by side, each on its own cores (or a "
        "GPU's multiprocessors), where that is measured to be faster than one iteration after the other.",
        "rose sched multiplex math.yaml code.yaml",
    )
    parser.add_argument(
        "jobs", nargs=2, type=Path, metavar="JOB.yaml", help="the jobs' files, as for rose sched submit"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="share the first GPU of CUDA_VISIBLE_DEVICES in place of this machine's cores; it needs an MPS "
        "server and programs that compute with torch",
    )
    parser.add_argument(
        "--slowdown",
        type=Path,
        metavar="JSON",
        help="slowdowns that an earlier run or rose sched slowdown wrote "
        "(default: they are measured while the jobs run)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="JSON", help="write the measured slowdowns there"
    )
    parser.add_argument(
        "--serial", action="store_true", help="run one iteration after the other, and nothing side by side"
    )
    add_folder_and_page(parser, settings)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
