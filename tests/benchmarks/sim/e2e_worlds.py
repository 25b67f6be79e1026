"""A small job beside a small fleet that shares its GPUs evenly, for tests of the simulation of jobs."""

from dataclasses import replace

from sim.e2e.calibration import WORKLOAD_8B
from sim.e2e.fleet import ServedLatencies, Tape
from sim.e2e.supply import Rented
from sim.e2e.systems import World

from rose.types import GateMode

SCENARIO = replace(WORKLOAD_8B.scenario, num_dedicated=1, num_serving=4, num_trajectories=96, group_size=8)
SMALL = replace(WORKLOAD_8B, scenario=SCENARIO, train_gpus=2, max_spot_gpus=4)
EVERY_MODE = (GateMode.IDLE, GateMode.DUAL, GateMode.OFF)


def even_tape(share: float, seconds: int = 100) -> Tape:
    """A serving engine that leaves the same share of every second, and had two requests."""
    seen = ServedLatencies(ttfts_s=(0.1, 0.2), tpots_s=(0.01, 0.01))
    return Tape(shares=(share,) * seconds, steps=(5,) * seconds, latencies=seen, serving_share=1 - share)


def even_world(share: float = 0.7) -> World:
    """Autoscaling lends every GPU whole, for good: the best that it could do."""
    there = Rented(starts_s=(0.0,), ends_s=(100.0,), period_s=100.0, cold_s=0.0)
    tape = even_tape(share)
    return World(
        workload=SMALL,
        tapes=dict.fromkeys(EVERY_MODE, (tape,)),
        alone=(tape,),
        lent_whole=(there,) * 4,
        reload=(tape,),
        wire_bytes=1.3,
    )
