"""A whole fleet loses nothing while each of its parts is killed and stopped: real engines on this machine.

A serving and a rollout engine share a pool; a dedicated rollout engine, a subscriber, an embedded relay and
two routers stand beside them. A trainer publishes two checkpoints in turn, and trajectories of four turns go
through RouterTurns, as a trainer's do. By chance, one part after the other is killed and comes back, or is
stopped for some seconds. Serving gets requests all the time.

  serving_lost      serving requests that failed while the serving engine was there
  turns_lost        turns that failed, or ended before their length
  wrong_tokens      tokens of other weights than those of the version that came with them. The truth: which of
                    the two checkpoints gives the token the log-probability that the answer carries. Null if
                    no token could be judged
  version_gap_s     the longest time in which no turn ended with newer weights than all before, up to the end
  processes_left    processes that outlive the fleet

    python benchmarks/bench_soak.py --json soak.json
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil
from lib.faults.weights import give, logprobs, made_by_other
from lib.faults.whole_fleet import PUBLISH_EVERY_S, WholeFleet
from lib.harness import run_benchmark
from lib.load.turns import RouterClient, random_prompt, until_so

from rose.errors import WorkerError
from rose.measure.completions import open_session, stream_completion
from rose.measure.figures import Figure
from rose.measure.records import RequestRecord
from rose.measure.rig import Rig
from rose.node.control import completion_body
from rose.trainers.turns import RouterTurns, TurnAnswer
from rose.types import Role

NUM_TRAJECTORIES, TURNS_EACH = 6, 4
PROMPT_TOKENS, ANSWER_TOKENS = 48, 96
OBSERVATION_TOKENS = 12
SERVING_TOKENS = 32
SERVING_EVERY_S = 1.0
DOWN_S = (1.0, 4.0)
STOPPED_S = (2.0, 6.0)
BETWEEN_S = (3.0, 8.0)
FIRST_WEIGHTS_S = 120.0
NUM_JUDGED = 400
"""So many answers are compared with both checkpoints, by chance; all would take as long as the run."""
NOT_STOPPED = ("pool",)
"""Parts that are killed alone."""


@dataclass(slots=True)
class SoakLog:
    """What the clients saw."""

    served: list[RequestRecord] = field(default_factory=list)
    serving_away: list[tuple[float, float]] = field(default_factory=list)
    """From when until when the serving engine was killed and not back (monotonic, s)."""
    answers: list[tuple[list[int], TurnAnswer]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    newest: list[tuple[float, int]] = field(default_factory=list)
    """When an answer came first with a version newer than all before (monotonic, s), and the version."""
    ended_s: float = 0.0
    """When the clients were told to end (monotonic, s)."""
    faults: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    num_told: int = 0
    """Judged tokens that tell which weights made them."""

    def was_away(self, request: RequestRecord) -> bool:
        """Returns whether the serving engine was away while a request ran."""
        return any(request.sent_s <= end and start <= request.ended_s for start, end in self.serving_away)


def measure(args: argparse.Namespace) -> list[Figure]:
    """Runs the fleet through all faults, then asks which weights made the answers."""
    seen = SoakLog()
    with Rig() as rig:
        fleet = WholeFleet(rig)
        asyncio.run(_play(args, fleet, seen))
        fleet.end_weights()
        asyncio.run(_judge(args, fleet, seen))
        published = len(fleet.published())
    left = psutil.Process().children(recursive=True)
    return _figures(seen, published, [process.name() for process in left])


async def _play(args: argparse.Namespace, fleet: WholeFleet, seen: SoakLog) -> None:
    by_chance = random.Random(args.seed)
    turns = RouterTurns(fleet.routers, str(Role.ROLLOUT), retry_s=120.0)
    is_over = asyncio.Event()
    try:
        await _first_weights(turns, seen)
        async with asyncio.TaskGroup() as group:
            group.create_task(_serve(fleet, seen, is_over))
            for number in range(NUM_TRAJECTORIES):
                group.create_task(_roll_out(turns, f"{args.seed}-{number}", seen, is_over))
            for part, fault in _faults(by_chance, rounds=1 if args.quick else 4):
                await asyncio.sleep(by_chance.uniform(*BETWEEN_S))
                await _do(fleet, part, fault, by_chance, seen)
            await asyncio.sleep(2 * PUBLISH_EVERY_S)
            seen.ended_s = time.monotonic()
            is_over.set()
    finally:
        await turns.close()


def _faults(by_chance: random.Random, rounds: int) -> list[tuple[str, str]]:
    parts = ("pool", "shared", "dedicated", "serving", "relay", "subscriber", "router0", "router1")
    faults = [
        (part, fault)
        for part, fault in itertools.product(parts, ("kill", "stop"))
        if not (fault == "stop" and part in NOT_STOPPED)
    ] * rounds
    by_chance.shuffle(faults)
    return faults


async def _do(fleet: WholeFleet, part: str, fault: str, by_chance: random.Random, seen: SoakLog) -> None:
    print(f"{fault} {part}", file=sys.stderr)
    seen.faults[fault] += 1
    if fault == "stop":
        await fleet.stop(part, by_chance.uniform(*STOPPED_S))
        return
    killed_s = time.monotonic()
    await fleet.kill(part, by_chance.uniform(*DOWN_S))
    if part == "serving":
        seen.serving_away.append((killed_s, time.monotonic()))


# Clients ---------------------------------------------------------------------------------------------------


async def _first_weights(turns: RouterTurns, seen: SoakLog) -> None:
    """Waits until the trainer's weights are on the engines."""

    async def has_version() -> bool:
        answer = await turns.complete("first", random_prompt("first", PROMPT_TOKENS), {"max_tokens": 4})
        return bool(answer.versions)

    await until_so(has_version, "the trainer's weights are there", at_most_s=FIRST_WEIGHTS_S)
    seen.newest.append((time.monotonic(), 0))


