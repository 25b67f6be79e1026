"""An engine or the daemon is killed outright: the others go on, and a dead engine's slabs come back."""

import os
import signal
from concurrent.futures import Future

import pytest
from probes import ROLLOUT_TOKENS, SERVING_TOKENS, prompt, wave_prompts
from real_engine import Answer, RealEngine, until
from references import StockAnswers
from shared_gpu import NUM_SLABS, SharedGpu

from rose.admission.board_snapshot import snapshot
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def gpu(late_gpu: SharedGpu) -> SharedGpu:
    """The pair whose engines have steps in flight."""
    return late_gpu


def kill_everything(engine: RealEngine) -> None:
    """SIGKILL to the API server and all it started, at once. Returns once it is known to be dead."""
    os.killpg(engine.process.pid, signal.SIGKILL)
    until(lambda: not engine.process.is_alive(), "its API server ends")


def any_done(requests: "list[Future[Answer]]") -> bool:
    """Where the machine is fast or has stalled, they have come and gone before a status could tell."""
    return any(request.done() for request in requests)


def has_ended(request: "Future[Answer]") -> bool:
    """A lost one with an error. On a slow machine all may have been reclaimed, or have stalled, before; on a
    fast one some may have come whole."""
    return request.exception() is not None or request.result().finish_reason in ("abort", "length")


def test_a_killed_serving_engine_is_reported_and_a_new_one_takes_its_place(
    gpu: SharedGpu, serving: RealEngine, rollout: RealEngine
) -> None:
    requests = serving.start_requests([prompt(f"lost-{i}", 300) for i in range(6)], max_tokens=700)
    until(lambda: gpu.ledger.num_held(Role.SERVING) > 6, "serving holds slabs of running requests")
    dead_pid = snapshot(gpu.observer.board_words).serving.pid
    os.kill(dead_pid, signal.SIGKILL)  # the engine core; its API server finds out by itself

    until(lambda: all(one.role is not Role.SERVING for one in gpu.ledger.engines().values()), "slot freed")
    assert gpu.ledger.num_held(Role.SERVING) == 0
    until(
        lambda: gpu.ledger.num_free == NUM_SLABS - gpu.ledger.num_held(Role.ROLLOUT),
        "every slab has an owner",
    )
    assert gpu.ledger.serving_used_slabs == 0
    board = snapshot(gpu.observer.board_words).serving
    assert (board.pid, board.alive) == (dead_pid, False)
    assert all(request.exception() is not None for request in requests)
    # Rollout sees it within MAX_LIVENESS_AGE_NS, and keeps off a GPU on which nobody knows what runs.
    (request,) = rollout.start_requests([prompt("orphan", 40)], max_tokens=700)
    until(lambda: "serving process is gone" in rollout.process.log_tail(200), "rollout reports the loss")
    assert request.result().stop_reason == "rose_stall"

    until(lambda: not serving.process.is_alive(), "its API server ends")
    gpu.ensure_running()
    gpu.settle()
    assert snapshot(gpu.observer.board_words).serving.alive
    assert len(gpu.engine(Role.SERVING).complete(prompt("again", 300), 8).tokens) == 8
    assert len(rollout.complete(prompt("again", 300), 8).tokens) == 8


def test_a_killed_daemon_is_not_missed_and_its_successor_buries_engines_as_it_did(
    gpu: SharedGpu, serving: RealEngine, rollout: RealEngine, stock: StockAnswers
) -> None:
    prompts = wave_prompts(Role.SERVING, 0)
    rollouts = rollout.start_requests(wave_prompts(Role.ROLLOUT, 0), ROLLOUT_TOKENS)
    # As long as their leases, also where they end before they are seen.
    until(lambda: gpu.ledger.num_held(Role.ROLLOUT) > 6, "rollouts hold slabs")
    requests = serving.start_requests(prompts, SERVING_TOKENS)
    until(lambda: serving.status().num_running > 0 or any_done(requests), "serving requests in flight")
    gpu.kill_daemon()
    # The wave needs more than the headroom: slabs move from rollout to serving while there is no daemon.
    for request in serving.start_requests(prompts, SERVING_TOKENS):
        assert request.result().tokens
    requests += serving.start_requests(prompts, SERVING_TOKENS)
    gpu.start_daemon()
    until(lambda: not any(one.is_leaving for one in gpu.ledger.engines().values()), "all engines are back")
    assert {one.role for one in gpu.ledger.engines().values()} == set(Role)
    expected = stock.of("serving")
    for given, request in zip(prompts * 2, requests, strict=True):
        assert request.result().finish_reason == "length"
        assert request.result().tokens == expected[tuple(given)]["tokens"]
    for request in rollouts:
        request.exception()
    gpu.ledger.check_integrity()

    gpu.settle()
    lost = rollout.start_requests([prompt(f"after-{i}", 400) for i in range(10)], max_tokens=500)
    until(
        lambda: rollout.status().kv_slabs_in_use > NUM_SLABS // 2 or any_done(lost),
        "rollouts use half of the pool",
    )
    kill_everything(rollout)
    until(lambda: all(one.role is not Role.ROLLOUT for one in gpu.ledger.engines().values()), "slot freed")
    until(
        lambda: gpu.ledger.num_free == NUM_SLABS - gpu.ledger.num_held(Role.SERVING),
        "every slab has an owner",
    )
    assert all(has_ended(request) for request in lost)
    gpu.ensure_running()  # a new engine joins the pool that was taken over
    gpu.settle()
    assert len(gpu.engine(Role.ROLLOUT).complete(prompt("heir", 300), 8).tokens) == 8


def test_a_killed_rollout_engine_gives_its_slabs_back_and_serving_loses_nothing(
    gpu: SharedGpu, serving: RealEngine, rollout: RealEngine
) -> None:
    """The last one here, as the next test that wants the pair waits for another rollout engine."""
    lost = rollout.start_requests([prompt(f"lost-{i}", 400) for i in range(10)], max_tokens=500)
    until(
        lambda: rollout.status().kv_slabs_in_use > NUM_SLABS // 2 or any_done(lost),
        "rollouts use half of the pool",
    )
    requests = serving.start_requests([prompt(f"kept-{i}", 100) for i in range(6)], max_tokens=120)
    until(lambda: serving.status().num_running == 6 or any_done(requests), "serving requests in flight")
    kill_everything(rollout)

    until(lambda: all(one.role is not Role.ROLLOUT for one in gpu.ledger.engines().values()), "slot freed")
    assert gpu.ledger.num_held(Role.ROLLOUT) == 0
    until(
        lambda: gpu.ledger.num_free == NUM_SLABS - gpu.ledger.num_held(Role.SERVING),
        "every slab has an owner",
    )
    for request in requests:
        answer = request.result()
        assert (answer.finish_reason, len(answer.tokens)) == ("length", 120)
    assert all(has_ended(request) for request in lost)
    # What the dead engine held is of use to serving at once.
    burst = serving.start_requests([prompt(f"more-{i}", 300) for i in range(7)], max_tokens=20)
    assert all(len(request.result().tokens) == 20 for request in burst)
    gpu.ledger.check_integrity()
