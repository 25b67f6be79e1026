"""A job with a rollout engine on each worker of its machine, and one long response on each of them.

    python -m lib.cluster.tailed_job LOG ROUTER MODEL ENGINE... --lengths 400 16 16

A rollout's responses are greedy turns at ROUTER, of these lengths for each engine. Its training is a
fixed number of matrix products in this process. Appends a line to LOG for each iteration: every response's
tokens, and when the rollout began, moved its tail, and ended, by the machine's monotonic clock.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import rose
from lib.cluster.phase_job import compute
from lib.load.turns import RouterClient, Turn, random_prompt, until, until_so
from rose.trainers.own_engines import OwnEngines

PROMPT_TOKENS = 32
REPORT_S = 0.1
UNITS = 40
"""Matrix products of a microbatch: some milliseconds."""


class TailedJob:
    """The program. ``moved_s``: when the present rollout's tail moved; None if it did not."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self.engines = OwnEngines([[url] for url in arguments.engines])
        self.moved_s: float | None = None

    def move_tail(self, keep: tuple[int, ...]) -> None:
        self.engines.move_tail(keep)
        self.moved_s = time.monotonic()

    def rollout(self, progress: rose.Progress) -> None:
        self.moved_s, began_s = None, time.monotonic()
        turns: list[Turn] = []
        total = len(self._arguments.lengths) * len(self._arguments.engines)
        with ThreadPoolExecutor(1) as thread:
            answered = thread.submit(asyncio.run, self._ask(turns, progress.iteration))
            while not wait((answered,), REPORT_S).done:
                running = [len(turn.token_ids) for turn in turns if turn.finish_reason is None]
                if running:
                    ended = sum(turn.finish_reason is not None for turn in turns)
                    progress.report("rollout", ended, total, num_tokens=max(running))
            answered.result()
        progress.report("rollout", total, total, lengths=[len(turn.token_ids) for turn in turns])
        line = {
            "tokens": [turn.token_ids for turn in turns],
            "workers": [turn.workers for turn in turns],
            "began_s": began_s,
            "moved_s": self.moved_s,
            "ended_s": time.monotonic(),
        }
        with self._arguments.log.open("a") as log:
            log.write(json.dumps(line) + "\n")

    async def _ask(self, turns: list[Turn], iteration: int) -> None:
        """Asks once the router knows that all engines are active. The longest ones run before the others are
        asked for, so that a router that places each turn on the least-loaded worker spreads them evenly."""
        lengths = sorted(self._arguments.lengths * len(self._arguments.engines), reverse=True)
        async with RouterClient(self._arguments.router, self._arguments.model) as client:
            await until_so(lambda: self._knows_all(client), "the router knows that all engines are active")
            tasks = []
            for number, length in enumerate(lengths):
                if number == lengths.count(lengths[0]):
                    await until(lambda: all(turn.token_ids or turn.error for turn in turns), "the tail runs")
                turn, task = client.begin(random_prompt(f"{iteration}-{number}", PROMPT_TOKENS), length)
                turns.append(turn)
                tasks.append(task)
            await asyncio.gather(*tasks)
        whole = [turn.is_whole(length) for turn, length in zip(turns, lengths, strict=True)]
        assert all(whole), [turn.error for turn in turns]

    async def _knows_all(self, client: RouterClient) -> bool:
        return all(worker["active"] for worker in (await client.status())["workers"])

    def train(self, progress: rose.Progress) -> None:
        for _ in range(self._arguments.microbatches):
            compute(UNITS)
            progress.step(256)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the job's iterations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("router")
    parser.add_argument("model")
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--lengths", nargs="+", type=int, required=True, help="of each engine's responses")
    parser.add_argument("--microbatches", type=int, default=8)
    job = TailedJob(parser.parse_args(argv))

    @rose.phase("rollout", working_set=job.engines, move_tail=job.move_tail)
    def rollout(progress: rose.Progress) -> None:
        job.rollout(progress)

    @rose.phase("train")
    def train(progress: rose.Progress) -> None:
        job.train(progress)

    @rose.runtime_hook
    def iteration(progress: rose.Progress) -> None:
        rollout(progress)
        train(progress)

    iteration()


if __name__ == "__main__":
    main()
