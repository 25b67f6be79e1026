"""A rollout engine that dies or hangs costs its turns seconds, not their tokens: on two real engines.

Two rollout engines with the same weights in float32 stand behind `rose router`, a process of its own. Turns
stream greedily through it. In this order: forced migrations (the worker that has the turn is taken out of the
router three times), SIGSTOP of all processes of one engine, new weights under running turns, SIGKILL of all
processes of one engine.

  migrated_greedy_equal   share of turns whose tokens equal those of the same turn left alone
  sigstop_reroute_s       the longest that a turn waited for its next token: turns that ran on the stopped
                          engine, from the signal on, and new turns, from their begin
  sigstop_new_turns       new turns sent to the stopped engine after the first of its turns was rerouted
  version_tagged          share of tokens tagged with the weights that made them. The truth: which of the two
                          weights gives the token the log-probability that the answer carries
  version_tagged[stale]   tokens of other weights than their session's, in mode pinned: second turns that
                          begin while one engine gets new weights, and right after it
  sigkill_failed_turns    turns that did not end with the answer of an engine that nobody disturbed
  sigkill_lost_tokens     tokens that the killed engine had made and the router never got, per turn on it

Peers get the SIGSTOP and the SIGKILL after ours: the same engines, client and turns, a new process of the
peer for each. It has to take token ids on /v1/completions. 20 s after a SIGSTOP its turns are given up.

    --peer 'vllm-router=BIN/vllm-router --worker-urls {worker} --host 127.0.0.1 --port {port}'

    python benchmarks/bench_failover.py --json failover.json
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.faults.failover import CUTS, kill_engine, migrate, stop
from lib.faults.peers import PeerSamples, kill_behind, stop_behind
from lib.faults.turns import RunningEngine, Samples, is_idle
from lib.faults.weights import give, other_weights, update
from lib.harness import run_benchmark
from lib.load.turns import RouterClient, until_so
from lib.router.rig import COMPLETIONS_PATH, add_peers, peer_name, peer_path

from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.types import GateMode, Role

Beside = dict[str, dict[str, float | None]]

BESIDE: Beside = {
    "sigstop_reroute_s": {"vllm-router 0.1.17, in the prototypes": 20.0},
    "sigstop_new_turns": {},
    "sigkill_failed_turns": {"vllm-router 0.1.17, in the prototypes, of 6": 3.0},
}
"""Stands beside ours where no peer is run."""


def measure(args: argparse.Namespace) -> list[Figure]:
    """All phases on the same two engines; after a SIGKILL the dead one is replaced."""
    if not all(peer_path(spec) == COMPLETIONS_PATH for spec in args.peer):
        raise WorkerError(f"turns go to {COMPLETIONS_PATH}, of a peer too")
    samples, peers = Samples(), [PeerSamples(spec) for spec in args.peer]
    with Rig() as rig:
        for name in ("a", "b"):
            rig.start_engine(name, Role.ROLLOUT, gate=GateMode.OFF)
        other = other_weights(rig)
        engines = [_engine(rig, name) for name in ("a", "b")]
        url = rig.start_router(engine.control.url for engine in engines)
        asyncio.run(_phases(args, rig, url, engines, other, samples, peers))
    return _figures(samples, peers)


async def _phases(
    args: argparse.Namespace,
    rig: Rig,
    url: str,
    engines: list[RunningEngine],
    other: Path,
    samples: Samples,
    peers: Sequence[PeerSamples],
) -> None:
    mine = rig.model(Role.ROLLOUT)
    num_stops, num_kills = (2, 1) if args.quick else (5, 3)
    async with RouterClient(url, str(Role.ROLLOUT)) as client:
        for engine in engines:
            await until_so(lambda e=engine: is_idle(client, e), f"{engine.id} is there")  # type: ignore[misc]
        for number in range(3 if args.quick else 10):
            await migrate(client, f"migrate-{args.seed}-{number}", samples)
        for number in range(num_stops):
            await stop(client, engines[0], f"stop-{args.seed}-{number}", samples)
        await update(client, engines, [mine, other], f"update-{args.seed}", samples)
        for number in range(num_kills):
            if number > 0:
                engines[0] = await _replace(client, rig, engines[0], f"a{number}", mine)
            await kill_engine(client, engines, f"kill-{args.seed}-{number}", samples)
        for index, peer in enumerate(peers):
            for number in range(num_kills):
                engines[0] = await _replace(client, rig, engines[0], f"p{index}-{number}", mine)
                for each in range(num_stops if number == 0 else 0):
                    await stop_behind(engines, f"stop-{args.seed}-{each}", peer)
                await kill_behind(engines, f"kill-{args.seed}-{number}", peer)


# Processes ------------------------------------------------------------------------------------------------


def _engine(rig: Rig, name: str) -> RunningEngine:
    control = rig.wait_engine(name)
    return RunningEngine(control=control, engine_id=control.status().engine_id, pid=rig.pid(name))


async def _replace(
    client: RouterClient, rig: Rig, dead: RunningEngine, name: str, weights: Path
) -> RunningEngine:
    """A new engine in the place of a dead one, with the same weights as the other."""
    await client.remove(dead.id)
    rig.start_engine(name, Role.ROLLOUT, gate=GateMode.OFF)
    engine = await asyncio.to_thread(_engine, rig, name)
    await asyncio.to_thread(engine.control.complete, [[1, 2, 3]], 2)  # the first step takes long
    await give(client, engine, weights, 3)
    await client.add(engine.control.url)
    return engine


def _beside(peers: Sequence[PeerSamples]) -> Beside:
    """Returns what stands beside each figure, by the figure's name."""
    beside: Beside = {name: {} for name in BESIDE}
    for peer in peers:
        for name, values in peer.beside().items():
            beside[name] |= values
    return beside if peers else BESIDE


