"""Migrations, SIGSTOP and SIGKILL under streaming turns, for bench_failover.py.

Owns what is done to the engines and what is noted of it. Promises that a stopped engine goes on, also on an
error.
"""

import asyncio
from collections.abc import Sequence

from lib.faults.signals import kill, stopped
from lib.faults.turns import (
    LONG_TOKENS,
    PROMPT_TOKENS,
    SHORT_TOKENS,
    RunningEngine,
    Samples,
    begin_turns,
    is_idle,
)
from lib.load.turns import RouterClient, Turn, random_prompt, until, until_so
from rose.errors import WorkerError

CUTS = (100, 300, 500)
"""Tokens after which a turn is made to migrate."""
NEW_TURNS_S, NEW_TURN_EVERY_S = 5.0, 0.25


async def migrate(client: RouterClient, name: str, samples: Samples) -> None:
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


async def stop(client: RouterClient, victim: RunningEngine, name: str, samples: Samples) -> None:
    """Stops all processes of an engine for a while. New turns come all the time."""
    turns, tasks = await begin_turns(client, victim, name)
    num_before = (await client.worker(victim.id))["turns"]
    num_cut = sum((await client.status())["counters"]["reroutes"].values())
    with stopped(victim.pid) as stopped_s:
        detection = asyncio.create_task(_num_turns_when_cut(client, victim, num_cut))
        _, new = await begin_new_turns(client, name)
        ended = await asyncio.gather(*tasks, *new)
        num_then, num_after = await detection, (await client.worker(victim.id))["turns"]
    if broken := [turn.error for turn in ended if turn.error is not None]:
        raise WorkerError(f"turns failed when {victim.id} was stopped: {broken}")
    samples.num_sent_unaware += num_then - num_before
    samples.num_sent_aware += num_after - num_then
    for turn in turns:
        if turn.workers[0] == victim.id and len(turn.workers) > 1:
            samples.reroutes_s.append(turn.token_times_s[turn.rose["spans"][0]["tokens"]] - stopped_s)
    samples.reroutes_s += [turn.token_times_s[0] - turn.sent_s for turn in ended[len(turns) :]]
    await _rehabilitate(client, victim)


async def begin_new_turns(client: RouterClient, name: str) -> tuple[list[Turn], list[asyncio.Task[Turn]]]:
    """Begins short turns one after the other, for NEW_TURNS_S."""
    begun = []
    for number in range(round(NEW_TURNS_S / NEW_TURN_EVERY_S)):
        begun.append(client.begin(random_prompt(f"{name}-new-{number}", PROMPT_TOKENS), SHORT_TOKENS))
        await asyncio.sleep(NEW_TURN_EVERY_S)
    return [turn for turn, _ in begun], [task for _, task in begun]


async def _num_turns_when_cut(client: RouterClient, victim: RunningEngine, num_cut: int) -> int:
    """Waits for the first reroute, and returns the turns that the engine had got by then."""

    async def is_cut() -> bool:
        return bool(sum((await client.status())["counters"]["reroutes"].values()) > num_cut)

    await until_so(is_cut, "a turn is rerouted")
    return int((await client.worker(victim.id))["turns"])


async def _rehabilitate(client: RouterClient, engine: RunningEngine) -> None:
    """Sends short turns until the engine has proved itself and takes its share again."""

    async def is_trusted() -> bool:
        await asyncio.gather(*(client.run(random_prompt(f"again-{i}", PROMPT_TOKENS), 2) for i in range(4)))
        worker = await client.worker(engine.id)
        return bool(worker["alive"] and not worker["on_probation"])

    await until_so(is_trusted, f"{engine.id} takes turns again")


async def kill_engine(
    client: RouterClient, engines: Sequence[RunningEngine], name: str, samples: Samples
) -> None:
    victim, survivor = engines
    await until_so(lambda: is_idle(client, victim), f"{victim.id} is idle")
    before = victim.generated_tokens() - (await client.worker(victim.id))["tokens"]
    turns, tasks = await begin_turns(client, victim, name)
    kill(victim.pid)
    await asyncio.gather(*tasks)
    num_lost = victim.generated_tokens() - (await client.worker(victim.id))["tokens"] - before
    num_cut = sum(victim.id in turn.workers for turn in turns)
    if not num_cut:
        raise WorkerError(f"no turn was cut when {victim.id} was killed")
    samples.num_cut += num_cut
    samples.lost_per_turn.append(num_lost / num_cut)
    samples.failed += await failures(survivor, turns)


async def failures(survivor: RunningEngine, turns: Sequence[Turn]) -> list[str]:
    """Returns what is wrong with each turn whose answer differs from an undisturbed engine's."""
    prompts = [list(turn.prompt) for turn in turns]
    answers = await asyncio.to_thread(survivor.control.complete, prompts, LONG_TOKENS)
    return [
        turn.error or f"{len(turn.token_ids)} tokens, {turn.finish_reason}"
        for turn, (tokens, _) in zip(turns, answers, strict=True)
        if not turn.is_whole(LONG_TOKENS) or turn.token_ids != tokens
    ]
