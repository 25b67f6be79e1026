"""What moving slabs costs while another process's kernels fill the GPU, and what it costs that process."""

import os
import sys
from time import perf_counter

from lib.harness import median_figure

from gpu.rig import GpuRig, Matmuls
from rose.measure.figures import Figure, percentile

NUM_SLABS = 16
STEP_S = 0.005


def measure(rig: GpuRig) -> list[Figure]:
    """Moves slabs alone, then beside a process that has them mapped and computes on others."""
    slab_bytes = rig.slab_bytes(64)
    slabs = rig.backend.create(2 * NUM_SLABS, slab_bytes, "kit")
    range_ = slabs.reserve(NUM_SLABS)
    all_ = list(range(NUM_SLABS))

    def move(times: dict[str, list[float]]) -> None:
        times["map"].append(rig.time_us(lambda: range_.map_many(all_, all_)) / NUM_SLABS)
        times["unmap"].append(rig.time_us(lambda: range_.unmap_many(all_)) / NUM_SLABS)

    figures = []
    alone: dict[str, list[float]] = {"map": [], "unmap": []}
    beside: dict[str, list[float]] = {"map": [], "unmap": []}
    for _ in range(rig.count(100)):
        move(alone)
    player = rig.start_player("beside_kernels.py", slabs, [slab_bytes])
    try:
        assert player.stdin is not None and player.stdout is not None
        quiet_ms = _steps(player.stdout.readline())
        for _ in range(rig.count(100)):
            move(beside)
        answer, _ = player.communicate("end\n", timeout=60)
        disturbed_ms = _steps(answer)
    finally:
        player.kill()
        player.communicate()
    for call in ("map", "unmap"):
        peers = {"alone": percentile(alone[call], 50)}
        figures.append(median_figure(f"{call}_us[beside kernels]", beside[call], "us", peers=peers))
    for percent in (50, 99):
        value = percentile(disturbed_ms, percent)
        peers = {"without moves": percentile(quiet_ms, percent)}
        figures.append(Figure(name=f"other_step_ms_p{percent}", value=value, unit="ms", peers=peers))
    return figures


def _steps(line: str) -> list[float]:
    return [float(each) for each in line.split()]


def main() -> int:
    """The other process: maps half of the slabs, computes for a while, then until a line comes in."""
    is_dry, num_fds = bool(int(sys.argv[1])), int(sys.argv[2])
    fds = [int(each) for each in sys.argv[3 : 3 + num_fds]]
    slab_bytes = int(sys.argv[3 + num_fds])
    rig = GpuRig(is_dry=is_dry, is_quick=True)
    range_ = rig.backend.adopt(fds, slab_bytes).reserve(NUM_SLABS)
    for fd in fds:
        os.close(fd)
    range_.map_many(list(range(NUM_SLABS)), list(range(NUM_SLABS, 2 * NUM_SLABS)))
    matmuls = Matmuls(rig.device)
    print(*(_step(matmuls) for _ in range(10 if is_dry else 400)), flush=True)
    os.set_blocking(0, False)
    steps = [_step(matmuls)]
    while not sys.stdin.readline():
        steps.append(_step(matmuls))
    print(*steps, flush=True)
    return 0


def _step(matmuls: Matmuls) -> float:
    start = perf_counter()
    matmuls(STEP_S)
    return 1e3 * (perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
