"""Shares of a GPU's multiprocessors, on the stand-in driver, which has 20 of them in groups of 8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")

from vmm_worlds import build_stand_in

ROOT = Path(__file__).parents[4]


def run(folder: Path | None, code: str) -> str:
    """Runs it in a process of its own, which finds the stand-in for the driver; without one, none."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(folder or "")}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, text=True, capture_output=True, env=environment
    )
    return (done.stdout + done.stderr).strip()


@pytest.mark.slow
def test_shares_with_the_same_border_have_no_multiprocessor_in_common(tmp_path: Path) -> None:
    """A stream of the stand-in is called 1000 times its first multiprocessor, plus their number."""
    code = """
from rose.scheduler.runtime.job.multiprocessors import Multiprocessors
gpu = Multiprocessors()
print(gpu.name, gpu.num)
print(gpu.stream(range(5)), gpu.stream(range(5, 20)))
print(gpu.stream(range(10)), gpu.stream(range(10, 20)))
print(gpu.stream(range(10)) is gpu.stream(range(10)))
for numbers in (range(5, 10), range(17)):
    try:
        gpu.stream(numbers)
    except Exception as error:
        print(type(error).__name__, error)
"""
    build_stand_in(tmp_path)
    assert run(tmp_path, code).splitlines() == [
        "stand-in 20",
        "(8, 8) (8012, 12)",
        "(16, 16) (16004, 4)",
        "True",
        "ValueError multiprocessors 5 to 9 must begin at 0 or end at 19",
        "ConfigError the driver can't split 17 of the 20 multiprocessors of stand-in off and leave some "
        "(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION); a GPU with more of them can be shared",
    ]


@pytest.mark.slow
def test_a_share_s_stream_waits_for_what_came_before_and_is_kept_until_the_next_share(
    tmp_path: Path,
) -> None:
    """torch has no streams on a CPU, so it gets some that write down what is done with them."""
    pytest.importorskip("torch")
    code = """
import torch
from rose.scheduler.runtime.channel.messages import Shared
from rose.scheduler.runtime.job.multiprocessors import GreenContexts
class Stream:
    def __init__(self, handle, device):
        self.handle = handle
    def __eq__(self, other):
        return self.handle == other.handle
    def wait_stream(self, other):
        print(self.handle, "waits for", other.handle)
    def synchronize(self):
        print(self.handle, "is done")
current = Stream("own", 0)
def set_stream(stream):
    global current
    current = stream
torch.cuda.ExternalStream, torch.cuda.set_stream = Stream, set_stream
torch.cuda.current_stream = lambda device: current
device = GreenContexts()
device.finish()
for cores in (range(20), range(5), range(5), range(10, 20), range(20)):
    device.take(Shared(epoch=1, cores=list(cores), compute=len(cores) / 20, memory=0.5))
    device.finish()
"""
    build_stand_in(tmp_path)
    assert run(tmp_path, code).splitlines() == [
        "own is done",
        *("8 waits for own", "8 is done", "8 is done"),
        *("16004 waits for 8", "16004 is done"),
        *("own waits for 16004", "own is done"),
    ]


@pytest.mark.slow
def test_a_gpu_without_an_mps_server_is_refused_with_the_command_that_starts_one(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from rose.errors import RoseError
from rose.jobs.multiplex import main
Path("a.yaml").write_text("name: a")
try:
    main(["a.yaml", "a.yaml", "--gpu"])
except RoseError as error:
    print(error)
"""
    build_stand_in(tmp_path)
    code = f"import os; os.chdir({str(tmp_path)!r}); os.environ['CUDA_MPS_PIPE_DIRECTORY'] = 'none'\n{code}"
    assert "no MPS server at none/control" in run(tmp_path, code)
    assert "nvidia-cuda-mps-control -d" in run(tmp_path, code)
