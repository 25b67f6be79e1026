"""`rose sched slowdown`: measures what sub-stages cost one another on this machine's cores.

Owns two processes that run pairs at once, each on cores of its own, and the table's file. No file is
overwritten, and both processes end with the command. Source: JigsawRL §4.2, with core sets for SMs.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import combinations_with_replacement
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from rose.arguments import CommandParser, check_output
from rose.errors import ConfigError, ProfileError, install_hint
from rose.jobs.substage_work import WorkOrder, serve
from rose.node.signals import StopOnSignals
from rose.scheduler.gpu.slowdown import COMPUTE_LEVELS, MEMORY_LEVELS, SlowdownTable
from rose.scheduler.gpu.substages import SubStageKind
from rose.scheduler.sim.gpu_spec import SlowdownFile

KINDS = tuple(kind for kind in SubStageKind if kind is not SubStageKind.TOOL)
PATIENCE_S = 120.0
"""A slow machine takes long to import torch."""
END_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Measures all pairs, writes the table and prints its mean slowdowns; 130 when a signal came first."""
    parser = CommandParser(
        "rose sched slowdown",
        "Measures what sub-stages of RL pipelines cost one another when they share this machine's cores.",
        "rose sched slowdown -o slowdown.json",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("slowdown.json"),
        metavar="JSON",
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        type=SubStageKind,
        choices=KINDS,
        default=KINDS,
        metavar="KIND",
        help=f"the kinds of sub-stages to pair (default: all of {', '.join(KINDS)})",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.0,
        help="how long to measure each pair on each split (default: %(default)g)",
    )
    arguments = parser.parse_args(list(argv))
    check_output(arguments.output)
    if not 0 < arguments.seconds <= 60:
        parser.error(f"--seconds {arguments.seconds:g}: expected more than 0 and at most 60")
    if find_spec("torch") is None:
        raise ConfigError(f"torch is not installed; {install_hint('cpu')}")
    with StopOnSignals():
        table = measure(tuple(dict.fromkeys(arguments.kinds)), arguments.seconds)
        content = SlowdownFile.of(table).model_dump(mode="json")
        arguments.output.write_text(json.dumps(content, indent=1) + "\n")
        console = Console()
        console.print(_page(table))
        console.print(f"written: {arguments.output}, for hardware {table.hardware!r}", soft_wrap=True)
        return 0
    return 130  # a signal


def measure(kinds: Sequence[SubStageKind], seconds: float) -> SlowdownTable:
    """Returns the table of all pairs of these kinds. Raises: ConfigError on one core, ProfileError."""
    cores = splittable_cores()
    counts = core_counts(len(cores))
    with ExitStack() as stack:
        both = [stack.enter_context(_Runner()) for _ in range(2)]
        alone_s = {
            kind: _measured(
                both[:1], [WorkOrder(kind=kind, memory=MEMORY_LEVELS[-1], cores=tuple(cores))], seconds
            )[0]
            for kind in kinds
        }
        points: dict[tuple[SubStageKind, SubStageKind, int, int], list[float]] = {}
        for one, two in track(list(combinations_with_replacement(kinds, 2)), "measuring pairs"):
            for count in counts:
                for room, memory in enumerate(MEMORY_LEVELS):
                    other = len(MEMORY_LEVELS) - 1 - room  # the levels mirror: what is left is one of them
                    requests = [
                        WorkOrder(kind=one, memory=memory, cores=tuple(cores[:count])),
                        WorkOrder(kind=two, memory=MEMORY_LEVELS[other], cores=tuple(cores[count:])),
                    ]
                    first_s, second_s = _measured(both, requests, seconds)
                    points.setdefault((one, two, count, room), []).append(first_s / alone_s[one])
                    rest = len(cores) - count
                    points.setdefault((two, one, rest, other), []).append(second_s / alone_s[two])
    return SlowdownTable(
        hardware=hardware(len(cores)),
        compute=tuple(count / len(cores) for count in counts),
        memory=MEMORY_LEVELS,
        entries={
            (kind, beside): tuple(
                tuple(_mean(points[kind, beside, count, room]) for room in range(len(MEMORY_LEVELS)))
                for count in counts
            )
            for kind in kinds
            for beside in kinds
        },
    )


def splittable_cores() -> list[int]:
    """Returns the cores of this process. Raises: ConfigError if it has but one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("this process may use one core, which can't be split; two pipelines need two")
    return cores


def core_counts(num_cores: int) -> list[int]:
    """Returns the sizes of core sets nearest to the paper's levels. What a set leaves is one of them, too."""
    counts = sorted({max(1, round(level * num_cores)) for level in COMPUTE_LEVELS if level < 1})
    return [count for count in counts if count < num_cores and num_cores - count in counts]


def hardware(num_cores: int) -> str:
    """Returns what a table measured here belongs to."""
    return f"{cpu_name()}, {num_cores} cores"


def cpu_name() -> str:
    """Returns this machine's kind of CPU, or its architecture where the kernel names none."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class _Runner:
    """One process that runs sub-stages."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads
        self.pipe, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child,), daemon=True)

    def __enter__(self) -> Connection:
        self._process.start()
        return self.pipe

    def __exit__(self, *raised: object) -> None:
        self._process.terminate()
        self._process.join(END_S)


def _measured(pipes: Sequence[Connection], requests: Sequence[WorkOrder], seconds: float) -> list[float]:
    """Runs the requests at once; returns the seconds of a unit of each. Raises: ProfileError."""
    try:
        for pipe, request in zip(pipes, requests, strict=True):
            pipe.send(request)
        for pipe in pipes:
            _receive(pipe)
        for pipe in pipes:
            pipe.send("go")
        time.sleep(seconds)
        for pipe in pipes:
            pipe.send("stop")
        return [float(_receive(pipe)) for pipe in pipes]
    except (EOFError, ConnectionError) as error:
        kinds = " beside ".join(request.kind for request in requests)
        raise ProfileError(f"the process that ran {kinds} has ended; its error stands above") from error


def _receive(pipe: Connection) -> str:
    if not pipe.poll(PATIENCE_S):
        raise ProfileError(f"a sub-stage took more than {PATIENCE_S:.0f} s; use fewer --kinds")
    return str(pipe.recv())


def _page(table: SlowdownTable) -> Table:
    """The mean slowdown of each kind beside each other one, over all splits."""
    kinds = list(dict.fromkeys(kind for kind, _ in table.entries))
    page = Table(title="slowdown, mean of all splits", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("", *(f"beside {kind}" for kind in kinds)):
        page.add_column(column, justify="right" if column else "left")
    for kind in kinds:
        means = [_mean([value for row in table.entries[kind, beside] for value in row]) for beside in kinds]
        page.add_row(kind, *(f"{mean:.2f}" for mean in means))
    return page
