"""A rollout engine that dies or hangs costs its turns seconds, not their tokens: two real engines, one router.

Two rollout engines with the same weights in float32 stand behind `rose router`, a process of its own. Turns
stream greedily through it; every answer is compared with what an engine answers that nobody disturbed. In this
order: forced migrations (the worker that has the turn is taken out of the router three times), SIGSTOP of one
engine's processes, new weights under running turns, SIGKILL of one engine's processes.

  migrated_greedy_equal   share of turns whose tokens equal those of the same turn left alone
  sigstop_reroute_s       the longest that a turn waited for its next token: turns that ran on the stopped engine,
                          from the signal on, and new ones that were sent to it, from their begin
  sigstop_new_turns       new turns sent to the stopped engine after the first of its turns was rerouted
  version_tagged          share of tokens tagged with the weights that made them. The truth comes from both weights'
                          log-probabilities of each token: the one that the answer carries is one of them
  version_tagged[stale]   tokens of other weights than their session's, in mode pinned: second turns that begin
                          while one engine gets new weights, and right after it
  sigkill_failed_turns    turns that did not end with the undisturbed answer
  sigkill_lost_tokens     tokens that the killed engine had made and the router never got, per turn on it

    python benchmarks/bench_failover.py --json failover.json
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import run_benchmark
from rig import Rig
from turn_client import RouterClient, Turn, random_prompt, until, until_so

from rose.config import Settings
from rose.demo.figures import Figure
from rose.engine.status import Field, StatusPage, page_path
from rose.errors import WorkerError
from rose.messages import WeightUpdate
from rose.node.checks import free_port
from rose.node.control import EngineControl
from rose.transfer.checkpoint import checkpoint_state_hash
from rose.types import GateMode, Role

PROMPT_TOKENS = 24
LONG_TOKENS, SHORT_TOKENS = 900, 16
NUM_TURNS = 6
"""At a time, on two engines."""
RUNNING_TOKENS = 20
"""A turn that has so many is under way."""
CUTS = (100, 300, 500)
"""Tokens after which a turn is made to migrate."""
NEW_TURNS_S, NEW_TURN_EVERY_S = 5.0, 0.25
SAME_LOGPROB = 1e-4
"""Two log-probabilities of the same weights differ by less, those of a token under other weights by more: where
they don't, the token doesn't tell."""
ROUTER_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One running engine."""

    control: EngineControl
    engine_id: str
    pid: int

    @property
    def id(self) -> str:
        """Its name in the router."""
        return self.control.url.removeprefix("http://")

    def generated_tokens(self) -> int:
        """As its scheduler counts them, from the page that outlives it."""
        page = StatusPage(page_path(Settings.from_environment().runtime_dir, self.engine_id), create=False)
        return page.get(Field.GENERATED_TOKENS)


@dataclass(slots=True)
class Samples:
    """What the phases found."""

    is_equal: list[bool] = field(default_factory=list)
    reroutes_s: list[float] = field(default_factory=list)
    num_sent_unaware: int = 0
    num_sent_aware: int = 0
    tags: list[bool] = field(default_factory=list)
    num_untold: int = 0
    num_pinned: int = 0
    num_stale: int = 0
    num_cut: int = 0
    failed: list[str] = field(default_factory=list)
    lost_per_turn: list[float] = field(default_factory=list)


def measure(args: argparse.Namespace) -> list[Figure]:
    """All phases on the same two engines; after a SIGKILL the dead one is replaced."""
    samples = Samples()
    with Rig() as rig:
        for name in ("a", "b"):
            rig.start_engine(name, Role.ROLLOUT, gate=GateMode.OFF)
        other = _other_weights(rig)
        engines = [_engine(rig, name) for name in ("a", "b")]
        url = _start_router(rig, engines)
        asyncio.run(_phases(args, rig, url, engines, other, samples))
    return _figures(samples)


