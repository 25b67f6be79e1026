"""Refuses a phase whose devices another process still fills: names who holds how much.

Owns the questions to NVIDIA's driver and the names of the holders. Only devices that the runner has bound to
the job's nodes are asked about, because on a machine without bound devices other jobs may use any of them. A
process may keep its CUDA context and its communicators between two phases (`KEPT_BYTES`). An actor on a
shared Ray cluster does not tell whose it is, so it counts as the job's own.
"""

import logging
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from rose.errors import DeviceMemoryHeld

logger = logging.getLogger(__name__)

KEPT_BYTES = 2 << 30
"""A context with NCCL's buffers takes up to about 1.5 GB."""
FREE_S = 10.0
"""The driver frees the memory of a process that has just ended some time later."""
POLL_S = 0.5
SMI_S = 60.0
_MIB = 1 << 20


class _Named(msgspec.Struct, frozen=True):
    """What is read of a job file."""

    name: str


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has memory of the devices."""

    pid: int
    num_bytes: int
    job: str | None
    """The job whose runner has started it; None: no job of ROSE, or it is not known."""

    def is_other(self, job: str) -> bool:
        """Returns whether it is certainly not the job's own."""
        return self.job != job if self.job is not None else not _is_ray_actor(self.pid)

    def __str__(self) -> str:
        known = f"job {self.job} (pid {self.pid})" if self.job is not None else ""
        return f"{known or f'pid {self.pid}{_command(self.pid)}'} holds {self.num_bytes / 1e9:.1f} GB"


def wait_free(job: str, phase: str, devices: Sequence[str], *, free_s: float | None = None) -> None:
    """Returns once no process of others fills the devices.

    free_s: how long that may take; None: `FREE_S`. Raises: DeviceMemoryHeld.
    """
    deadline = time.monotonic() + (free_s if free_s is not None else FREE_S)
    while held := [each for each in holders(devices) if each.is_other(job) and each.num_bytes > KEPT_BYTES]:
        if time.monotonic() >= deadline:
            who = ", and ".join(map(str, held))
            raise DeviceMemoryHeld(
                f"{phase} of job {job} needs GPU {', '.join(devices)}, where {who}; "
                "give that job's phase a working_set, whose offload frees the devices, or end the process"
            )
        time.sleep(POLL_S)


def num_devices_here() -> int:
    """Returns how many GPUs this host's driver has; 0 where it can't be asked."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=SMI_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("not asked how many GPUs there are reason=%s", error)
        return 0
    return sum(line.startswith("GPU ") for line in said.splitlines())


def holders(devices: Sequence[str]) -> list[Holder]:
    """Returns the processes with memory on these devices; none where the driver can't be asked."""
    query = ["--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", f"--id={','.join(devices)}", *query]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("not asked who holds memory devices=%s reason=%s", devices, error)
        return []
    held: dict[int, int] = {}
    for line in said.splitlines():
        pid, _, mebibytes = (field.strip() for field in line.partition(","))
        # "[N/A]" where the driver hides it. A number that is no process here may be one of this job's own, as
        # another PID namespace counts it.
        if pid.isdecimal() and mebibytes.isdecimal() and Path("/proc", pid).exists():
            held[int(pid)] = held.get(int(pid), 0) + int(mebibytes) * _MIB
    return [Holder(pid, num_bytes, _job_of(pid)) for pid, num_bytes in held.items()]


def _job_of(pid: int) -> str | None:
    """Returns the job of a process, or of the nearest one that has started it: vLLM's processes overwrite
    their own environment when they give themselves a title."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.parents()]
    except psutil.Error:  # it has ended, or is in another container
        return None
    return next((job for each in family if (job := _told_job(each.pid)) is not None), None)


def _told_job(pid: int) -> str | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        [path] = [each.removeprefix(b"ROSE_JOB=") for each in variables if each.startswith(b"ROSE_JOB=")]
        return msgspec.json.decode(Path(path.decode()).read_bytes(), type=_Named).name
    except (OSError, ValueError, msgspec.DecodeError):  # it has ended, is another user's, or is no job's
        return None


def _is_ray_actor(pid: int) -> bool:
    """Ray gives its workers a title, which overwrites their environment; the node's raylet starts them."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:  # it has just ended
        return False


def _command(pid: int) -> str:
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:  # it has just ended
        return ""
