"""Open-loop serving load: sends each request at its time, however slow the answers are.

Owns the sending and the timing of a replay. Promises that a request is timed from its scheduled
arrival, and that every scheduled request has a record, also when the window closes on it. Never
retries and never slows down for the server. Runs as a process of its own, so that it can be pinned:
``python -m rose.measure.replay --url http://127.0.0.1:8000 --model tiny --out serving.jsonl``
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from rose.errors import RoseError
from rose.measure.completions import Clock, open_session, stream_completion
from rose.measure.figures import latency_s
from rose.measure.load_process import add_load_arguments, reporting
from rose.measure.records import RequestRecord
from rose.measure.trace import ReplayRequest, scaled, trace_or_synthetic
from rose.node.control import completion_body

WINDOW_CLOSED = "not finished when the window closed"


class Replay:
    """One replay of a list of requests; ``progress()`` may be read while ``run()`` runs."""

    def __init__(
        self,
        url: str,
        model: str,
        requests: Sequence[ReplayRequest],
        *,
        now: Clock = time.monotonic,
        cache_salt: str | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._model = model
        self._requests = sorted(requests, key=lambda request: request.at_s)
        self._now = now
        self._cache_salt = cache_salt
        self._records: list[RequestRecord] = []
        self._stop = asyncio.Event()
        self._start_s = 0.0

    async def run(self, *, start_s: float | None = None, drain_s: float = 30.0) -> list[RequestRecord]:
        """Send everything, wait up to ``drain_s`` after the last arrival, return records in send order."""
        self._start_s = start_s if start_s is not None else self._now()
        tasks: list[asyncio.Task[None]] = []
        async with open_session() as session:
            for request in self._requests:
                if not await self._wait_until(self._start_s + request.at_s):
                    break
                record = RequestRecord(
                    request_id=request.request_id,
                    prompt=request.prompt_token_ids,
                    max_tokens=request.max_tokens,
                    scheduled_s=self._start_s + request.at_s,
                )
                self._records.append(record)
                tasks.append(asyncio.create_task(self._send(session, record)))
            await self._drain(tasks, drain_s)
        for record, task in zip(self._records, tasks, strict=True):
            record.error = WINDOW_CLOSED if task.cancelled() else record.error
        return self._records

    def stop(self) -> None:
        """Close the window now: nothing more is sent, unfinished requests are recorded as such."""
        self._stop.set()

    def progress(self) -> dict[str, float | int | None]:
        """What to show so far; rates and percentiles over the whole window.

        send_lag_max_s is this client's own lateness, which the TTFTs contain: a large one means that
        the client, not the server, was starved.
        """
        done = [record for record in self._records if record.ended_s]
        elapsed_s = max(self._now() - self._start_s, 1e-3)
        return {
            "t_s": round(elapsed_s, 3),
            "sent": len(self._records),
            "done": len(done),
            "failed": sum(not r.is_complete for r in done),
            "in_flight": len(self._records) - len(done),
            "rps": round(len(self._records) / elapsed_s, 3),
            "send_lag_max_s": max((r.sent_s - r.scheduled_s for r in self._records), default=None),
            "ttft_p50_s": latency_s(done, "ttft", 50),
            "ttft_p99_s": latency_s(done, "ttft", 99),
            "tpot_p50_s": latency_s(done, "tpot", 50),
            "tpot_p99_s": latency_s(done, "tpot", 99),
        }

    async def _send(self, session: aiohttp.ClientSession, record: RequestRecord) -> None:
        body = {**completion_body(self._model, list(record.prompt), record.max_tokens), "stream_interval": 1}
        if self._cache_salt is not None:
            body["cache_salt"] = self._cache_salt
        await stream_completion(session, self._url, body, record, now=self._now)

    async def _wait_until(self, at_s: float) -> bool:
        """Sleep until ``at_s``; False when the window was closed meanwhile."""
        try:
            await asyncio.wait_for(self._stop.wait(), max(at_s - self._now(), 0.0))
        except TimeoutError:
            return True
        return False

    async def _stopped(self) -> None:
        await self._stop.wait()

    async def _drain(self, tasks: Sequence[asyncio.Task[None]], drain_s: float) -> None:
        if not tasks:
            return
        stopped = asyncio.create_task(self._stopped())
        finished = asyncio.create_task(_all_done(tasks))
        await asyncio.wait({stopped, finished}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (*tasks, stopped, finished):
            task.cancel()
        await asyncio.gather(*tasks, stopped, finished, return_exceptions=True)
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                raise RuntimeError("a replay request failed in the client") from task.exception()


async def _all_done(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


async def replay(
    url: str,
    model: str,
    requests: Sequence[ReplayRequest],
    *,
    now: Clock = time.monotonic,
    start_s: float | None = None,
    drain_s: float = 30.0,
    cache_salt: str | None = None,
) -> list[RequestRecord]:
    """Replay ``requests`` against an OpenAI server; one record per request.

    ``start_s`` (on ``now``'s clock) lines several loads up. A ``cache_salt`` per window keeps a
    repeated window from living off the prefix cache of the one before, with the same greedy output.
    """
    load = Replay(url, model, requests, now=now, cache_salt=cache_salt)
    return await load.run(start_s=start_s, drain_s=drain_s)


async def _run(args: argparse.Namespace, requests: Sequence[ReplayRequest]) -> None:
    load = Replay(args.url, args.model, requests, cache_salt=args.cache_salt)
    async with reporting(load):
        records = await load.run(start_s=args.start_at, drain_s=args.drain_s)
        args.out.write_text("".join(record.to_json_line() + "\n" for record in records))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rose.measure.replay",
        description="Replay a bursty serving trace against an OpenAI server.",
    )
    add_load_arguments(parser, url="server, e.g. http://127.0.0.1:8000", out="JSON lines, one per request")
    parser.add_argument("--trace", type=Path, help="Azure-style CSV; without it, a generated trace")
    parser.add_argument("--rate-rps", type=float, default=0.8)
    parser.add_argument("--burst-size", type=int, default=1, help="requests that arrive at once")
    parser.add_argument("--repeats", type=int, default=1, help="how often the window's requests are sent")
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--max-output-tokens", type=int, default=64)
    parser.add_argument("--drain-s", type=float, default=30.0, help="wait for answers after the last arrival")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; exit status 2 with one line for bad input."""
    args = _parser().parse_args(argv)
    try:
        trace = trace_or_synthetic(args.trace, args.seed)
        requests = scaled(
            trace,
            args.rate_rps,
            args.max_prompt_tokens,
            args.max_output_tokens,
            args.duration_s,
            args.seed,
            vocab_size=args.vocab_size,
            burst_size=args.burst_size,
            repeats=args.repeats,
        )
    except (RoseError, ValueError, OSError) as error:
        print(f"rose.measure.replay: {error}", file=sys.stderr)
        return 2
    asyncio.run(_run(args, requests))
    return 0


if __name__ == "__main__":
    sys.exit(main())
