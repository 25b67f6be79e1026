"""A relay killed while versions flow costs less than a second, and no version.

Two relays of a kind, embedded or Mooncake, hold the same objects. A publisher puts version after version, a
follower fetches each; then one of them gets SIGKILL at a random moment of a publish. `relay_kill_outage_s`
is how much longer than the median before it the slowest version took after the kill, from publish() to the
follower holding it; `versions_lost` counts versions that failed, or that the follower holds with other bits.
Publisher, follower and relays share one machine, over loopback.

    python benchmarks/bench_relay_kill.py --json relay_kill.json
"""

import argparse
import random
import statistics
import sys
import threading
import time

import torch
from lib.faults.signals import kill
from lib.harness import median_figure, run_benchmark

from rose.errors import RoseError, WorkerError
from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.node.processes import ServerProcess
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.mooncake import mooncake_available
from rose.transfer.relay.opening import open_relay

NUM_ELEMENTS = 8 << 20
BUCKET_BYTES = 2 << 20
RELAY_BYTES = 1 << 30
VERSIONS_BEFORE, VERSIONS_AFTER = 6, 6
KINDS = ("embedded", "mooncake")


def measure(args: argparse.Namespace) -> list[Figure]:
    kinds = [kind for kind in KINDS if args.only in (None, kind)]
    if not mooncake_available()[0]:
        kinds = [kind for kind in kinds if kind != "mooncake"]
    rounds = 2 if args.quick else 8
    return [figure for kind in kinds for figure in _figures(kind, rounds, args.seed)]


def _figures(kind: str, rounds: int, seed: int) -> list[Figure]:
    moments = random.Random(seed)
    outages: dict[str, list[float]] = {"first": [], "second": []}
    lost = 0
    for _ in range(rounds):
        for index, victim in enumerate(outages):
            outage_s, failed = _round(kind, index, moments)
            outages[victim].append(outage_s)
            lost += failed
    figures = [
        median_figure(f"relay_kill_outage_s[{victim} relay, {kind}]", values, "s", target="< 1")
        for victim, values in outages.items()
    ]
    total = 2 * rounds * (VERSIONS_BEFORE + VERSIONS_AFTER)
    return [*figures, Figure(name=f"versions_lost[{kind}]", value=lost, unit=f"of {total}", target="<= 0")]


def _round(kind: str, victim: int, moments: random.Random) -> tuple[float, int]:
    """(longest delay after the kill over the median before it, versions lost)."""
    with Rig() as rig:
        first, url = rig.start_relay("first", kind=kind, capacity_bytes=RELAY_BYTES)
        beside = url if kind == "mooncake" else None
        second, other = rig.start_relay("second", kind=kind, capacity_bytes=RELAY_BYTES, beside=beside)
        return _outage(f"{url},{other}", (first, second)[victim], moments)


def _outage(url: str, victim: ServerProcess, moments: random.Random) -> tuple[float, int]:
    """Syncs versions through both relays; the victim dies at a random moment of one of them."""
    weights = {"weight": torch.randn(NUM_ELEMENTS).to(torch.bfloat16)}
    publisher = WeightPublisher(weights, url, "run", bucket_bytes=BUCKET_BYTES)
    client = open_relay(url)
    follower = Follower(client, "run", WeightMirror())
    try:
        publisher.publish()
        follower.advance()
        before: list[float] = []
        after: list[float] = []
        lost = 0
        for number in range(VERSIONS_BEFORE + VERSIONS_AFTER):
            bits = weights["weight"].view(torch.int16)
            bits += (torch.rand(NUM_ELEMENTS) < 0.01).to(torch.int16)
            if number == VERSIONS_BEFORE:
                delay_s = moments.random() * statistics.median(before)
                threading.Timer(delay_s, kill, [victim.pid]).start()
            taken_s, is_lost = _sync(publisher, follower)
            (before if number < VERSIONS_BEFORE else after).append(taken_s)
            lost += is_lost
        if victim.is_alive():
            raise WorkerError(f"{victim.name} lives after its kill")
        return max(after) - statistics.median(before), lost
    finally:
        publisher.close()
        client.close()


def _sync(publisher: WeightPublisher, follower: Follower) -> tuple[float, bool]:
    """Publishes and fetches one version, again after a failure, as trainer and subscriber do."""
    started = time.monotonic()
    is_lost = False
    try:
        publisher.publish()
    except RoseError:
        is_lost = True
        publisher.publish()
    follower.advance()
    mirror = follower.mirror
    mirror.check_integrity()
    return time.monotonic() - started, is_lost or mirror.state_hash != publisher.state_hash


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=KINDS, help="relays of this kind")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
