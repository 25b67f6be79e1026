"""What a context costs, and what works without one; green contexts, which confine work to some of the GPU."""

from typing import Any

from lib.harness import median_figure

from gpu.rig import GpuRig, Matmuls, check
from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.memory.slabs.backend import CudaBackend

MIB = 1 << 20


def measure(rig: GpuRig) -> list[Figure]:
    """Measures the device memory that an owner of slabs takes, then what its context adds."""
    num_slabs, slab_bytes = 16, rig.slab_bytes(64)
    free_before = rig.backend.free_bytes
    owner = CudaBackend(0)
    slabs = owner.create(num_slabs, slab_bytes, "kit")
    free_owned = rig.backend.free_bytes
    range_ = slabs.reserve(1)
    range_.map(0, 0)
    free_mapped = rig.backend.free_bytes
    owner_mib = (free_before - free_owned - num_slabs * slab_bytes) / MIB
    return [
        Figure(
            name="owner_overhead_mib", value=owner_mib, unit="MiB", target=None if rig.is_dry else "<= 64"
        ),
        Figure(name="context_mib", value=(free_owned - free_mapped) / MIB, unit="MiB"),
        *_green_figures(rig),
    ]


def _green_figures(rig: GpuRig) -> list[Figure]:
    if rig.is_dry:
        return [Figure(name="green_half_slowdown", value=None, unit="x")]
    import torch
    from cuda.bindings import driver

    matmuls = Matmuls(rig.device)
    alone = [rig.time_us(lambda: matmuls(0.02)) for _ in range(rig.count(20))]
    stream, num_sms, all_sms = _green_stream(driver)
    confined = []
    half = torch.cuda.ExternalStream(int(stream))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(half):
        for _ in range(rig.count(20)):
            confined.append(rig.time_us(lambda: matmuls(0.02)))
    slowdown = [each / min(alone) for each in confined]
    peers: dict[str, float | None] = {"SMs": num_sms, "of": all_sms}
    return [median_figure("green_half_slowdown", slowdown, "x", peers=peers)]


def _green_stream(driver: Any) -> tuple[Any, int, int]:
    """Returns a stream on half of the GPU's multiprocessors, their number, and that of all."""
    device = check(driver.cuDeviceGet(0), "cuDeviceGet")
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = check(driver.cuDeviceGetDevResource(device, kind), "cuDeviceGetDevResource")
    half = whole.sm.smCount // 2
    parts, number, _ = check(
        driver.cuDevSmResourceSplitByCount(1, whole, 0, half), "cuDevSmResourceSplitByCount"
    )
    if number < 1:
        raise WorkerError(f"the driver can't take {half} of {whole.sm.smCount} multiprocessors apart")
    description = check(driver.cuDevResourceGenerateDesc(parts[:1], 1), "cuDevResourceGenerateDesc")
    default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = check(driver.cuGreenCtxCreate(description, device, default), "cuGreenCtxCreate")
    unordered = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = check(driver.cuGreenCtxStreamCreate(green, unordered, 0), "cuGreenCtxStreamCreate")
    return stream, parts[0].sm.smCount, whole.sm.smCount
