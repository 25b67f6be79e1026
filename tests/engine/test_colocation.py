"""Two real engines of different models in one slab pool: memory and compute go to serving first."""

import threading
from concurrent.futures import Future
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from probes import ROLLOUT_TOKENS, SERVING_TOKENS, WAVES, prompt, wave_prompts
from real_engine import Answer, RealEngine, runtime_dir, until
from references import StockAnswers
from shared_gpu import HEADROOM_SLABS, NUM_SLABS, LedgerLog, SharedGpu
from tiny_models import BLOCK_TOKENS

from rose.admission.board import BoardWord
from rose.admission.board_snapshot import snapshot
from rose.admission.harm import MEASURING_SHARE
from rose.admission.step_time import UNPROFILED, StepTimeModel
from rose.node.control import EngineControl
from rose.node.harm import BROKEN_STATUS
from rose.node.harm import main as harm_command
from rose.node.top import main as top_command
from rose.types import GateMode, Role, StopReason

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ABORTS = {StopReason.RECLAIMED, StopReason.STALLED}


def is_reclaimed(answer: Answer) -> bool:
    return answer.stop_reason == StopReason.RECLAIMED


def check_all_come_whole(rollout: RealEngine, prompts: list[list[int]]) -> None:
    """Those that wait for their first step stall where the machine does: asked again, one after the other."""
    answers = [request.result() for request in rollout.start_requests(prompts, max_tokens=20)]
    for given, answer in zip(prompts, answers, strict=True):
        while answer.stop_reason == StopReason.STALLED:
            answer = rollout.complete(given, 20)
        assert answer.finish_reason == "length"


def fill_with_rollouts(gpu: SharedGpu, rollout: RealEngine, name: str) -> "list[Future[Answer]]":
    """Long generations that hold all of the budget; returns once they do."""
    requests = rollout.start_requests([prompt(f"{name}-{i}", 400) for i in range(10)], max_tokens=600)
    budget = gpu.ledger.policy.rollout_budget_slabs
    until(lambda: rollout.status().kv_slabs_in_use >= budget, f"{budget} slabs in use by rollouts")
    return requests


