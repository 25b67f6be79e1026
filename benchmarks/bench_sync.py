"""One weight sync costs one encoded copy over the slow link, and little more time than that copy takes.

A trainer's and a serving cluster are two network namespaces on this machine, joined by one link that `tc`
limits (frames of 9,000 bytes). Trainer ranks publish from one, relays and followers are in the other. A sync
lasts from publish() until the last follower holds the version, decoded, applied and with the trainer's hash;
loading it into an engine is not part of it. The serving engine has two ranks on one host.

`sync_s[...]`, each variant on top of the one before (Figure 10a), and over the link's speed (Figure 10b):
  batch         one trainer rank sends all weights; each serving rank fetches all of them when they are there
  +async        serving ranks fetch buckets while others are being sent
  +shard-aware  two trainer ranks send half each; one follower fetches everything once for both serving ranks,
                which take their shards from its memory
  +sparsity     only what changed, about 1% of the elements
`sync_over_ideal[...]`: that time over the encoded bytes at the link's speed; beside it the same for plain
bytes over one TCP connection, and how many of the machine's cores were busy, which both clusters share here.
`memory_floor_s`: the seconds in which the trainer ranks together copy their weights once. A copy moves as
many bytes as reading both versions once, so no sync of a delta can be shorter here, however fast the link is.
`sync_over_floor[...]`: a delta's sync over that or the link's time, whichever is longer.
`slow_link_copies[n]`: bytes over the link in both directions, with all headers, over one encoded copy, for n
relays that hold the same objects with a follower of all weights each, also for two Mooncake stores; beside it
the interfaces' own count, which has a burst's headers once, and the same with one relay at the trainer, from
which each follower fetches. `long_run_ratio`: all bytes over the link in 240 versions, headers included, over
the deltas' own bytes, with a follower that joins after the last one; the first snapshot is not counted.
`projected_sync_s[...]` is arithmetic from this run's rates, not a measurement.

    python benchmarks/bench_sync.py --json sync.json
    python benchmarks/bench_sync.py --only mooncake        the bytes of two Mooncake stores alone
    python benchmarks/bench_sync.py --only long            the long run alone
"""

import argparse
import statistics
import sys

from lib.harness import median_figure, run_benchmark
from lib.transfer.slow_link import SERVING, TRAINER, stop_signals_raise
from lib.transfer.sync_cluster import Setup, Sync, SyncCluster, SyncRun
from lib.transfer.sync_worker import model_specs

from rose.measure.figures import Figure
from rose.transfer.relay.mooncake import mooncake_available

LINKS_GBPS = (0.2, 1.0, 5.0, 20.0)
ABLATION_GBPS = 1.0
RANKS = 2
BATCH, ASYNC, SHARDED, SPARSE = "batch", "+async", "+shard-aware", "+sparsity"
VARIANTS = {
    BATCH: Setup(codec="DENSE", trainer_ranks=1, followers=RANKS, is_pipelined=False),
    ASYNC: Setup(codec="DENSE", trainer_ranks=1, followers=RANKS, is_pipelined=True),
    SHARDED: Setup(codec="DENSE", trainer_ranks=RANKS, followers=1, is_pipelined=True),
    SPARSE: Setup(codec=None, trainer_ranks=RANKS, followers=1, is_pipelined=True),
}
PAPER_SPEEDUPS = {ASYNC: (1.6, 1.5), SHARDED: (1.8, 1.3), SPARSE: (4.4, 4.6)}
"""Speedups of Qwen3-8B and Qwen3-32B, each over the variant before: ROSE Figure 10a, at 200 Gbps."""
REPLICAS = (1, 2, 4)
NUM_LAYERS = 5
LONG_RUN_VERSIONS = 240
LONG_RUN_LAYERS = 1
STREAM_S = 0.5

PROJECTED_BYTES = {"8B": 16.4e9, "32B": 65.5e9, "235B": 470e9}
PROJECTED_RANKS = 16
PROJECTED_GBPS = (1.0, 5.0, 20.0)
PAPER_SYNC_S = {("8B", 1.0): 39.0, ("32B", 1.0): 89.0, ("8B", 5.0): 10.0, ("32B", 5.0): 30.0}
"""ROSE §6.3; at 5 Gbps "within"."""

Syncs = dict[tuple[str, float], list[Sync]]


def measure(args: argparse.Namespace) -> list[Figure]:
    repeats = 3 if args.quick else 9
    with stop_signals_raise(), SyncCluster(NUM_LAYERS, args.seed) as cluster:
        figures = _times(cluster, repeats, args.quick) if args.only in (None, "times") else []
        if args.only in (None, "copies"):
            figures += [_copies_figure(cluster, replicas, repeats) for replicas in REPLICAS]
        if args.only in (None, "mooncake") and mooncake_available()[0]:
            figures.append(_copies_figure(cluster, 2, repeats, "mooncake"))
    if args.only in (None, "long"):
        with stop_signals_raise(), SyncCluster(LONG_RUN_LAYERS, args.seed) as cluster:
            figures.append(_long_run(cluster))
    return figures


