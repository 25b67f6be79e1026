"""Part of bench_e2e: what a step costs with lent serving GPUs, and with owned ones instead at equal time.

Owns the search for as many own GPUs as make the resource-fixed job as fast. Prices are the scheduler's
(scheduler/cluster/pools.py). Lent GPUs cost nothing there; the price up to which they pay is said beside.
"""

from sim.e2e.job import JobPlan
from sim.e2e.systems import System, World

from lib.e2e import reasons
from lib.e2e.rows import Row
from lib.e2e.worlds import Scale, WorldPool
from rose.scheduler.cluster.pools import H20, H800

HOUR_S = 3600.0


def saving(runner: WorldPool, world: World, scale: Scale, seed: int) -> list[Row]:
    """The dollars of a step, owned over lent, at equal or better time of a step."""
    workload = world.workload
    name, gpus = workload.name, workload.scenario.gpus_per_engine
    own = workload.scenario.num_dedicated
    values, peers = [], []
    for number in range(scale.num_seeds):
        plan = JobPlan(system=System.ROSE, num_steps=scale.num_steps, seed=seed + number)
        rose_s = runner.jobs(f"{name} dollars, ROSE", world, [plan])[0].iteration_s
        needed, fixed_s = _as_fast(runner, world, plan, rose_s)
        dollars = [
            price * (num * gpus + workload.train_gpus) * seconds / HOUR_S
            for price, num, seconds in (
                (H800.dollars_per_gpu_hour, own, rose_s),
                (H800.dollars_per_gpu_hour, needed, fixed_s),
            )
        ]
        values.append(dollars[1] / dollars[0])
        h20, h800 = H20.dollars_per_gpu_hour, H800.dollars_per_gpu_hour
        training = workload.train_gpus * h800
        cheap = (needed * gpus * h20 + training) * fixed_s / ((own * gpus * h20 + training) * rose_s)
        peers.append(
            {
                "dollars a step": dollars[0],
                "own rollout GPUs": float(own * gpus),
                "as fast with": float(needed * gpus),
                "rollout GPUs alone": needed * fixed_s / (own * rose_s),
                "with H20 rollout GPUs": cheap,
                "lent GPUs pay up to, $/h": (dollars[1] - dollars[0])
                / (workload.scenario.num_serving * gpus * rose_s / HOUR_S),
            }
        )
    return [
        Row(
            name=f"cost_saving[{name}]",
            source="-",
            values=values,
            unit="x",
            paper=None,
            target=">= 1.5",
            why=reasons.DOLLARS,
            beside=dict(peers[0]),
        )
    ]


def _as_fast(runner: WorldPool, world: World, plan: JobPlan, limit_s: float) -> tuple[int, float]:
    """The fewest own engines with which the resource-fixed job's step is no longer, and its time.

    With as many whole GPUs as ROSE has shared ones it is at least as fast, so the search ends there."""
    scenario = world.workload.scenario
    low, high = scenario.num_dedicated, scenario.num_dedicated + scenario.num_serving
    times: dict[int, float] = {}
    while low < high:
        middle = (low + high) // 2
        times[middle] = _fixed_s(runner, world, plan, middle)
        low, high = (low, middle) if times[middle] <= limit_s else (middle + 1, high)
    return high, times[high] if high in times else _fixed_s(runner, world, plan, high)


def _fixed_s(runner: WorldPool, world: World, plan: JobPlan, num_own: int) -> float:
    fixed = JobPlan(system=System.FIXED, num_steps=plan.num_steps, seed=plan.seed, num_own=num_own)
    what = f"{world.workload.name} dollars, {num_own} own engines"
    return runner.jobs(what, world, [fixed])[0].iteration_s
