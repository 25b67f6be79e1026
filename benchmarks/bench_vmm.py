"""Moving a slab between two owners is at least five times faster than releasing and recreating its memory.

`move_speedup[SIZE]`: the time of release-and-recreate over that of a move, for slabs of SIZE. Both start with
slabs full of the donor's bytes and end with the heir's address range backed by zeroed memory:
  move      the donor unmaps, the heir maps the same memory and fills it with zeros
  recreate  what processes that share nothing do: the donor unmaps and returns the memory to the system, the
            heir takes new memory and maps it. On the host (fallocate PUNCH_HOLE, then map and populate) the
            kernel hands out zeroed pages; on CUDA (cuMemRelease, cuMemCreate, cuMemMap) the heir fills it.
`move_ms_per_gib`, `recreate_ms_per_gib`: the same, per GiB; beside the move, one without the zeroing.
`map_us`, `unmap_us`, `zero_us`: per slab, in batches; map without zeroing.

Donor and heir are two address ranges of one process: what the kernel and the driver do per mapping is the
same as for two processes, and one clock times it. On a GPU, each unmap waits for the device first.

    python benchmarks/bench_vmm.py --json vmm.json
    python benchmarks/bench_vmm.py --backend cuda --json vmm.json
"""

import argparse
import ctypes
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from lib.harness import median_figure, run_benchmark

from rose.errors import ConfigError
from rose.measure.figures import Figure
from rose.memory.slabs.backend import Backend, BackendKind, SlabRange, Slabs, open_backend

MIB = 1 << 20
SIZES_MIB = (2, 4, 8, 16, 32, 64)
QUICK_SIZES_MIB = (2, 16, 64)
BATCH_BYTES = 256 * MIB
"""Moved at once: what a cut moves, and 4 slabs of the largest size."""
MIN_SPEEDUP = 5
MAX_GPU_MS_PER_GIB = 3
"""The limits for slabs of 64 MiB on a GPU."""
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

Seconds = dict[str, list[float]]


class Recreation(Protocol):
    """Release-and-recreate of a batch of slabs."""

    def cycle(self) -> float:
        """Returns the seconds from the donor's mapped memory to the heir's mapped, zeroed memory."""
        ...


class HostRecreation:
    """One file; its pages are returned and taken anew."""

    def __init__(self, slabs: Slabs) -> None:
        self._all = list(range(slabs.num_slabs))
        self._slab_bytes = slabs.slab_bytes
        self._fd = slabs.export(0)
        self._fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        self._range = slabs.reserve(slabs.num_slabs)
        self._range.map_many(self._all, self._all)

    def cycle(self) -> float:
        start = perf_counter()
        self._range.unmap_many(self._all)
        for slab in self._all:
            offset, length = ctypes.c_int64(slab * self._slab_bytes), ctypes.c_int64(self._slab_bytes)
            if self._fallocate(self._fd, _PUNCH_HOLE, offset, length) != 0:
                raise OSError(ctypes.get_errno(), f"fallocate: can't release slab {slab}")
        self._range.map_many(self._all, self._all, zero=False)
        return perf_counter() - start

    def close(self) -> None:
        os.close(self._fd)


class CudaRecreation:
    """Handles are released and created. Reserving addresses is not timed: an engine does that once."""

    def __init__(self, backend: Backend, num_slabs: int, slab_bytes: int) -> None:
        self._backend, self._slab_bytes = backend, slab_bytes
        self._all = list(range(num_slabs))
        self._slabs: Slabs | None = backend.create(num_slabs, slab_bytes, "bench")
        self._range = self._slabs.reserve(num_slabs)
        self._range.map_many(self._all, self._all)

    def cycle(self) -> float:
        start = perf_counter()
        self._range.unmap_many(self._all)
        elapsed_s = perf_counter() - start
        del self._range
        start = perf_counter()
        self._slabs = None
        self._slabs = self._backend.create(len(self._all), self._slab_bytes, "bench")
        elapsed_s += perf_counter() - start
        self._range = self._slabs.reserve(len(self._all))
        start = perf_counter()
        self._range.map_many(self._all, self._all)
        return elapsed_s + perf_counter() - start

    def close(self) -> None:
        del self._range
        self._slabs = None