def _long_run(cluster: SyncCluster) -> Figure:
    run = cluster.open(VARIANTS[SPARSE])
    cluster.link.limit(max(LINKS_GBPS))
    before = cluster.link.count()
    syncs = _syncs(run, LONG_RUN_VERSIONS, "long run")
    cluster.join(run)
    link_bytes = (cluster.link.count() - before).on_wire
    run.close()
    delta_bytes = sum(sync.encoded_bytes for sync in syncs)
    return Figure(
        name="long_run_ratio",
        value=link_bytes / delta_bytes,
        unit="times the deltas' bytes",
        target="<= 1.05",
        peers={"MB of deltas": delta_bytes / 1e6, "MB of a snapshot": _model_bytes(LONG_RUN_LAYERS) / 1e6},
    )


def _times(cluster: SyncCluster, repeats: int, is_quick: bool) -> list[Figure]:
    syncs: Syncs = {}
    copies_s: list[float] = []
    for name, setup in VARIANTS.items():
        links = LINKS_GBPS if name in (SHARDED, SPARSE) else (ABLATION_GBPS,)
        for gbps in links:
            # A run each: the relay keeps all its versions.
            run = cluster.open(setup)
            cluster.link.limit(gbps)
            count = repeats
            if is_quick and setup.codec == "DENSE":
                count = 1 if gbps < 1 else 2  # 20 s over the slowest link, and hardly varies
            syncs[name, gbps] = _syncs(run, count, f"{name}, {gbps:g} Gbps")
            if name == SPARSE:
                run.copy_s()  # its pages are new
                copies_s += [run.copy_s() for _ in range(count)]
            run.close()
    plain = {gbps: _plain_over_ideal(cluster, gbps) for gbps in LINKS_GBPS}
    return [
        *_ablation(syncs),
        *_sensitivity(syncs),
        *_over_ideal(syncs, plain),
        *_over_floor(syncs, copies_s),
        *_projections(syncs),
    ]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = ("times", "copies", "mooncake", "long")
    parser.add_argument("--only", choices=parts, help="one part of the figures")


def _plain_over_ideal(cluster: SyncCluster, gbps: float) -> float:
    num_bytes = int(gbps * 1e9 / 8 * STREAM_S)
    cluster.link.limit(gbps)
    taken_s, _ = cluster.stream(num_bytes)
    return taken_s / _ideal_s(num_bytes, gbps)


def _copies_figure(cluster: SyncCluster, replicas: int, repeats: int, kind: str = "embedded") -> Figure:
    near = _copies(cluster, replicas, SERVING, repeats, kind)
    far = _copies(cluster, replicas, TRAINER, repeats, kind)
    by_interface = [sync.link_bytes.by_interface / sync.encoded_bytes for sync in near]
    return median_figure(
        f"slow_link_copies[{replicas}]" if kind == "embedded" else f"slow_link_copies[{replicas}, {kind}]",
        [sync.link_bytes.on_wire / sync.encoded_bytes for sync in near],
        "encoded copies",
        target="<= 1.02",
        peers={
            "by the interfaces' count": statistics.median(by_interface),
            "relay at the trainer": statistics.median(
                sync.link_bytes.on_wire / sync.encoded_bytes for sync in far
            ),
        },
    )


def _copies(cluster: SyncCluster, replicas: int, side: str, repeats: int, kind: str) -> list[Sync]:
    setup = Setup(
        codec=None,
        trainer_ranks=1,
        followers=replicas,
        is_pipelined=True,
        relays=replicas if side == SERVING else 1,
        relay_side=side,
        relay_kind=kind,
    )
    run = cluster.open(setup)
    cluster.link.limit(ABLATION_GBPS)
    syncs = _syncs(run, repeats, f"{replicas} replicas, relay at the {side}")
    run.close()
    return syncs


def _syncs(run: SyncRun, count: int, case: str) -> list[Sync]:
    syncs = [run.sync() for _ in range(count)]
    times = " ".join(f"{sync.taken_s:.3f}" for sync in syncs)
    print(f"{case}: {times} s", file=sys.stderr, flush=True)
    return syncs


