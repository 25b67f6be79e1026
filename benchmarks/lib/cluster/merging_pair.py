"""A job with a rollout engine on each half of the cores, and a tiny pipeline: runs with and without merges.

Owns the engines, their router and the jobs' files. Promises that everything is stopped with the context.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from lib.cluster.real_pair import multiplex, tiny_job, write_job
from rose.measure.models import SERVING_SPEC, make_rollout_model
from rose.measure.rig import Rig
from rose.types import Role

LENGTHS = ("400", *["16"] * 7)
"""Of each engine's responses: a long tail."""
SPEC = replace(SERVING_SPEC, num_layers=12, vocab_size=1024, max_positions=1024)
"""A step takes longer than what the engine's API server, the router and the client do for a token."""
BENCHMARKS = Path(__file__).parents[2]
JOB = ("env", f"PYTHONPATH={BENCHMARKS}:{BENCHMARKS.parent}", sys.executable, "-m", "lib.cluster.tailed_job")
TINY = ("--width", "256", "--layers", "4", "--max-tokens", "384")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergingRun:
    """What came of one run. ``results``: each iteration's tokens of the one job, and line of the other."""

    elapsed_s: float
    gain: float | None
    predicted_gain: float | None
    num_merges: int
    results: tuple[list[str], list[str]]


class MergingPair:
    """A context manager."""

    def __init__(self) -> None:
        self._rig = Rig()

    def __enter__(self) -> Self:
        self._rig.__enter__()
        make_rollout_model(self._rig.folder / "models" / Role.ROLLOUT, SPEC)
        cores = sorted(os.sched_getaffinity(0))
        half = len(cores) // 2
        for name, own in (("low", cores[:half]), ("high", cores[half : 2 * half])):
            flags = ("--num-gpu-blocks-override", "256")
            self._rig.start_engine(name, Role.ROLLOUT, cpus=tuple(own), vllm_args=flags)
        self._urls = [self._rig.wait_engine(name).url for name in ("low", "high")]
        self._router = self._rig.start_router(self._urls)
        return self

    def __exit__(self, *details: object) -> None:
        self._rig.__exit__(*details)

    def run(self, iterations: tuple[int, int], *flags: str) -> MergingRun:
        """Runs both jobs. Raises: WorkerError with what the command said."""
        with tempfile.TemporaryDirectory(prefix="rose-pair-") as name:
            folder = Path(name)
            log = folder / "rollouts.jsonl"
            what = (str(log), self._router, str(Role.ROLLOUT), *self._urls, "--lengths", *LENGTHS)
            jobs = [
                write_job(folder, "tailed", (*JOB, *what), iterations[0], nodes=2),
                tiny_job(folder, 1, TINY, iterations[1]),
            ]
            report: dict[str, Any] = multiplex(folder, jobs, *flags)
            tokens = [json.dumps(json.loads(line)["tokens"]) for line in log.read_text().splitlines()]
            return MergingRun(
                elapsed_s=report["elapsed_s"],
                gain=report["gain"],
                predicted_gain=report["predicted_gain"],
                num_merges=report["merges"],
                results=(tokens, (folder / "1.jsonl").read_text().splitlines()),
            )
