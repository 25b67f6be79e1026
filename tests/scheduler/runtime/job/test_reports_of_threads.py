"""Several threads of a rollout report, and the scheduler says to each of them that the rest should move."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rose
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Granted,
    Moved,
    Report,
    Request,
    decode_call,
    encode,
)
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.channel.protocol import Batch, Outgoing, SchedulerSide
from rose.scheduler.runtime.job import phase
from rose.scheduler.runtime.job.job import JobFile, RunningJob

NUM_THREADS = 4


def answer(side: SchedulerSide, calls: list[object], is_over: threading.Event) -> None:
    """A scheduler that grants all permits. It takes one move, and refuses a second one as a pair's does."""
    while not is_over.is_set():
        arrived, batch = side.receive(0.05), Batch()
        for each in arrived:
            call = decode_call(each.body)
            num_moved = sum(isinstance(before, Moved) for before in calls)
            calls.append(call)
            message: Answer | Granted = Answer(seq=call.seq)
            if isinstance(call, Request):
                message = Granted(
                    seq=call.seq,
                    job=call.job,
                    attempt=1,
                    phase=call.phase,
                    iteration=0,
                    epoch=1,
                    lease_s=60.0,
                )
            elif isinstance(call, Report):
                message = Answer(seq=call.seq, body={"keep": [0]})
            elif isinstance(call, Moved) and num_moved:
                message = Answer(seq=call.seq, error="it has moved")
            batch.outgoing.append(Outgoing(client=each.client, body=encode(message)))
        side.commit(batch, arrived)


def test_a_tail_moves_once_however_many_threads_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, calls, is_over = f"unix:{tmp_path / 'channel'}", list[object](), threading.Event()
    side = ChannelUrl.parse(url).serve()
    scheduler = threading.Thread(target=answer, args=(side, calls, is_over))
    scheduler.start()
    places = {
        "group": "main",
        "rollout_nodes": [0, 1],
        "cache_folder": str(tmp_path),
        "limit_bytes": {"rollout": 1},
    }
    job = RunningJob(
        JobFile(channel=url, name="a", attempt=1, first_iteration=0, num_iterations=1, **places)  # type: ignore[arg-type]
    )
    monkeypatch.setattr(phase, "running_job", lambda: job)
    monkeypatch.setattr(phase, "_loop", phase._Loop())
    progress, moves = rose.Progress(0, 1), list[tuple[int, ...]]()
    others = ThreadPoolExecutor(NUM_THREADS)

    def report(_: int = 0) -> None:
        progress.report("rollout", 9, 10, num_tokens=5)

    def move(keep: tuple[int, ...]) -> None:
        moves.append(keep)
        list(others.map(report, range(NUM_THREADS)))  # it waits for responses, whose threads report

    @rose.phase("rollout", move_tail=move)
    def rollout() -> None:
        report()

    rollout()
    assert moves == [(0,)]
    assert [isinstance(call, Moved) for call in calls].count(True) == 1
    assert sum(isinstance(call, Report) for call in calls) == 1 + NUM_THREADS
    others.shutdown()
    job._client.close()
    is_over.set()
    scheduler.join()
    side.close()
