"""Copies between arrays in memory, on all cores that the process may use.

One thread reaches a part of the memory's bandwidth, and less where it meets pages that the kernel has to fill
with zeros first. numpy copies without the interpreter's lock, so threads suffice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy takes half as long to load as all else that a job needs of ROSE
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.generic]

CHUNK_BYTES = 2 << 20
"""A huge page: the page that the kernel has just filled with zeros is still in the core's cache when it is
copied to. The C library copies larger pieces past the caches, at half the speed (AMD EPYC)."""
MAX_THREADS = 8
"""More don't make a socket's memory faster, and the ranks of a node copy at the same time."""


def copy_arrays(pairs: Iterable[tuple[Array, Array]]) -> None:
    """Copies the second array of each pair into the first, of the same shape and type."""
    import numpy as np

    chunks = [chunk for to, source in pairs for chunk in _chunks(to, source)]
    shared = iter(chunks)  # a list's iterator may be used by several threads

    def work() -> None:
        for to, source in shared:
            np.copyto(to, source)

    num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS, len(chunks))
    if num_threads <= 1:
        work()
        return
    with ThreadPoolExecutor(num_threads, "rose-copy") as threads:
        for each in [threads.submit(work) for _ in range(num_threads)]:
            each.result()


def _chunks(to: Array, source: Array) -> Iterator[tuple[Array, Array]]:
    """Cuts a pair into pieces, unless one of the two is not contiguous."""
    if to.nbytes <= CHUNK_BYTES or not (to.flags.c_contiguous and source.flags.c_contiguous):
        yield to, source
        return
    flat_to, flat_source = to.reshape(-1), source.reshape(-1)
    step = max(1, CHUNK_BYTES // to.itemsize)
    for begin in range(0, len(flat_to), step):
        yield flat_to[begin : begin + step], flat_source[begin : begin + step]
