"""A whole job's model sync, 8 trainer ranks to 8 rollout ranks: one copy over the slow link instead of eight.

Two clusters are two network namespaces on this machine, joined by one link that `tc` limits (frames of 9,000
bytes); all 8 + 8 ranks and the relays are processes of their own. A sync lasts from send() until the last
rollout rank holds all weights, their hash equal to the trainer's; in the end every rank hashes its bits anew.
  flat                every rollout rank pulls its own copy over the slow link (verl): a relay at the trainer
  scatter             8 shards in parallel to the rollout node's relay, which all ranks read (WEAVE §5.2)
  scatter, two nodes  half of the shards to each of two nodes' relays, which hand them on to each other
  scatter, sparse     as scatter, but only what changed, about 1% of the elements
All but the last send all weights as they are. The cases take turns, round after round.
`sync_speedup[...]`: the flat sync of the same round over it; without a case, scatter's.
`slow_link_copies[...]`: bytes that the interfaces of the link counted, both directions with all headers, over
the bytes of one copy: frames and manifest.

    python benchmarks/bench_modelsync.py --json modelsync.json
"""

import argparse
import statistics
import sys
from dataclasses import replace

from lib.harness import median_figure, run_benchmark
from lib.transfer.slow_link import TRAINER, stop_signals_raise
from lib.transfer.sync_cluster import Setup, Sync, SyncCluster

from rose.measure.figures import Figure
from rose.transfer.format.layout import BUCKET_BYTES

RANKS = 8
LINK_GBPS = 0.1
"""Slow enough that two cores move eight copies locally meanwhile."""
NUM_LAYERS = 1
QUEUE_S = 0.2
"""Room for a few frames of each of the trainer's 16 streams: at 0.1 Gbps the usual queue holds 36."""
PIECE_BYTES = 384 << 10
"""Cuts a rank's share into 32; model_sync has larger pieces, for models of hundreds of times this size."""
SYNCS_A_ROUND = 3
"""The repeats of each case but flat, which takes as long as eight of them."""
FLAT, SCATTER, TWO_NODES, SPARSE = "flat", "scatter", "scatter, two nodes", "scatter, sparse"
_SCATTER = Setup(
    codec="DENSE",
    trainer_ranks=RANKS,
    followers=RANKS,
    is_pipelined=True,
    bucket_bytes=PIECE_BYTES,
    is_acknowledged=True,
)
CASES = {
    FLAT: replace(_SCATTER, relay_side=TRAINER),
    SCATTER: _SCATTER,
    TWO_NODES: replace(_SCATTER, relays=2),
    SPARSE: replace(_SCATTER, codec=None, bucket_bytes=BUCKET_BYTES),
}
PAPER = {"WEAVE, least": 7.87, "WEAVE, most": 8.33}
"""Over verl, 8 H800 to 8 H20 (WEAVE Figure 13, left)."""
COPIES = {FLAT: None, SCATTER: "<= 1.02", TWO_NODES: "<= 1.02", SPARSE: None}

Rounds = dict[str, list[list[Sync]]]


def measure(args: argparse.Namespace) -> list[Figure]:
    rounds: Rounds = {case: [] for case in CASES}
    with stop_signals_raise(), SyncCluster(NUM_LAYERS, args.seed) as cluster:
        for _ in range(1 if args.quick else 5):
            for case, setup in CASES.items():
                rounds[case].append(_syncs(cluster, case, setup))
    return [
        _speedup("sync_speedup", rounds, SCATTER, target=">= 7.8", paper=PAPER),
        _speedup(f"sync_speedup[{TWO_NODES}]", rounds, TWO_NODES, target=">= 7.8", paper=PAPER),
        _speedup(f"sync_speedup[{SPARSE}]", rounds, SPARSE, target=None, paper={}),
        *(_time(case, _all(rounds[case])) for case in CASES),
        *(_copies(case, _all(rounds[case])) for case in CASES),
    ]


def _syncs(cluster: SyncCluster, case: str, setup: Setup) -> list[Sync]:
    """Some versions of one run, after its first one, which goes out without a limit."""
    run = cluster.open(setup)
    cluster.link.limit(LINK_GBPS, QUEUE_S)
    syncs: list[Sync] = []
    for _ in range(1 if case == FLAT else SYNCS_A_ROUND):
        sync = run.sync()
        shown = f"{sync.taken_s:.3f} s, {sync.cores_busy:.1f} cores busy, {_num_copies(sync):.3f} copies"
        print(f"{case}: {shown}", file=sys.stderr, flush=True)
        syncs.append(sync)
    run.close()
    return syncs


def _all(rounds: list[list[Sync]]) -> list[Sync]:
    return [sync for syncs in rounds for sync in syncs]


def _speedup(name: str, rounds: Rounds, case: str, *, target: str | None, paper: dict[str, float]) -> Figure:
    ratios = [
        flat.taken_s / sync.taken_s
        for (flat,), syncs in zip(rounds[FLAT], rounds[case], strict=True)
        for sync in syncs
    ]
    return median_figure(name, ratios, "times flat", target=target, peers={**paper})


def _time(case: str, syncs: list[Sync]) -> Figure:
    return median_figure(
        f"model_sync_s[{case}]",
        [sync.taken_s for sync in syncs],
        "s",
        peers={
            "one copy at the link's speed": statistics.median(
                sync.encoded_bytes * 8 / (LINK_GBPS * 1e9) for sync in syncs
            ),
            "cores busy": statistics.median(sync.cores_busy for sync in syncs),
        },
    )


def _copies(case: str, syncs: list[Sync]) -> Figure:
    return median_figure(
        f"slow_link_copies[{case}]",
        [_num_copies(sync) for sync in syncs],
        "encoded copies",
        target=COPIES[case],
        peers={
            "MB in one copy": statistics.median(sync.encoded_bytes for sync in syncs) / 1e6,
            "by the limit's queue": statistics.median(
                sync.link_bytes.on_wire / sync.encoded_bytes for sync in syncs
            ),
        },
    )


def _num_copies(sync: Sync) -> float:
    return sync.link_bytes.by_interface / sync.encoded_bytes


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
