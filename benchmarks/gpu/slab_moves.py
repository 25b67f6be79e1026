"""What moving slabs costs: moves beside recreation, guards, a second mapping, a large cut."""

from functools import partial
from time import perf_counter

import bench_vmm
import torch
from lib.harness import median_figure

from gpu.rig import MIB, GpuRig
from rose.measure.figures import Figure
from rose.memory.slabs.backend import BackendKind, SlabRange

CUT_BYTES = 30 << 30
CUT_BATCH = 16
"""An engine unmaps this many slabs before it releases them (rose/engine/memory/kv_range.py)."""


def measure_moves(rig: GpuRig) -> list[Figure]:
    """Runs bench_vmm's figures on CUDA."""
    sizes: tuple[int, ...] = bench_vmm.QUICK_SIZES_MIB if rig.is_quick else bench_vmm.SIZES_MIB
    batch_bytes = 4 * MIB if rig.is_dry else bench_vmm.BATCH_BYTES
    sizes = (1, 2) if rig.is_dry else sizes
    return bench_vmm.measure_sizes(rig.backend, BackendKind.CUDA, sizes, batch_bytes, rig.count(20))


def measure_guards(rig: GpuRig) -> list[Figure]:
    """Times mapping and unmapping with and without guards, and reads a guard."""
    num_slabs, slab_bytes = 32, rig.slab_bytes(64)
    slabs = rig.backend.create(num_slabs, slab_bytes, "kit")
    all_ = list(range(num_slabs))
    figures = []
    for name, is_guarded in (("no guards", False), ("guards", True)):
        times: dict[str, list[float]] = {"map": [], "unmap": [], "guard": []}
        range_ = slabs.reserve(num_slabs + 1, guard=is_guarded)
        for _ in range(rig.count(40)):
            times["map"].append(rig.time_us(partial(range_.map_many, all_, all_, zero=False)))
            times["unmap"].append(rig.time_us(partial(range_.unmap_many, all_, guard=False)))
            times["guard"].append(rig.time_us(range_.guard))
        figures += [
            median_figure(f"{call}_us[{name}]", [each / num_slabs for each in values], "us")
            for call, values in times.items()
        ]
        if is_guarded:
            range_.map(0, 0)
            stray = rig.tensor(range_)[slab_bytes : 2 * slab_bytes]
            found = int(torch.count_nonzero(stray.view(torch.int32)))
            figures.append(Figure(name="guard_nonzero_words", value=found, unit="words", target="0"))
    return figures


def measure_aliasing(rig: GpuRig) -> list[Figure]:
    """Maps each slab a second time, in another range: both must see the same bytes."""
    num_slabs, slab_bytes = 16, rig.slab_bytes(64)
    slabs = rig.backend.create(num_slabs, slab_bytes, "kit")
    all_ = list(range(num_slabs))
    first, second = slabs.reserve(num_slabs), slabs.reserve(num_slabs)
    first.map_many(all_, all_)
    times = []
    for _ in range(rig.count(20)):
        times.append(rig.time_us(lambda: second.map_many(all_, all_[::-1], zero=False)) / num_slabs)
        second.unmap_many(all_)
    second.map_many(all_, all_[::-1], zero=False)
    ours, theirs = rig.tensor(first).view(num_slabs, -1), rig.tensor(second).view(num_slabs, -1)
    wrong = 0
    for slab in all_:
        ours[slab].fill_(slab + 1)
        rig.sync()
        wrong += int((theirs[num_slabs - 1 - slab] != slab + 1).sum())
    return [
        median_figure("alias_map_us", times, "us"),
        Figure(name="alias_wrong_bytes", value=wrong, unit="bytes", target="0"),
    ]


def measure_cut(rig: GpuRig) -> list[Figure]:
    """Times a cut of 30 GiB, or of what fits: when its first slabs are free for others, and when its last."""
    slab_bytes = rig.slab_bytes(64)
    num_slabs = 64 if rig.is_dry else min(CUT_BYTES, rig.backend.free_bytes * 8 // 10) // slab_bytes
    slabs = rig.backend.create(num_slabs, slab_bytes, "kit")
    range_ = slabs.reserve(num_slabs, guard=True)
    firsts, lasts = [], []
    for _ in range(rig.count(10)):
        range_.map_many(list(range(num_slabs)), list(range(num_slabs)), zero=False)
        rig.sync()
        first_ms, last_ms = _cut(range_, num_slabs)
        firsts.append(first_ms)
        lasts.append(last_ms)
    cut_gib = num_slabs * slab_bytes / (1 << 30)
    peers: dict[str, float | None] = {"GiB": cut_gib}
    return [
        median_figure("cut_first_ms", firsts, "ms", target="<= 5", peers=peers),
        median_figure("cut_last_ms", lasts, "ms", peers=peers),
    ]


def _cut(range_: SlabRange, num_slabs: int) -> tuple[float, float]:
    start = perf_counter()
    range_.fence()
    first_s = 0.0
    for begin in range(0, num_slabs, CUT_BATCH):
        range_.unmap_many(list(range(begin, min(begin + CUT_BATCH, num_slabs))), fence=False, guard=False)
        first_s = first_s or perf_counter() - start
        range_.guard()
    last_s = perf_counter() - start
    return 1e3 * first_s, 1e3 * last_s
