"""Moving a slab costs less than kvcached's release in one process and creation in the other, per GiB.

Needs a CUDA device and kvcached. Elsewhere every figure is "not measured", one line says why, and kvcached's
published figure stands beside it. Measured in turn for pages of SIZE, with a fence at both ends:
  kvcached_ms_per_gib[SIZE]  `unmap_from_kv_tensors`, then `map_to_kv_tensors`, of a whole batch: what passing
                             memory from one of its engines to another costs, without the up to 100 ms until
                             the other one polls. Unmapping releases the handles, mapping creates new ones;
                             nothing is zeroed.
  rose_ms_per_gib[SIZE]      the same batch of slabs: the donor unmaps, the heir maps the same handles and
                             fills them with zeros; beside it, without zeroing
  move_speedup[kvcached, SIZE]  the one over the other, in pairs

kvcached runs in a child process, as its errors end the process that has them. It gets one layer and one
buffer, so that one of its pages is one driver handle of SIZE, as one slab is; its default is 2 MiB. Written
from kvcached's sources (autumn 2026); the part on the GPU has not been run yet.

Published by kvcached's authors for an A100, per page of 2 MiB: create 193 us, map 1.45 us, set access 36 us,
unmap 25.6 us: 131 ms/GiB.

    python benchmarks/bench_kvcached.py --json kvcached.json
"""

import argparse
import importlib.util
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from time import perf_counter

from lib.harness import median_figure, run_benchmark

from rose.errors import VmmError, WorkerError
from rose.measure.figures import Figure
from rose.memory.slabs.backend import Backend, BackendKind, open_backend