async def _phases(
    args: argparse.Namespace, rig: Rig, url: str, engines: list[Engine], other: Path, samples: Samples
) -> None:
    async with RouterClient(url, str(Role.ROLLOUT)) as client:
        for engine in engines:
            await until_so(lambda e=engine: _is_idle(client, e), f"{engine.id} is there")  # type: ignore[misc]
        for number in range(3 if args.quick else 10):
            await _migrate(client, f"migrate-{args.seed}-{number}", samples)
        for number in range(2 if args.quick else 5):
            await _stop(client, engines[0], f"stop-{args.seed}-{number}", samples)
        mine = rig.model(Role.ROLLOUT)
        await _update(client, engines, [mine, other], f"update-{args.seed}", samples)
        num_kills = 1 if args.quick else 3
        for number in range(num_kills):
            await _kill(client, engines, f"kill-{args.seed}-{number}", samples)
            if number < num_kills - 1:
                engines[0] = await _replace(client, rig, engines[0], f"a{number}", mine)


# Processes ------------------------------------------------------------------------------------------------


def _engine(rig: Rig, name: str) -> Engine:
    control = rig.wait_engine(name)
    return Engine(control=control, engine_id=control.status().engine_id, pid=rig.pid(name))


def _start_router(rig: Rig, engines: Sequence[Engine]) -> str:
    port = free_port()
    argv = ["-m", "rose.scheduler.rollout.service", "--port", str(port)]
    for engine in engines:
        argv += ["--worker", engine.control.url]
    process = rig.run(argv, "router")
    url = f"http://127.0.0.1:{port}"
    process.wait_ready(f"{url}/health", ROUTER_START_S)
    return url


