"""A whole job's model sync, 8 trainer ranks to 8 rollout ranks: one copy over the slow link instead of eight.

Two clusters are two network namespaces on this machine, joined by one link that `tc` limits (frames of 9,000
bytes); all 8 + 8 ranks and the relays are processes of their own. A sync lasts from send() until the last
rollout rank holds all weights, their hash equal to the trainer's; after each, every rank hashes its bits anew.
  flat            every rollout rank pulls its own copy over the slow link (verl): one relay, at the trainer
  scatter         8 shards in parallel to the rollout node's relay, which all ranks there read (WEAVE §5.2)
  scatter, peers  the same to 8 rollout nodes: shard i to relay i, which hands it on to the 7 others
  scatter, sparse as scatter, but only what changed, about 1% of the elements
Those named before the last send all weights as they are. The cases take turns, round after round.
`sync_speedup[...]`: the flat sync of the same round over it. `slow_link_copies[...]`: bytes that the interfaces
of the link counted, both directions with all headers, over the bytes of one copy: frames and manifest.

    python benchmarks/bench_modelsync.py --json modelsync.json
"""

import argparse
import statistics
import sys
from dataclasses import replace

from harness import median_figure, run_benchmark
from slow_link import TRAINER, stop_signals_raise
from sync_cluster import Cluster, Setup, Sync

from rose.demo.figures import Figure

RANKS = 8
LINK_GBPS = 0.1
"""Slow enough that two cores move eight copies locally meanwhile."""
NUM_LAYERS = 1
BUCKET_BYTES = 256 << 10
"""As much smaller than the product's as this model is than one of 8B."""
FLAT, SCATTER, PEERS, SPARSE = "flat", "scatter", "scatter, peers", "scatter, sparse"
_SCATTER = Setup(
    codec="DENSE",
    trainer_ranks=RANKS,
    serving_ranks=1,
    followers=RANKS,
    is_pipelined=True,
    bucket_bytes=BUCKET_BYTES,
    is_acknowledged=True,
)
CASES = {
    FLAT: replace(_SCATTER, relay_side=TRAINER),
    SCATTER: _SCATTER,
    PEERS: replace(_SCATTER, relays=RANKS),
    SPARSE: replace(_SCATTER, codec=None),
}
PAPER = {"WEAVE, least": 7.87, "WEAVE, most": 8.33}
"""Over verl, 8 H800 to 8 H20 (WEAVE Figure 13, left)."""
COPIES = {FLAT: None, SCATTER: "<= 1.02", PEERS: "<= 1.02", SPARSE: None}

Syncs = dict[str, list[Sync]]


def measure(args: argparse.Namespace) -> list[Figure]:
    num_rounds = 2 if args.quick else 5
    syncs: Syncs = {case: [] for case in CASES}
    with stop_signals_raise(), Cluster(NUM_LAYERS, args.seed) as cluster:
        for _ in range(num_rounds):
            for case, setup in CASES.items():
                syncs[case].append(_sync(cluster, case, setup))
    return [
        _speedup("sync_speedup", syncs, SCATTER, target=">= 7.8", paper=PAPER),
        _speedup(f"sync_speedup[{PEERS}]", syncs, PEERS, target=">= 7.8", paper=PAPER),
        _speedup(f"sync_speedup[{SPARSE}]", syncs, SPARSE, target=None, paper={}),
        *(_time(syncs, case) for case in CASES),
        *(_copies(syncs, case) for case in CASES),
    ]


def _sync(cluster: Cluster, case: str, setup: Setup) -> Sync:
    """One step's weights in a run of its own: relays keep a run's versions."""
    run = cluster.open(setup)
    cluster.link.limit(LINK_GBPS)
    sync = run.sync()
    run.close()
    shown = f"{sync.taken_s:.3f} s, {sync.cores_busy:.1f} cores busy, {_num_copies(sync):.3f} copies"
    print(f"{case}: {shown}", file=sys.stderr, flush=True)
    return sync


def _speedup(name: str, syncs: Syncs, case: str, *, target: str | None, paper: dict[str, float]) -> Figure:
    ratios = [
        flat.taken_s / sync.taken_s for flat, sync in zip(syncs[FLAT], syncs[case], strict=True)
    ]
    return median_figure(name, ratios, "times flat", target=target, peers={**paper})


def _time(syncs: Syncs, case: str) -> Figure:
    return median_figure(
        f"model_sync_s[{case}]",
        [sync.taken_s for sync in syncs[case]],
        "s",
        peers={
            "one copy at the link's speed": statistics.median(
                sync.encoded_bytes * 8 / (LINK_GBPS * 1e9) for sync in syncs[case]
            ),
            "cores busy": statistics.median(sync.cores_busy for sync in syncs[case]),
        },
    )


def _copies(syncs: Syncs, case: str) -> Figure:
    return median_figure(
        f"slow_link_copies[{case}]",
        [_num_copies(sync) for sync in syncs[case]],
        "encoded copies",
        target=COPIES[case],
        peers={
            "MB in one copy": statistics.median(sync.encoded_bytes for sync in syncs[case]) / 1e6,
            "by the limit's queue": statistics.median(
                sync.link_bytes.on_wire / sync.encoded_bytes for sync in syncs[case]
            ),
        },
    )


def _num_copies(sync: Sync) -> float:
    return sync.link_bytes.by_interface / sync.encoded_bytes


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
