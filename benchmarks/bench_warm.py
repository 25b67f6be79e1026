"""A job's phase that resumes from host memory starts in a small part of the time of a new process.

warm_over_cold[train] (WEAVE Figure 4): from the start of a trainer's process until it could compute, with a
checkpoint that the page cache holds, over the load of the same state from host memory into the suspended
process. On a CPU, host memory stands for the devices' as well, and no engine, process group or dataset is
made; the paper has up to 71.5 on GPUs. bench_activation.py measures the same for a rollout engine.
bytes_per_parameter[train]: what the suspended trainer keeps, with weights, gradients and Adam's moments in
float32.
copy_gbps_over_memcpy: the rate at which a trainer's state goes to host memory and back, in the second and
later phases, over that of one memmove of as many bytes between buffers whose pages are all there. Of load it
counts the copies alone, into memory whose pages are there, as a GPU's is. [new pages] counts all of load: on
a CPU, offload gives the memory back to the system, and load takes new pages, which the kernel zeroes first.
set_gb[PHASE,MODEL] (Table 2): ARITHMETIC, what a phase keeps in the host memory of a node of eight GPUs: a
trainer that is sharded over all of the model's GPUs keeps so many bytes a parameter, and each of a node's
engines keeps its weights in bfloat16. Beside it the paper's, whose trainers hold weights and gradients again
for each of their replicas (7B, 14B), and whose engines keep more than the weights.

    python benchmarks/bench_warm.py --json warm.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.harness import median_figure, run_benchmark

from rose.errors import WorkerError
from rose.measure.figures import Figure

JOBS = Path(__file__).parent / "lib" / "cluster"
PATIENCE_S = 300.0
GB = 1e9
PARAMETERS = {"7B": 7.6e9, "14B": 14.8e9, "32B": 32.8e9, "70B": 70.6e9}
ENGINES_A_NODE = {"7B": 8, "14B": 8, "32B": 4, "70B": 1}
TRAIN_NODES = {"7B": 1, "14B": 1, "32B": 1, "70B": 4}
PAPER_GB = {
    "rollout": {"7B": 275.7, "14B": 445.4, "32B": 490.3, "70B": 391.2},
    "train": {"7B": 240.0, "14B": 456.1, "32B": 520.4, "70B": 458.7},
}
"""Source of the four: WEAVE Table 2, with TP2 and TP8 engines, and TP8PP4 trainers of 70B."""
ENGINE_BYTES = 2
PAPER_WARM = 71.5


def measure(args: argparse.Namespace) -> list[Figure]:
    num_starts, num_parameters = (2, 16 << 20) if args.quick else (5, 64 << 20)
    with tempfile.TemporaryDirectory(prefix="rose-warm-") as folder, _host_memory() as kept:
        checkpoint = Path(folder) / "checkpoint.pt"
        _start(checkpoint, num_parameters, kept)  # writes the checkpoint
        starts = [_start(checkpoint, num_parameters, kept) for _ in range(num_starts)]
    loads_s = [each for _, told in starts for each in told["load_s"]]
    ratios = [cold_s / min(told["load_s"]) for cold_s, told in starts]
    each = starts[0][1]["num_bytes"] / num_parameters
    peers: dict[str, float | None] = {
        "cold start, s": min(cold_s for cold_s, _ in starts),
        "load, s": min(loads_s),
        "paper": PAPER_WARM,
    }
    return [
        *_copy_figures(args.quick),
        median_figure("warm_over_cold[train]", ratios, "x", peers=peers),
        Figure(name="bytes_per_parameter[train]", value=each, unit="bytes", kind="measured"),
        *(_set_gb("train", model, each / TRAIN_NODES[model]) for model in PARAMETERS),
        *(_set_gb("rollout", model, ENGINE_BYTES * num) for model, num in ENGINES_A_NODE.items()),
    ]


def _host_memory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rose-warm-", dir="/dev/shm")


def _start(checkpoint: Path, num_parameters: int, kept: str) -> tuple[float, dict[str, Any]]:
    """Returns how long a process took until it could compute, and what it says."""
    begin_s = time.monotonic()
    told = _run("warm_job.py", checkpoint, num_parameters, 3, kept)
    return told["ready_s"] - begin_s, told


def _copy_figures(is_quick: bool) -> list[Figure]:
    num_parameters, num_rounds = (16 << 20, 5) if is_quick else (128 << 20, 11)
    with _host_memory() as kept:
        told = _run("copy_job.py", num_parameters, num_rounds, kept)
    rounds, num_gb = told["rounds"], told["num_bytes"] / GB
    peers: dict[str, float | None] = {
        f"{name}, GB/s": num_gb / statistics.median(each[f"{name}_s"] for each in rounds)
        for name in ("memmove", "offload", "load", "copies")
    }
    peers |= {"first offload, GB/s": num_gb / told["first_s"], "set, GB": num_gb}
    there_and_back = {
        case: [2 * each["memmove_s"] / (each["offload_s"] + each[load]) for each in rounds]
        for case, load in (("", "copies_s"), ("[new pages]", "load_s"))
    }
    return [
        median_figure(f"copy_gbps_over_memcpy{case}", ratios, "x", peers=peers, target=">= 0.8")
        for case, ratios in there_and_back.items()
    ]


def _run(job: str, *arguments: object) -> dict[str, Any]:
    """Runs a job of benchmarks/lib/cluster, and returns what it prints. Raises: WorkerError."""
    argv = [sys.executable, str(JOBS / job), *map(str, arguments)]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if run.returncode != 0:
        raise WorkerError(f"{job} ended with status {run.returncode}: {run.stderr.strip()[-500:]}")
    told: dict[str, Any] = json.loads(run.stdout)
    return told


def _set_gb(phase: str, model: str, bytes_per_parameter: float) -> Figure:
    return Figure(
        name=f"set_gb[{phase},{model}]",
        value=bytes_per_parameter * PARAMETERS[model] / 1e9,
        unit="GB a node",
        kind="simulated",
        peers={"paper": PAPER_GB[phase][model]},
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
