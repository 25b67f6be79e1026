"""What a context costs, and what works without one.

Another process measures the free memory, each time with a context of its own. In this process, the question
itself would make a context while it is answered.
"""

import subprocess
import sys

from gpu.rig import MIB, GpuRig
from rose.measure.figures import Figure
from rose.memory.slabs.backend import CudaBackend

FREE_BYTES = "from rose.memory.slabs.backend import CudaBackend; print(CudaBackend(0).free_bytes)"


def measure(rig: GpuRig) -> list[Figure]:
    """Measures the device memory that an owner of slabs takes, then what its context adds."""
    num_slabs, slab_bytes = 16, rig.slab_bytes(64)
    free_before = _free_bytes()
    owner = CudaBackend(0)
    slabs = owner.create(num_slabs, slab_bytes, "kit")
    free_owned = _free_bytes()
    range_ = slabs.reserve(1)
    range_.map(0, 0)
    free_mapped = _free_bytes()
    owner_mib = (free_before - free_owned - num_slabs * slab_bytes) / MIB
    return [
        Figure(
            name="owner_overhead_mib", value=owner_mib, unit="MiB", target=None if rig.is_dry else "<= 64"
        ),
        Figure(name="context_mib", value=(free_owned - free_mapped) / MIB, unit="MiB"),
    ]


def _free_bytes() -> int:
    command = [sys.executable, "-c", FREE_BYTES]
    return int(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout)
