"""Two tiny pipelines under `rose sched multiplex`: serial and multiplexed runs of the same programs.

Owns the jobs' files and the reading of their rewards. Each run is the user's command in a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rose.config import child_environment
from rose.errors import WorkerError

TIMEOUT_S = 900.0
PIPELINE = "rose.measure.tiny_pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPair:
    """What came of one run. `rewards`: each pipeline's lines, with a hash of its weights each."""

    elapsed_s: float
    gain: float | None
    mode: str
    slowdown: Mapping[str, Sequence[float]]
    rewards: tuple[list[str], list[str]]


def run_pair(options: Sequence[str], iterations: int, *flags: str) -> MeasuredPair:
    """Runs two pipelines that differ in their seeds. Raises: WorkerError with what the command said."""
    with tempfile.TemporaryDirectory(prefix="rose-pair-") as name:
        folder = Path(name)
        jobs = [tiny_job(folder, index, options, iterations) for index in (0, 1)]
        report = multiplex(folder, jobs, *flags)
        rewards = [(folder / f"{index}.jsonl").read_text().splitlines() for index in (0, 1)]
        return MeasuredPair(
            elapsed_s=report["elapsed_s"],
            gain=report["gain"],
            mode=report["mode"],
            slowdown=report["slowdown"],
            rewards=(rewards[0], rewards[1]),
        )


def multiplex(folder: Path, jobs: Sequence[Path], *flags: str) -> dict[str, Any]:
    """Runs the command in a folder and returns its report. Raises: WorkerError with what it said."""
    argv = [*(str(job) for job in jobs), "--json", "--folder", str(folder / "run"), *flags]
    done = subprocess.run(
        [sys.executable, "-m", "rose.cli", "sched", "multiplex", *argv],
        env=child_environment(
            {"ROSE_RUNTIME_DIR": str(folder), "ROSE_CHANNEL": f"unix:{folder / 'channel'}"}
        ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        logs = [path.read_text()[-2000:] for path in (folder / "run" / "logs").glob("*.log")]
        raise WorkerError(f"rose sched multiplex: status {done.returncode}: {done.stderr}\n{logs}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def tiny_job(folder: Path, index: int, options: Sequence[str], iterations: int) -> Path:
    """Writes the file of a tiny pipeline, which writes its rewards to INDEX.jsonl."""
    command = [
        *(sys.executable, "-m", PIPELINE, "--rewards", str(folder / f"{index}.jsonl")),
        *("--seed", str(index), "--train-threads", str(len(os.sched_getaffinity(0)))),
        *options,
    ]
    return write_job(folder, f"pipeline-{index}", command, iterations)


def write_job(folder: Path, name: str, command: Sequence[str], iterations: int, nodes: int = 1) -> Path:
    """Writes a job's file. ``nodes``: those of its rollouts."""
    content = {
        "name": name,
        "command": list(command),
        "max_tokens": 1024,
        "iterations": iterations,
        "phases": {"rollout": {"nodes": nodes}, "train": {"after": ["rollout"]}},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
