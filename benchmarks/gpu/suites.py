"""Parts that run what exists elsewhere: tests, the board's benchmark with real kernels, kvcached."""

import argparse
import re
import subprocess
import sys

import bench_board
import bench_kvcached

from gpu.rig import ROOT, GpuRig
from rose.errors import WorkerError
from rose.measure.figures import Figure

CONTRACT_TESTS = (
    "tests/memory/test_vmm_contract.py",
    "tests/memory/test_pool_backends.py",
    "tests/transfer/format/test_device_delta.py",
)
TESTS_TIMEOUT_S = 560.0


def measure_contract(rig: GpuRig) -> list[Figure]:
    """Runs the tests that every backend passes on the host, against this driver.

    A dry run takes the first file alone: the others pass on the stand-in driver wherever the tests run.
    """
    files, world = (CONTRACT_TESTS[:1], "stand-in") if rig.is_dry else (CONTRACT_TESTS, "gpu")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", world]
    done = subprocess.run(
        command, check=False, text=True, stdout=subprocess.PIPE, cwd=ROOT, timeout=TESTS_TIMEOUT_S
    )
    print(done.stdout)
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)
    counts = {word: int(number) for number, word in found}
    bad = counts.get("failed", 0) + counts.get("error", 0)
    if not counts.get("passed") and not bad:
        raise WorkerError(f"no contract test ran: {done.stdout.strip().splitlines()[-1:]}")
    peers: dict[str, float | None] = {word: counts.get(word, 0) for word in ("passed", "skipped")}
    return [Figure(name="contract_failed_tests", value=bad, unit="tests", target="0", peers=peers)]


def measure_board(rig: GpuRig) -> list[Figure]:
    """Has a serving engine and two guests take turns with steps of real kernels, under kills and stops."""
    num_steps = 50 if rig.is_dry else rig.count(20_000)
    compute = "cpu" if rig.is_dry else "cuda:0"
    return [bench_board.lateness_figure("kernel_lateness", 1, 2, num_steps, seed=0, compute=compute)]


def measure_kvcached(rig: GpuRig) -> list[Figure]:
    """Runs bench_kvcached."""
    return bench_kvcached.measure(argparse.Namespace(device=0, quick=rig.is_quick))