def test_both_engines_answer_as_stock_vllm_while_slabs_move_between_them(
    gpu: SharedGpu, serving: RealEngine, rollout: RealEngine, stock: StockAnswers
) -> None:
    epochs_before = sum(gpu.ledger.entry(slab).epoch for slab in range(NUM_SLABS))
    answers: dict[Role, list[tuple[list[int], Answer]]] = {role: [] for role in Role}
    with LedgerLog(gpu.ledger) as log:

        def has_seen_enough() -> bool:
            """How far the two get into each other's way, in one wave, is the machine's to say."""
            has_given_way = any(is_reclaimed(answer) for _, answer in answers[Role.ROLLOUT])
            return has_given_way and len(log.moved) >= NUM_SLABS // 2

        wave = 0
        while wave < WAVES or (not has_seen_enough() and wave < 10 * WAVES):
            prompts = {role: wave_prompts(role, wave % WAVES) for role in Role}
            log.peak[Role.ROLLOUT] = 0
            rollouts = rollout.start_requests(prompts[Role.ROLLOUT], ROLLOUT_TOKENS)
            # The log sees what is over before a status has been asked for.
            until(lambda: log.peak[Role.ROLLOUT] > NUM_SLABS // 2, "rollouts hold half of the pool")
            servings = serving.start_requests(prompts[Role.SERVING], SERVING_TOKENS)
            for role, requests in ((Role.SERVING, servings), (Role.ROLLOUT, rollouts)):
                results = [request.result() for request in requests]
                answers[role] += zip(prompts[role], results, strict=True)
            gpu.settle()
            wave += 1
        # As the router would: what was aborted is asked again, one after the other.
        for given in [given for given, answer in answers[Role.ROLLOUT] if answer.finish_reason == "abort"]:
            answers[Role.ROLLOUT].append((given, rollout.complete(given, ROLLOUT_TOKENS)))

    assert has_seen_enough(), log.owners
    epochs = sum(gpu.ledger.entry(slab).epoch for slab in range(NUM_SLABS))
    assert epochs >= epochs_before + len(log.moved)
    gpu.ledger.check_integrity()
    expected = stock.of("serving")
    for given, answer in answers[Role.SERVING]:
        assert answer.finish_reason == "length"
        assert answer.tokens == expected[tuple(given)]["tokens"]
    expected = stock.of("rollout")
    for given, answer in answers[Role.ROLLOUT]:
        assert answer.finish_reason == "length" or answer.stop_reason in ABORTS
        assert answer.tokens == expected[tuple(given)]["tokens"][: len(answer.tokens)]
    whole = [given for given, answer in answers[Role.ROLLOUT] if answer.finish_reason == "length"]
    assert {tuple(given) for given in whole} == expected.keys()


def test_a_serving_burst_cuts_the_budget_aborts_turns_and_freezes_growth_until_the_next_rl_step(
    gpu: SharedGpu, serving: RealEngine, rollout: RealEngine
) -> None:
    before = rollout.status()
    rollouts = fill_with_rollouts(gpu, rollout, "burst")
    with LedgerLog(gpu.ledger) as log:
        burst = serving.start_requests([prompt(f"burst-{i}", 300) for i in range(12)], max_tokens=60)
        served = [request.result() for request in burst]
        ended = [request.result() for request in rollouts]
    assert all(len(answer.tokens) == 60 for answer in served)
    assert log.peak[Role.SERVING] > HEADROOM_SLABS
    reclaimed = [answer for answer in ended if answer.stop_reason == StopReason.RECLAIMED]
    assert reclaimed and all(answer.finish_reason == "abort" for answer in reclaimed)
    until(lambda: rollout.status().pressure == "frozen", "the last cut has landed")
    status = rollout.status()
    assert status.reclaimed_requests - before.reclaimed_requests == len(reclaimed)
    assert status.cuts > before.cuts
    frozen_budget = status.kv_slabs_budget
    assert frozen_budget <= log.budgets[0] // 2
    assert "emergency cut budget=" in serving.process.log_tail(1000)

    # Serving needs nothing any more, and still rollout may not grow.
    until(lambda: gpu.ledger.serving_reserve_slabs == 0, "serving's recent peak has passed")
    with LedgerLog(gpu.ledger) as log:
        check_all_come_whole(rollout, [prompt(f"frozen-{i}", 50) for i in range(8)])
    assert log.budgets == [frozen_budget]
    assert log.peak[Role.ROLLOUT] <= frozen_budget

    gpu.begin_rl_step()
    until(lambda: rollout.status().pressure == "normal", "no pressure in the new RL step")
    assert gpu.ledger.policy.rollout_budget_slabs > frozen_budget
    with LedgerLog(gpu.ledger) as log:
        check_all_come_whole(rollout, [prompt(f"after-{i}", 300) for i in range(6)])
    assert log.peak[Role.ROLLOUT] > frozen_budget


def test_idle_prefix_cache_is_returned_to_the_pool_when_its_lease_ends(
    gpu: SharedGpu, rollout: RealEngine
) -> None:
    turn = prompt("lease", 5 * BLOCK_TOKENS + 10)
    rollout.complete(turn, 4)
    assert rollout.complete(turn, 4).num_cached_tokens == 5 * BLOCK_TOKENS
    before = rollout.status()
    assert before.kv_slabs_owned > 1
    # Nothing is asked of the engine meanwhile: it must wake by itself.
    until(lambda: gpu.ledger.num_held(Role.ROLLOUT) == 1, "only the padding block's slab is left")
    until(lambda: gpu.ledger.num_draining == 0, "slabs unmapped")
    after = rollout.status()
    assert after.leases_expired - before.leases_expired >= before.kv_slabs_owned - 1
    assert after.steps == before.steps
    # The padding block's slab stays, and so may the block beside it.
    assert rollout.complete(turn, 4).num_cached_tokens <= BLOCK_TOKENS


def test_rollouts_front_end_gives_way_to_servings(serving: RealEngine, rollout: RealEngine) -> None:
    ours, guests = (psutil.Process(engine.process.pid).nice() for engine in (serving, rollout))
    assert ours < guests


def test_idle_engines_do_not_wake_each_other(gpu: SharedGpu) -> None:
    """A step that tells the ledger of no change would wake its own watcher, and so the next step."""
    gpu.settle()
    until(lambda: gpu.ledger.num_held(Role.ROLLOUT) == 1, "all leases ended")

    def a_quiet_second() -> bool:
        seen = gpu.ledger.change_seq
        return gpu.ledger.wait_change(seen, timeout_s=1.0) == seen

    # Engines that wake each other never have one; the step that freed the last lease may still be telling.
    until(a_quiet_second, "a second without a change")


def test_a_rollout_step_gives_the_gpu_back_between_layers_and_loses_nothing(
    gpu: SharedGpu, serving: RealEngine, rollout: RealEngine, stock: StockAnswers
) -> None:
    for engine in (serving, rollout):
        engine.set_gate(GateMode.IDLE)

    def num_pauses() -> int:
        return snapshot(gpu.observer.board_words).num_pauses

    expected, before, wave = stock.of("rollout"), num_pauses(), 0
    while num_pauses() - before < 5:
        given = wave_prompts(Role.ROLLOUT, wave % WAVES)[:4]
        requests = rollout.start_requests(given, ROLLOUT_TOKENS)
        while not all(request.done() for request in requests):
            serving.complete(prompt("pausing", 20), 1)
        for prompt_tokens, request in zip(given, requests, strict=True):
            tokens = request.result().tokens
            assert tokens == expected[tuple(prompt_tokens)]["tokens"][: len(tokens)]
        wave += 1


def stall(serving: RealEngine, rollout: RealEngine) -> Answer:
    """Closes the gate to a request that has a few tokens, or has stalled before; returns its answer."""
    for engine in (serving, rollout):
        engine.set_gate(GateMode.DUAL)
    before = rollout.status().generated_tokens
    (request,) = rollout.start_requests([prompt("stall", 50)], max_tokens=900)
    until(lambda: request.done() or rollout.status().generated_tokens > before + 3, "a few rollout tokens")
    for engine in (serving, rollout):
        engine.set_gate(GateMode.IDLE)
    return request.result()


def test_a_rollout_that_serving_keeps_from_the_gpu_ends_with_its_tokens_so_far(
    gpu: SharedGpu, serving: RealEngine, rollout: RealEngine
) -> None:
    before = rollout.status().stalled_requests
    with KeepBusy(serving):
        answer = stall(serving, rollout)
        while len(answer.tokens) <= 3:  # stalls of the machine close the gate for a while
            answer = stall(serving, rollout)
    assert (answer.finish_reason, answer.stop_reason) == ("abort", StopReason.STALLED)
    assert len(answer.tokens) < 900
    assert rollout.status().stalled_requests > before


def test_a_profile_is_plausible_and_the_gate_goes_by_it(gpu: SharedGpu, rollout: RealEngine) -> None:
    profile = gpu.profiles[Role.ROLLOUT]
    model = StepTimeModel.from_json(profile.model)
    assert 0 < model.predict(0, 1, 100) < 2
    assert model.predict(512, 0) >= model.predict(16, 0)
    assert (gpu.folder / "cache" / "profiles" / profile.file).is_file()
    before = rollout.status().gate
    assert before.mode is GateMode.DUAL
    rollout.complete(prompt("profile", 60), 8)
    # What the gate tells serving about its shortest step rests on the fit, which has followed the machine.
    shortest_s = gpu.observer.board_words.load(BoardWord.R_MIN_STEP) / 1e9
    assert shortest_s > 0
    assert shortest_s != pytest.approx(UNPROFILED.predict_safe(0, 1))
    assert rollout.status().gate.admitted_steps > before.admitted_steps


def test_vllms_metrics_show_the_gate_and_a_request_may_name_its_own_slo(
    gpu: SharedGpu, serving: RealEngine, rollout: RealEngine
) -> None:
    def total(engine: RealEngine, start: str) -> float:
        return sum(value for name, value in engine.metrics().items() if name.startswith(start))

    before = total(serving, "rose_harvested_tokens_total")
    own = {"rose_ttft_ms": 4000.0}
    assert len(serving.complete(prompt("metrics", 30), 4, xargs=own).tokens) == 4
    with pytest.raises(httpx.HTTPStatusError) as refused:
        serving.complete(prompt("metrics", 30), 4, xargs={**own, "rose_tpot_ms": -1.0})
    assert refused.value.response.status_code == 400
    assert "vllm_xargs.rose_tpot_ms is -1.0: send milliseconds above 0" in refused.value.response.text
    rollout.complete(prompt("metrics", 60), 8)
    assert total(serving, "rose_harvested_tokens_total") >= before + 8
    assert any('reason="admitted"' in name for name in serving.metrics())
    assert total(rollout, "rose_generated_tokens_total") >= 8


def test_serving_measures_what_rollouts_cost_it_and_the_commands_show_it(
    gpu: SharedGpu,
    serving: RealEngine,
    rollout: RealEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for engine in (serving, rollout):
        engine.set_gate(GateMode.IDLE)
    asked, turns = 0, list[Future[Answer]]()

    def is_known() -> bool:
        """Asks serving again and again, so that it has steps in every slice of time, beside rollouts."""
        nonlocal asked
        if all(turn.done() for turn in turns):
            turns[:] = rollout.start_requests([prompt(f"cheap-{asked}", 30)], max_tokens=40)
        serving.complete(prompt(f"costly-{asked}", 20), 4, xargs={"rose_tenant": "search"})
        serving.complete(prompt(f"named-{asked}", 20), 4, headers={"X-Rose-Tenant": "support"})
        asked += 1
        harm = serving.status().harm
        if harm is None or harm.hour is None or harm.gate is not GateMode.IDLE:
            return False  # until its next look it tells of the gate's former mode
        return bool(harm.hour.latencies)

    until(is_known, "a report with figures")
    for turn in turns:
        turn.result()
    harm = EngineControl(serving.url, "").harm()
    assert harm.note is None and harm.is_bounded
    assert MEASURING_SHARE <= harm.closed_share < 1
    now = harm.hours[0]
    for name, one in now.latencies.items():
        assert -0.9 < one.low <= one.value <= one.high
        assert now.without_rollouts_ms[name] == pytest.approx(now.with_rollouts_ms[name] / (1 + one.value))
    assert now.tenants["search"].num_requests > 0 and now.tenants["support"].num_requests > 0
    assert now.harvest is not None and now.harvest.tokens > 0
    assert any(name.startswith("rose_harm{") and "ttft_p99" in name for name in serving.metrics())
    assert rollout.status().harm is None

    # Neither command is told where the engines are.
    monkeypatch.setenv("ROSE_RUNTIME_DIR", str(runtime_dir(gpu.folder)))
    # Two tiny engines on the same cores: what rollouts cost may be known to be above the bound.
    assert harm_command([]) in (0, BROKEN_STATUS)
    screen = capsys.readouterr().out
    assert f"rose harm {serving.url}: this hour" in screen and rollout.url not in screen
    assert "serving had" in screen and "Rollouts earned" in screen and "support" in screen
    assert top_command(["--once"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert f"{serving.url}: TTFT P99 was" in screen and "Rollouts are shut out for" in screen
    assert urlsplit(rollout.url).netloc in screen


class KeepBusy:
    """A context manager: an engine that always has several requests to decode."""

    def __init__(self, engine: RealEngine, count: int = 3) -> None:
        self._engine = engine
        self._is_open = True
        self._count = count

    def _keep(self, index: int) -> None:
        turn = 0
        while self._is_open:
            self._engine.complete(prompt(f"busy-{index}-{turn}", 40), 200 + 40 * index)
            turn += 1

    def __enter__(self) -> None:
        self._threads = [threading.Thread(target=self._keep, args=(i,)) for i in range(self._count)]
        for thread in self._threads:
            thread.start()
        until(lambda: self._engine.status().num_running >= self._count, "engine busy")

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        for thread in self._threads:
            thread.join()
