"""Parts of bench_e2e: other ways to share serving GPUs, and the router's placement (ROSE Tables 1 to 3).

Owns the comparisons. Serving's latencies come from engines beside which rollouts never run out of turns.
"""

from sim.e2e.fleet import Tape
from sim.e2e.systems import MODES, System, World

from lib.e2e import paper, reasons
from lib.e2e.elastic import plans
from lib.e2e.rows import Row, attainment, p99_ms, ratios
from lib.e2e.worlds import Scale, WorldPool

SHORT = {System.ROSE: "ROSE", System.RELOAD: "reload", System.SHARED_LIMIT: "shared limit"}


def engines(runner: WorldPool, world: World, scale: Scale, seed: int) -> list[Row]:
    """Tables 1 and 2: rollout time and serving's latencies under each way to share."""
    name = world.workload.name
    systems = (System.ROSE, System.ROSE_DUAL, System.RELOAD, System.SHARED_LIMIT, System.STATIC)
    found = {
        system: [
            job.rollout_s
            for job in runner.jobs(f"{name} sharing, {system}", world, plans(system, scale, seed))
        ]
        for system in systems
    }
    times = {
        System.RELOAD: (
            paper.TABLE_1_S[name]["reload"] / paper.TABLE_1_S[name]["ROSE"],
            "Table 1",
            reasons.RELOAD,
        ),
        System.SHARED_LIMIT: (
            paper.TABLE_1_S[name]["shared limit"] / paper.TABLE_1_S[name]["ROSE"],
            "Table 1",
            reasons.NO_PREFIXES,
        ),
        System.STATIC: (
            paper.TABLE_2_STATIC[name],
            "Table 2",
            reasons.STATIC,
        ),
    }
    rows = [
        Row(
            name=f"rollout_over_rose[{name}, {system}]",
            source=source,
            values=ratios(found[system], found[System.ROSE]),
            unit="x",
            paper=published,
            why=why,
            beside={"over ROSE, slack spent": min(ratios(found[system], found[System.ROSE_DUAL]))},
        )
        for system, (published, source, why) in times.items()
    ]
    rows.append(
        Row(
            name=f"rollout_s[{name}, {System.ROSE_DUAL}]",
            source="Table 1",
            values=found[System.ROSE_DUAL],
            unit="s",
            paper=paper.TABLE_1_S[name]["ROSE"],
            why=reasons.SECONDS,
        )
    )
    return [*rows, *_ttfts(world), *_tpots(world)]


def _ttfts(world: World) -> list[Row]:
    name, slo = world.workload.name, world.workload.pair.slo
    rows = []
    alone: dict[str, float | None] = {"serving alone": p99_ms(world.alone, "ttfts_s")}
    for system, tapes in fleets(world).items():
        published_ms = paper.TABLE_1_TTFT_MS[name].get(SHORT.get(system, ""))
        rows.append(
            Row(
                name=f"ttft_p99[{name}, {system}]",
                source="Table 1",
                values=[p99_ms(tapes, "ttfts_s")],
                unit="ms",
                paper=published_ms,
                why=reasons.ONE_ENGINE,
                beside=alone | {"SLO": 1e3 * slo.ttft_s, "attained, both SLOs": attainment(world, tapes)},
            )
        )
    return rows


def fleets(world: World) -> dict[System, tuple[Tape, ...]]:
    """The serving engines of each system that shares them."""
    return {System.RELOAD: world.reload} | {system: world.tapes[mode] for system, mode in MODES.items()}


def _tpots(world: World) -> list[Row]:
    name = world.workload.name
    alone: dict[str, float | None] = {"serving alone": p99_ms(world.alone, "tpots_s")}
    return [
        Row(
            name=f"tpot_p99[{name}, {system}]",
            source="Table 2",
            values=[p99_ms(tapes, "tpots_s")],
            unit="ms",
            paper=paper.TABLE_2_STATIC_TPOT_MS[name] if system is System.STATIC else None,
            why=reasons.NO_SHORTAGE,
            beside=alone | {"SLO": 1e3 * world.workload.pair.slo.tpot_s},
        )
        for system, tapes in fleets(world).items()
    ]


def placement(runner: WorldPool, world: World, scale: Scale, seed: int) -> list[Row]:
    """Table 3: what turn-wise routing and cache affinity save, over trajectories that stay on one engine."""
    name = world.workload.name
    times = {
        policy: [
            job.rollout_s
            for job in runner.jobs(
                f"{name} placed by {policy}", world, plans(System.ROSE, scale, seed, policy=policy)
            )
        ]
        for policy in ("pinned", "turnwise", "paper", "cost")
    }
    return [
        Row(
            name=f"placement[{name}, {policy}]",
            source="Table 3",
            values=ratios(times["pinned"], times[policy]),
            unit="x",
            paper=paper.TABLE_3[policy][name] if policy in paper.TABLE_3 else None,
            why=reasons.FITTED,
        )
        for policy in ("turnwise", "paper", "cost")
    ]