def _other_weights(rig: Rig) -> Path:
    """A checkpoint of the same shape. torch stays out of this process."""
    folder = rig.folder / "other"
    code = (
        "import sys; from pathlib import Path; from rose.demo.models import make_rollout_model; "
        "make_rollout_model(Path(sys.argv[1]), seed=1)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise WorkerError(f"the other weights could not be made:\n{made.stderr}")
    return folder


async def _replace(client: RouterClient, rig: Rig, dead: Engine, name: str, weights: Path) -> Engine:
    """A new engine in the place of a dead one, with the same weights as the other."""
    await client.remove(dead.id)
    rig.start_engine(name, Role.ROLLOUT, gate=GateMode.OFF)
    engine = await asyncio.to_thread(_engine, rig, name)
    await _give(client, engine, weights, 3)
    await client.add(engine.control.url)
    return engine


async def _is_idle(client: RouterClient, engine: Engine) -> bool:
    worker = await client.worker(engine.id)
    return bool(worker["alive"]) and worker["in_flight"] == 0


async def _begin_turns(
    client: RouterClient, engine: Engine, name: str
) -> tuple[list[Turn], list[asyncio.Task[Turn]]]:
    """Long turns, all under way, some of them on the engine. Raises: WorkerError if there are none."""
    begun = [client.begin(random_prompt(f"{name}-{i}", PROMPT_TOKENS), LONG_TOKENS) for i in range(NUM_TURNS)]
    turns, tasks = [turn for turn, _ in begun], [task for _, task in begun]
    await until(lambda: all(len(turn.token_ids) >= RUNNING_TOKENS for turn in turns), "all turns run")
    if not (await client.worker(engine.id))["in_flight"]:
        raise WorkerError(f"no turn runs on {engine.id}")
    return turns, tasks


# Phases ---------------------------------------------------------------------------------------------------


async def _migrate(client: RouterClient, name: str, samples: Samples) -> None:
    prompt = random_prompt(name, PROMPT_TOKENS)
    alone = await client.run(prompt, LONG_TOKENS)
    turn, task = client.begin(prompt, LONG_TOKENS)
    for cut in CUTS:
        await until(lambda cut=cut: len(turn.token_ids) >= cut or task.done(), f"{cut} tokens")  # type: ignore[misc]
        (busy,) = [w for w in (await client.status())["workers"] if w["in_flight"]] or [None]
        if busy is None:
            raise WorkerError(f"the turn was over before its migration after {cut} tokens")
        await client.remove(busy["id"])
        await client.add(busy["url"])
    await task
    is_moved = turn.rose.get("resumes") == len(CUTS)
    samples.is_equal.append(is_moved and alone.is_whole(LONG_TOKENS) and turn.token_ids == alone.token_ids)


async def _stop(client: RouterClient, victim: Engine, name: str, samples: Samples) -> None:
    """Stops all processes of an engine for a while. New turns come all the time."""
    turns, tasks = await _begin_turns(client, victim, name)
    num_before = (await client.worker(victim.id))["turns"]
    num_cut = sum((await client.status())["counters"]["reroutes"].values())
    os.killpg(victim.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        detection = asyncio.create_task(_num_turns_when_cut(client, victim, num_cut))
        new = []
        for number in range(round(NEW_TURNS_S / NEW_TURN_EVERY_S)):
            new.append(client.begin(random_prompt(f"{name}-new-{number}", PROMPT_TOKENS), SHORT_TOKENS)[1])
            await asyncio.sleep(NEW_TURN_EVERY_S)
        ended = [*await asyncio.gather(*tasks), *await asyncio.gather(*new)]
        num_then, num_after = await detection, (await client.worker(victim.id))["turns"]
    finally:
        os.killpg(victim.pid, signal.SIGCONT)
    if broken := [turn.error for turn in ended if turn.error is not None]:
        raise WorkerError(f"turns failed when {victim.id} was stopped: {broken}")
    samples.num_sent_unaware += num_then - num_before
    samples.num_sent_aware += num_after - num_then
    for turn in turns:
        if turn.workers[0] == victim.id:
            samples.reroutes_s.append(turn.times_s[turn.rose["spans"][0]["tokens"]] - stopped_s)
    samples.reroutes_s += [turn.times_s[0] - turn.begun_s for turn in ended[len(turns) :]]
    await _rehabilitate(client, victim)


async def _num_turns_when_cut(client: RouterClient, victim: Engine, num_cut: int) -> int:
    """Waits for the first reroute; the turns that the engine had got by then."""

    async def is_cut() -> bool:
        return bool(sum((await client.status())["counters"]["reroutes"].values()) > num_cut)

    await until_so(is_cut, "a turn is rerouted")
    return int((await client.worker(victim.id))["turns"])


async def _rehabilitate(client: RouterClient, engine: Engine) -> None:
    """Short turns until the engine has proved itself and takes its share again."""

    async def is_trusted() -> bool:
        await asyncio.gather(*(client.run(random_prompt(f"again-{i}", PROMPT_TOKENS), 2) for i in range(4)))
        worker = await client.worker(engine.id)
        return bool(worker["alive"] and not worker["on_probation"])

    await until_so(is_trusted, f"{engine.id} takes turns again")


async def _update(
    client: RouterClient, engines: Sequence[Engine], weights: Sequence[Path], name: str, samples: Samples
) -> None:
    """New weights under running turns, then in mode pinned. Both engines end with the first weights."""
    mine, other = weights
    for engine in engines:
        await _give(client, engine, mine, 1)
    await _sees(client, engines, 1)
    _, tasks = await _begin_turns(client, engines[0], name)
    for engine in engines:
        await _give(client, engine, other, 2)
    running = await asyncio.gather(*tasks)
    await _sees(client, engines, 2)
    pinned = await _pin(client, engines[0], mine, name)
    # The first engine has my weights again, the other one those of version 2.
    for turn in (*running, *pinned):
        if not turn.is_whole(LONG_TOKENS if turn in running else SHORT_TOKENS):
            raise WorkerError(f"a turn failed while weights changed: {turn.error or turn.finish_reason}")
        made_by = await _true_weights(client, engines, turn)
        known = [(tag, is_other) for tag, is_other in zip(turn.versions, made_by, strict=True) if is_other is not None]
        samples.num_untold += len(made_by) - len(known)
        samples.tags += [(tag == "bench/2") == is_other for tag, is_other in known]
        if turn not in running:
            samples.num_pinned += len(known)
            samples.num_stale += sum(not is_other for _, is_other in known)
    await _give(client, engines[1], mine, 3)
    await _sees(client, engines, 3)


async def _pin(client: RouterClient, changing: Engine, weights: Path, name: str) -> list[Turn]:
    """Second turns of sessions that began with version 2, while and after one engine gets version 3."""
    await client.set_version_mode("pinned")
    sessions = [f"{name}-session-{i}" for i in range(2 * NUM_TURNS)]
    first = await asyncio.gather(
        *(client.run(random_prompt(session, PROMPT_TOKENS), SHORT_TOKENS, session) for session in sessions)
    )
    prompts = [[*turn.prompt, *turn.token_ids, 1, 2, 3] for turn in first]
    ready = list(zip(prompts, sessions, strict=True))
    update = asyncio.create_task(_give(client, changing, weights, 3))
    meanwhile = []
    for prompt, session in ready[:NUM_TURNS]:
        meanwhile.append(client.begin(prompt, SHORT_TOKENS, session)[1])
        await asyncio.sleep(0.01)
    await update
    after = [client.begin(prompt, SHORT_TOKENS, session)[1] for prompt, session in ready[NUM_TURNS:]]
    second = await asyncio.gather(*meanwhile, *after)
    await client.set_version_mode("latest")
    return second


async def _give(client: RouterClient, engine: Engine, weights: Path, number: int) -> None:
    """As a subscriber does it."""
    (path,) = weights.glob("*.safetensors")
    state_hash = str(await asyncio.to_thread(checkpoint_state_hash, path))
    update = WeightUpdate(version=f"bench/{number}", path=str(path), state_hash=state_hash)
    await client.call("POST", f"{engine.control.url}/rose/v1/weights", update.model_dump())


async def _sees(client: RouterClient, engines: Sequence[Engine], number: int) -> None:
    async def is_so() -> bool:
        workers = [await client.worker(engine.id) for engine in engines]
        return all(worker["weight_version"] == f"bench/{number}" for worker in workers)

    await until_so(is_so, f"the router knows of version {number}")


async def _true_weights(client: RouterClient, engines: Sequence[Engine], turn: Turn) -> list[bool | None]:
    """For each token, whether the second engine's weights made it; None where both may have."""
    mine, other = [await _logprobs(client, engine, turn) for engine in engines]
    found: list[bool | None] = []
    for carried, by_mine, by_other in zip(turn.logprobs, mine, other, strict=True):
        is_mine, is_other = abs(carried - by_mine) < SAME_LOGPROB, abs(carried - by_other) < SAME_LOGPROB
        found.append(is_other if is_mine != is_other else None)
    return found


async def _logprobs(client: RouterClient, engine: Engine, turn: Turn) -> list[float]:
    """What an engine's weights say of each token of a turn."""
    tokens = [*turn.prompt, *turn.token_ids]
    body: dict[str, Any] = {"model": engine.control.model, "prompt": tokens, "max_tokens": 1}
    answer = await client.call(
        "POST", f"{engine.control.url}/v1/completions", {**body, "prompt_logprobs": 0, "temperature": 0.0}
    )
    told = answer["choices"][0]["prompt_logprobs"]
    start = len(turn.prompt)
    return [told[i][str(tokens[i])]["logprob"] for i in range(start, len(tokens))]


async def _kill(client: RouterClient, engines: Sequence[Engine], name: str, samples: Samples) -> None:
    victim, survivor = engines
    await until_so(lambda: _is_idle(client, victim), f"{victim.id} is idle")
    before = victim.generated_tokens() - (await client.worker(victim.id))["tokens"]
    turns, tasks = await _begin_turns(client, victim, name)
    os.killpg(victim.pid, signal.SIGKILL)
    await asyncio.gather(*tasks)
    num_lost = victim.generated_tokens() - (await client.worker(victim.id))["tokens"] - before
    num_cut = sum(victim.id in turn.workers for turn in turns)
    if not num_cut:
        raise WorkerError(f"no turn was cut when {victim.id} was killed")
    samples.num_cut += num_cut
    samples.lost_per_turn.append(num_lost / num_cut)
    answers = await asyncio.to_thread(
        survivor.control.complete, [list(turn.prompt) for turn in turns], LONG_TOKENS
    )
    for turn, (tokens, _) in zip(turns, answers, strict=True):
        if not turn.is_whole(LONG_TOKENS) or turn.token_ids != tokens:
            samples.failed.append(turn.error or f"{len(turn.token_ids)} tokens, {turn.finish_reason}")


def _figures(samples: Samples) -> list[Figure]:
    for failed in samples.failed:
        print(f"a turn failed when its engine was killed: {failed}")
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
            peers={"vllm-router 0.1.17, in the prototypes": 20.0},
            spread=(min(samples.reroutes_s), max(samples.reroutes_s)),
        ),
        Figure(
            name="sigstop_new_turns",
            value=float(samples.num_sent_aware),
            unit="turns",
            target="<= 0",
            peers={"sent before the first reroute": float(samples.num_sent_unaware)},
        ),
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
        Figure(
            name="sigkill_failed_turns",
            value=float(len(samples.failed)),
            unit="turns",
            target="<= 0",
            peers={"turns cut": float(samples.num_cut), "vllm-router 0.1.17, in the prototypes, of 6": 3.0},
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
    sys.exit(run_benchmark(__doc__ or "", measure))