async def _serve(fleet: WholeFleet, seen: SoakLog, is_over: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as group:
        for number in itertools.count():
            if is_over.is_set():
                return
            group.create_task(_request(fleet, f"serving-{number}", seen))
            await asyncio.sleep(SERVING_EVERY_S)


async def _request(fleet: WholeFleet, name: str, seen: SoakLog) -> None:
    record = RequestRecord(prompt=random_prompt(name, PROMPT_TOKENS), max_tokens=SERVING_TOKENS)
    body = completion_body(str(Role.SERVING), list(record.prompt), SERVING_TOKENS)
    # A server that was stopped for seconds closes connections that waited for a next request when it goes on.
    async with open_session() as http:
        await stream_completion(http, fleet.serving.url, body, record)
    seen.served.append(record)


async def _roll_out(turns: RouterTurns, name: str, seen: SoakLog, is_over: asyncio.Event) -> None:
    for number in itertools.count():
        session = f"{name}-{number}"
        prompt = random_prompt(session, PROMPT_TOKENS)
        for turn in range(TURNS_EACH):
            if is_over.is_set():
                return
            sampling = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 1.0}
            try:
                answer = await turns.complete(session, prompt, sampling)
            except WorkerError as error:
                seen.lost.append(str(error))
                break
            _note(answer, prompt, seen)
            prompt = [*prompt, *answer.token_ids, *random_prompt(f"{session}-{turn}", OBSERVATION_TOKENS)]


def _note(answer: TurnAnswer, prompt: list[int], seen: SoakLog) -> None:
    if len(answer.token_ids) != ANSWER_TOKENS or len(answer.logprobs) != ANSWER_TOKENS:
        seen.lost.append(f"{len(answer.token_ids)} tokens, {answer.finish_reason}")
    seen.answers.append((prompt, answer))
    if answer.versions and max(answer.versions) > seen.newest[-1][1]:
        seen.newest.append((time.monotonic(), max(answer.versions)))


# The truth about the answers --------------------------------------------------------------------------------


async def _judge(args: argparse.Namespace, fleet: WholeFleet, seen: SoakLog) -> None:
    """Gives each engine one of the checkpoints, and compares answers that one version made with both."""
    engines = [fleet.rollout_engine(name) for name in ("shared", "dedicated")]
    of_one = [(prompt, answer) for prompt, answer in seen.answers if len(set(answer.versions)) == 1]
    judged = random.Random(args.seed).sample(of_one, min(NUM_JUDGED, len(of_one)))
    async with RouterClient(fleet.routers.split(",")[0], str(Role.ROLLOUT)) as client:
        for number, (engine, weights) in enumerate(zip(engines, fleet.weights, strict=True)):
            await give(client, engine, weights, 1_000_000 + number)
        for prompt, answer in judged:
            even, odd = [await logprobs(client, engine, prompt, answer.token_ids) for engine in engines]
            is_odd = made_by_other(answer.logprobs, even, odd)
            told = [each for each in is_odd if each is not None]
            seen.num_told += len(told)
            seen.num_wrong += sum(each != bool(answer.versions[0] % 2) for each in told)


def _figures(seen: SoakLog, published: int, left: list[str]) -> list[Figure]:
    there = [request for request in seen.served if not seen.was_away(request)]
    refused = [request.error or "cut" for request in there if not request.is_complete]
    for error in (*refused, *seen.lost):
        print(f"lost: {error}")
    if not seen.num_told:
        print(
            f"wrong_tokens: none of {len(seen.answers)} answers tells which weights made it", file=sys.stderr
        )
    times_s = [*(at for at, _ in seen.newest if at < seen.ended_s), seen.ended_s]
    gaps = [after - before for before, after in itertools.pairwise(times_s)]
    faults: dict[str, float | None] = {name: float(count) for name, count in seen.faults.items()}
    requests = {
        "requests": float(len(there)),
        "beside, while it was away": float(len(seen.served) - len(there)),
    }
    return [
        Figure(
            name="serving_lost", value=float(len(refused)), unit="requests", target="<= 0", peers={**requests}
        ),
        Figure(
            name="turns_lost",
            value=float(len(seen.lost)),
            unit="turns",
            target="<= 0",
            peers={"turns": float(len(seen.answers)), **faults},
        ),
        Figure(
            name="wrong_tokens",
            value=float(seen.num_wrong) if seen.num_told else None,
            unit="tokens",
            target="<= 0",
            peers={"tokens that tell": float(seen.num_told)},
        ),
        Figure(
            name="version_gap_s",
            value=max(gaps, default=0.0),
            unit="s",
            peers={"published": float(published), "every, s": PUBLISH_EVERY_S},
        ),
        Figure(name="processes_left", value=float(len(left)), unit="processes", target="<= 0"),
    ]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