def _ablation(syncs: Syncs) -> list[Figure]:
    figures = [_time_figure(syncs, name, ABLATION_GBPS) for name in VARIANTS]
    medians = {name: _median_s(syncs, name, ABLATION_GBPS) for name in VARIANTS}
    for before, name in zip(list(VARIANTS)[:-1], list(VARIANTS)[1:], strict=True):
        of_8b, of_32b = PAPER_SPEEDUPS[name]
        figures.append(
            Figure(
                name=f"sync_speedup[{name}]",
                value=medians[before] / medians[name],
                unit="times the one before",
                peers={"ROSE, 8B": of_8b, "ROSE, 32B": of_32b},
            )
        )
    total = Figure(
        name="sync_speedup[all]",
        value=medians[BATCH] / medians[SPARSE],
        unit="times batch",
        peers={"ROSE, 8B": 12.4, "ROSE, 32B": 9.1},
    )
    return [*figures, total]


def _sensitivity(syncs: Syncs) -> list[Figure]:
    links = [gbps for gbps in LINKS_GBPS if gbps != ABLATION_GBPS]
    return [_time_figure(syncs, name, gbps) for name in (SHARDED, SPARSE) for gbps in links]


def _over_ideal(syncs: Syncs, plain: dict[float, float]) -> list[Figure]:
    return [
        median_figure(
            f"sync_over_ideal[{name}, {gbps:g} Gbps]",
            [sync.taken_s / _ideal_s(sync.encoded_bytes, gbps) for sync in syncs[name, gbps]],
            "ratio",
            target="<= 1.15" if gbps <= 5 else None,
            peers={
                "plain TCP": plain[gbps],
                "cores busy": statistics.median(sync.cores_busy for sync in syncs[name, gbps]),
            },
        )
        for name in (SHARDED, SPARSE)
        for gbps in LINKS_GBPS
    ]


def _over_floor(syncs: Syncs, copies_s: list[float]) -> list[Figure]:
    floor_s = statistics.median(copies_s)
    return [
        median_figure("memory_floor_s", copies_s, "s"),
        *(
            median_figure(
                f"sync_over_floor[{SPARSE}, {gbps:g} Gbps]",
                [
                    sync.taken_s / max(floor_s, _ideal_s(sync.encoded_bytes, gbps))
                    for sync in syncs[SPARSE, gbps]
                ],
                "ratio",
            )
            for gbps in LINKS_GBPS
        ),
    ]


def _projections(syncs: Syncs) -> list[Figure]:
    """The link, or the slowest rank's encoding, and what came after it here, by the rank's share of bytes."""
    sparse = syncs[SPARSE, max(LINKS_GBPS)]
    share_bytes = _model_bytes() / RANKS
    encode_s_per_byte = statistics.median(sync.encode_s for sync in sparse) / share_bytes
    rest_s_per_byte = statistics.median(sync.taken_s - sync.encode_s for sync in sparse) / share_bytes
    wire_share = statistics.median(sync.encoded_bytes for sync in sparse) / _model_bytes()
    figures: list[Figure] = []
    for model, model_bytes in PROJECTED_BYTES.items():
        for gbps in PROJECTED_GBPS:
            rank_bytes = model_bytes / PROJECTED_RANKS
            sending_s = max(_ideal_s(model_bytes * wire_share, gbps), rank_bytes * encode_s_per_byte)
            paper_s = PAPER_SYNC_S.get((model, gbps))
            figures.append(
                Figure(
                    name=f"projected_sync_s[{model}, {gbps:g} Gbps]",
                    value=sending_s + rank_bytes * rest_s_per_byte,
                    unit=f"s, projected to {PROJECTED_RANKS} ranks a side",
                    kind="simulated",
                    peers={"ROSE, measured": paper_s} if paper_s is not None else {},
                )
            )
    return figures


def _time_figure(syncs: Syncs, name: str, gbps: float) -> Figure:
    case = syncs[name, gbps]
    megabytes = statistics.median(sync.encoded_bytes for sync in case) / 1e6
    density = statistics.median(sync.num_changed for sync in case) / (_model_bytes() / 2)
    return median_figure(
        f"sync_s[{name}, {gbps:g} Gbps]",
        [sync.taken_s for sync in case],
        "s",
        peers={"MB encoded": megabytes, "share of elements changed": density, "encode s": _encode_s(case)},
    )


def _encode_s(case: list[Sync]) -> float:
    return statistics.median(sync.encode_s for sync in case)


def _median_s(syncs: Syncs, name: str, gbps: float) -> float:
    return statistics.median(sync.taken_s for sync in syncs[name, gbps])


def _ideal_s(num_bytes: float, gbps: float) -> float:
    return num_bytes * 8 / (gbps * 1e9)


def _model_bytes(num_layers: int = NUM_LAYERS) -> int:
    return sum(spec.num_bytes for spec in model_specs(num_layers))


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