MIB = 1 << 20
SIZES_MIB = (2, 16, 64)
BATCH_BYTES = 1024 * MIB
NUM_ROUNDS, QUICK_ROUNDS = 20, 4
MIN_SPEEDUP = 5
PUBLISHED_US = {"create": 193.0, "map": 1.45, "set access": 36.0, "unmap": 25.6}
"""Per page of 2 MiB, A100."""
PUBLISHED = "published, A100 at 2 MiB"
PUBLISHED_MS_PER_GIB = sum(PUBLISHED_US.values()) * (1024 // 2) / 1e3


@dataclass(slots=True)
class _Seconds:
    """Holds the seconds of each round's batch."""

    kvcached: list[float] = field(default_factory=list)
    move: list[float] = field(default_factory=list)
    unzeroed: list[float] = field(default_factory=list)


def measure(args: argparse.Namespace) -> list[Figure]:
    """Every size in turn; without a GPU or kvcached the same figures without values."""
    backend = _backend(args.device)
    seconds = {size_mib: _Seconds() for size_mib in SIZES_MIB}
    if backend is not None:
        num_rounds = QUICK_ROUNDS if args.quick else NUM_ROUNDS
        for size_mib, samples in seconds.items():
            _measure_size(backend, args.device, size_mib * MIB, num_rounds, samples)
    return [figure for size_mib, samples in seconds.items() for figure in _figures(size_mib, samples)]


def _backend(device: int) -> Backend | None:
    """ROSE's side, or None after saying in one line what is missing."""
    missing = []
    backend: Backend | None = None
    try:
        backend = open_backend(BackendKind.CUDA, device)
    except VmmError as error:
        missing.append(f"a CUDA device ({error})")
    if importlib.util.find_spec("kvcached") is None:
        missing.append("kvcached (pip install kvcached, beside vLLM for CUDA)")
    if not missing:
        return backend
    print(f"bench_kvcached: not measurable here, it needs {' and '.join(missing)}", file=sys.stderr)
    return None


def _measure_size(backend: Backend, device: int, page_bytes: int, num_rounds: int, samples: _Seconds) -> None:
    """Rounds of both sides in turn; the first of each is not kept: first touch of tables and code."""
    ours = _Mover(backend, page_bytes)
    spawn = get_context("spawn")  # a forked child can't use CUDA
    with ProcessPoolExecutor(
        1, mp_context=spawn, initializer=_open_kvcached, initargs=(device, page_bytes)
    ) as theirs:
        try:
            for number in range(-1, num_rounds):
                kvcached_s = theirs.submit(_kvcached_cycle, page_bytes).result()
                move_s, unzeroed_s = ours.cycle(zero=True), ours.cycle(zero=False)
                if number >= 0:
                    samples.kvcached.append(kvcached_s)
                    samples.move.append(move_s)
                    samples.unzeroed.append(unzeroed_s)
        except BrokenProcessPool as error:
            raise WorkerError(f"kvcached ended its process with pages of {page_bytes} bytes") from error


class _Mover:
    """A batch of slabs that passes between two address ranges, as between two engines."""

    def __init__(self, backend: Backend, slab_bytes: int) -> None:
        num_slabs = BATCH_BYTES // slab_bytes
        self._all = list(range(num_slabs))
        slabs = backend.create(num_slabs, slab_bytes, "bench")
        self._owner, self._other = slabs.reserve(num_slabs), slabs.reserve(num_slabs)
        self._owner.map_many(self._all, self._all)

    def cycle(self, *, zero: bool) -> float:
        """Returns the seconds until the other has the owner's slabs; unmapping fences, zeroing waits."""
        start = perf_counter()
        self._owner.unmap_many(self._all)
        self._other.map_many(self._all, self._all, zero=zero)
        elapsed_s = perf_counter() - start
        self._owner, self._other = self._other, self._owner
        return elapsed_s


# In kvcached's process ---------------------------------------------------------------------------------


def _open_kvcached(device: int, page_bytes: int) -> None:
    """Reserve a batch's addresses and map all of them. A failure breaks the process pool."""
    import torch
    from kvcached import vmm_ops

    torch.cuda.set_device(device)
    name = f"cuda:{device}"
    vmm_ops.init_kvcached(name, page_bytes, True)
    element_bytes, num_layers, num_buffers = 2, 1, 1
    vmm_ops.create_kv_tensors(BATCH_BYTES, element_bytes, name, num_layers, num_buffers)
    vmm_ops.map_to_kv_tensors(_offsets(page_bytes))


def _kvcached_cycle(page_bytes: int) -> float:
    """Returns the seconds in which the whole batch goes back to the driver and is taken anew."""
    import torch
    from kvcached import vmm_ops

    offsets = _offsets(page_bytes)
    torch.cuda.synchronize()
    start = perf_counter()
    done = vmm_ops.unmap_from_kv_tensors(offsets) and vmm_ops.map_to_kv_tensors(offsets)
    torch.cuda.synchronize()
    if not done:
        raise WorkerError(f"kvcached refused to unmap or map {len(offsets)} pages of {page_bytes} bytes")
    return perf_counter() - start


def _offsets(page_bytes: int) -> list[int]:
    return list(range(0, BATCH_BYTES, page_bytes))


# Figures -----------------------------------------------------------------------------------------------


def _figures(size_mib: int, samples: _Seconds) -> list[Figure]:
    case = f"{size_mib}MiB"
    speedups = [theirs / ours for theirs, ours in zip(samples.kvcached, samples.move, strict=True)]
    unzeroed = _ms_per_gib("", samples.unzeroed, {}).value
    return [
        _figure(f"move_speedup[kvcached, {case}]", speedups, "x", {}, target=f">= {MIN_SPEEDUP}"),
        _ms_per_gib(f"kvcached_ms_per_gib[{case}]", samples.kvcached, {PUBLISHED: PUBLISHED_MS_PER_GIB}),
        _ms_per_gib(f"rose_ms_per_gib[{case}]", samples.move, {"unzeroed": unzeroed}),
    ]


def _ms_per_gib(name: str, seconds: list[float], peers: dict[str, float | None]) -> Figure:
    num_gib = BATCH_BYTES / (1024 * MIB)
    return _figure(name, [each * 1e3 / num_gib for each in seconds], "ms", peers)


def _figure(
    name: str, values: list[float], unit: str, peers: dict[str, float | None], target: str | None = None
) -> Figure:
    """The median, or "not measured"."""
    if not values:
        return Figure(name=name, value=None, unit=unit, target=target, peers=peers)
    return median_figure(name, values, unit, target=target, peers=peers)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=int, default=0, help="which GPU")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