def _figures(samples: Samples, peers: Sequence[PeerSamples]) -> list[Figure]:
    for failed in samples.failed:
        print(f"a turn failed when its engine was killed: {failed}")
    for peer in peers:
        for failed in (*peer.broken, *peer.failed):
            print(f"{peer_name(peer.spec)}, a turn failed: {failed}")
    beside = _beside(peers)
    return [*_stop_figures(samples, beside), *_weight_figures(samples), *_kill_figures(samples, beside)]


def _stop_figures(samples: Samples, beside: Beside) -> list[Figure]:
    return [
        Figure(
            name="migrated_greedy_equal",
            value=sum(samples.is_equal) / len(samples.is_equal),
            unit="of turns",
            target=">= 1",
            peers={"turns": float(len(samples.is_equal)), "migrations each": float(len(CUTS))},
        ),
        Figure(
            name="sigstop_reroute_s",
            value=max(samples.reroutes_s),
            unit="s",
            target="<= 3",
            peers=beside["sigstop_reroute_s"],
            spread=(min(samples.reroutes_s), max(samples.reroutes_s)),
        ),
        Figure(
            name="sigstop_new_turns",
            value=float(samples.num_sent_aware),
            unit="turns",
            target="<= 0",
            peers={
                "sent before the first reroute": float(samples.num_sent_unaware),
                **beside["sigstop_new_turns"],
            },
        ),
    ]


def _weight_figures(samples: Samples) -> list[Figure]:
    return [
        Figure(
            name="version_tagged",
            value=sum(samples.tags) / len(samples.tags),
            unit="of tokens",
            target=">= 1",
            peers={"tokens": float(len(samples.tags)), "tokens that don't tell": float(samples.num_untold)},
        ),
        Figure(
            name="version_tagged[stale]",
            value=float(samples.num_stale),
            unit="tokens",
            target="<= 0",
            peers={"tokens": float(samples.num_pinned)},
        ),
    ]


def _kill_figures(samples: Samples, beside: Beside) -> list[Figure]:
    return [
        Figure(
            name="sigkill_failed_turns",
            value=float(len(samples.failed)),
            unit="turns",
            target="<= 0",
            peers={"turns cut": float(samples.num_cut), **beside["sigkill_failed_turns"]},
        ),
        Figure(
            name="sigkill_lost_tokens",
            value=max(samples.lost_per_turn),
            unit="tokens",
            target="<= 16",
            spread=(min(samples.lost_per_turn), max(samples.lost_per_turn)),
        ),
    ]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, add_peers))