class SizeBench:
    """All operations on a batch of slabs of one size."""

    def __init__(self, backend: Backend, kind: BackendKind, slab_bytes: int, batch_bytes: int) -> None:
        self.num_slabs = batch_bytes // slab_bytes
        self._all = list(range(self.num_slabs))
        slabs = backend.create(self.num_slabs, slab_bytes, "bench")
        self._donor, self._heir = slabs.reserve(self.num_slabs), slabs.reserve(self.num_slabs)
        self._donor.map_many(self._all, self._all)
        self._recreation = (
            HostRecreation(backend.create(self.num_slabs, slab_bytes, "bench"))
            if kind is BackendKind.HOST
            else CudaRecreation(backend, self.num_slabs, slab_bytes)
        )

    def measure(self, seconds: Seconds) -> None:
        """One round: each operation once, on the whole batch."""
        donor, heir, all_ = self._donor, self._heir, self._all

        def move(giver: SlabRange, taker: SlabRange, *, zero: bool) -> None:
            giver.unmap_many(all_)
            taker.map_many(all_, all_, zero=zero)

        def zero_all() -> None:
            for position in all_:
                heir.zero(position)

        seconds["move"].append(_time(lambda: move(donor, heir, zero=True)))
        seconds["recreate"].append(self._recreation.cycle())
        seconds["unmap"].append(_time(lambda: heir.unmap_many(all_)))
        seconds["map"].append(_time(lambda: heir.map_many(all_, all_, zero=False)))
        seconds["zero"].append(_time(zero_all))
        seconds["move unzeroed"].append(_time(lambda: move(heir, donor, zero=False)))

    def close(self) -> None:
        self._recreation.close()


def measure(args: argparse.Namespace) -> list[Figure]:
    kind = BackendKind(args.backend)
    backend = open_backend(kind, args.device)
    sizes_mib = QUICK_SIZES_MIB if args.quick else SIZES_MIB
    return measure_sizes(backend, kind, sizes_mib, BATCH_BYTES, 4 if args.quick else 20)


def measure_sizes(
    backend: Backend, kind: BackendKind, sizes_mib: Sequence[int], batch_bytes: int, num_rounds: int
) -> list[Figure]:
    """Measures batches of each size in turn, round by round."""
    for size_mib in sizes_mib:
        if size_mib * MIB % backend.granularity != 0:
            raise ConfigError(f"slabs of {size_mib} MiB: not a multiple of {backend.granularity} bytes")
    seconds: dict[int, Seconds] = {size_mib: defaultdict(list) for size_mib in sizes_mib}
    for _ in range(num_rounds):
        for size_mib in sizes_mib:
            # One size at a time: all of them at once would need gigabytes.
            bench = SizeBench(backend, kind, size_mib * MIB, batch_bytes)
            bench.measure(defaultdict(list))  # not kept: first touch of tables and code
            bench.measure(seconds[size_mib])
            bench.close()
    return [
        figure
        for size_mib in sizes_mib
        for figure in _figures(size_mib, seconds[size_mib], kind, batch_bytes)
    ]


def _figures(size_mib: int, seconds: Seconds, kind: BackendKind, batch_bytes: int) -> list[Figure]:
    case = f"[{size_mib}MiB]"
    num_slabs, num_gib = batch_bytes // (size_mib * MIB), batch_bytes / (1024 * MIB)
    per_gib = {name: [each * 1e3 / num_gib for each in values] for name, values in seconds.items()}
    per_slab = {name: [each * 1e6 / num_slabs for each in values] for name, values in seconds.items()}
    speedups = [recreate / move for recreate, move in zip(seconds["recreate"], seconds["move"], strict=True)]
    is_gpu_target = kind is BackendKind.CUDA and size_mib == 64
    unzeroed = median_figure("", per_gib["move unzeroed"], "").value
    return [
        median_figure("move_speedup" + case, speedups, "x", target=f">= {MIN_SPEEDUP}"),
        median_figure(
            "move_ms_per_gib" + case,
            per_gib["move"],
            "ms",
            target=f"<= {MAX_GPU_MS_PER_GIB}" if is_gpu_target else None,
            peers={"unzeroed": unzeroed},
        ),
        median_figure("recreate_ms_per_gib" + case, per_gib["recreate"], "ms"),
        *(median_figure(f"{name}_us{case}", per_slab[name], "us") for name in ("map", "unmap", "zero")),
    ]


def _time(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=[kind.value for kind in BackendKind], default="host")
    parser.add_argument("--device", type=int, default=0, help="which GPU, with --backend cuda")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure, _add_arguments))
