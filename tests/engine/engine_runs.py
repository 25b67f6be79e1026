"""What the forked engines do in the tests of vLLM's features. Each function runs in a process of its own."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from forked_engines import Driver, Reply, make_engine

from rose.engine.memory.tenant import Tenant
from rose.engine.status import Field
from rose.types import Role

Prompts = Sequence[Sequence[int]]
LEASE_S = 6.0
"""Longer than a machine stalls between two turns that must find each other's cache."""
WINDOW_S = 0.5
STALL_S = 600.0
"""No request stands still for so long."""
STEP_TOKENS = 128


def stock_answers(
    model: Path, prompts: Prompts, max_tokens: int, num_at_once: int = 99, **args: Any
) -> list[list[int]]:
    driver = Driver(make_engine(model, None, **args))
    batches = [driver.answer(batch, max_tokens) for batch in _batches(prompts, num_at_once)]
    return [reply.tokens for batch in batches for reply in batch]


def stock_margins(model: Path, prompts: Prompts, max_tokens: int, **args: Any) -> list[float]:
    """Returns for each prompt by how many nats the tokens of stock's answer are likelier than the next likely
    ones, at the least. Near 0, rounding decides which token is the greedy one, and it changes with the
    batch."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    asked = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2
    )
    margins = []
    for answer in make_engine(model, None, **args).generate(asked, params, use_tqdm=False):
        tokens = answer.outputs[0].logprobs
        two = [sorted((token.logprob for token in each.values()), reverse=True)[:2] for each in tokens]
        margins.append(min(first - second for first, second in two))
    return margins


def _batches(prompts: Prompts, num_at_once: int) -> list[Prompts]:
    return [prompts[start : start + num_at_once] for start in range(0, len(prompts), num_at_once)]


def serve_bursts(
    model: Path, pool: str, prompts: Prompts, max_tokens: int, burst: Event, stop: Event, **args: Any
) -> list[list[int]]:
    """All prompts at once, each time that ``burst`` is set; idle in between, when rollouts get slabs."""
    settings = {"role": "serving", "pool": pool, "engine_id": "serving", "serving_window_s": WINDOW_S}
    driver = Driver(make_engine(model, settings, **args))
    answers: list[list[int]] = []
    while True:
        driver.step_until(lambda: burst.is_set() or stop.is_set(), "told what to do", at_most_s=1200.0)
        if stop.is_set():
            return answers
        burst.clear()
        answers += [reply.tokens for reply in driver.answer(prompts, max_tokens)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """What a rollout engine answered while its slabs came and went."""

    replies: list[list[Reply]]
    """The replies of each round, one per prompt."""
    num_moves: int
    """Times that any slab of the pool changed hands."""


def num_changes(tenant: Tenant) -> int:
    return sum(tenant.ledger.entry(slab).epoch for slab in range(tenant.client.num_slabs))


def tenant_of(driver: Driver) -> Tenant:
    tenant: Tenant = driver.scheduler.tenant
    return tenant


def begin_rl_step(driver: Driver, step: int) -> None:
    driver.scheduler.page.put(Field.RL_STEP, step)


def _wait_for_tokens(driver: Driver, names: list[str]) -> None:
    def num_tokens() -> int:
        return sum(len(driver.replies[name].tokens) for name in names if name in driver.replies)

    driver.step_until(lambda: num_tokens() > 20, "a few tokens")


def _cut(driver: Driver, budget: int) -> None:
    """Cuts the budget as serving does under pressure."""
    ledger = tenant_of(driver).ledger
    while not ledger.swap_policy(seen := ledger.policy, replace(seen, rollout_budget_slabs=budget)):
        pass


def answer_over_cuts(
    model: Path,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    num_rounds: int,
    num_at_once: int,
    num_moves: int = 0,
    **args: Any,
) -> Moves:
    """A rollout engine alone in its pool; every other batch loses half its slabs in the midst of decoding. It
    goes on until there were so many rounds and moves."""
    settings = {"role": "rollout", "pool": pool, "lease_s": LEASE_S, "stall_s": STALL_S}
    driver = Driver(make_engine(model, settings, **args))
    replies: list[list[Reply]] = []
    before, step = num_changes(tenant_of(driver)), 0
    while len(replies) < num_rounds or num_changes(tenant_of(driver)) - before < num_moves:
        answers = []
        for index, batch in enumerate(_batches(prompts, num_at_once)):
            names = driver.ask(batch, max_tokens)
            _wait_for_tokens(driver, names)
            if index % 2 == 0:
                _cut(driver, tenant_of(driver).pool.num_positions_in_use() // 2)
                driver.step()
                step += 1
                begin_rl_step(driver, step)
            answers += driver.wait(names)
        replies.append(answers)
    tenant_of(driver).pool.check_integrity()
    return Moves(replies=replies, num_moves=num_changes(tenant_of(driver)) - before)


def hold_a_paused_session(model: Path, pool: str, prompt: Sequence[int]) -> dict[str, Any]:
    """A streaming-input session has answered its first part, holds its blocks, and then comes a cut."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request, RequestStatus

    driver = Driver(make_engine(model, {"role": "rollout", "pool": pool, "stall_s": STALL_S}))
    part = EngineCoreRequest(
        request_id="session",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=True,
    )
    scheduler, pool_of_blocks = driver.scheduler, tenant_of(driver).pool
    request = Request.from_engine_core_request(part, scheduler_block_hasher(driver))
    scheduler.add_request(request)
    paused = RequestStatus.WAITING_FOR_STREAMING_REQ
    driver.step_until(lambda: request.status is paused, "a paused session")
    driver.answer([prompt[:20]], 30)
    scheduler._end_stalled(time.monotonic() + 2 * STALL_S)  # as after so long a pause
    driver.answer([prompt[:20]], 30)
    is_kept = request.status is paused and pool_of_blocks.num_positions_in_use() > 1
    _cut(driver, 1)
    driver.step_until(lambda: tenant_of(driver).num_owned == 1, "the cut is obeyed")
    pool_of_blocks.check_integrity()
    return {
        "is_kept_without_stall": is_kept,
        "is_ended_by_cut": request.status is RequestStatus.FINISHED_ABORTED,
        "answers_after": len(driver.answer([prompt[:20]], 4)[0].tokens),
    }


def wait_behind_a_prefill(model: Path, prompts: Prompts) -> list[Reply]:
    """The second prompt gets no token while one step of the first one's prefill takes as long as a stall."""
    settings = {"role": "rollout", "stall_s": STALL_S}
    driver = Driver(make_engine(model, settings, max_num_batched_tokens=STEP_TOKENS))
    names = driver.ask(prompts, 4)
    driver.step()
    began = time.monotonic()
    driver.step()
    computed = [request.num_computed_tokens for request in driver.scheduler.requests.values()]
    assert computed == [2 * STEP_TOKENS, 0]
    driver.scheduler._end_stalled(began + STALL_S)
    return driver.wait(names)


def scheduler_block_hasher(driver: Driver) -> Any:
    return driver.core.request_block_hasher


@dataclass(frozen=True, slots=True, kw_only=True)
class EventChecks:
    """What was found at moments at which the events' consumer knew exactly what was cached."""

    moves: Moves
    cached: dict[str, int]
    num_removed: int
    num_cleared: int
    hits: dict[str, tuple[float, float, int]]
    """At each moment: tokens looked up and found by vLLM's metrics, and tokens found by the answer."""


def roll_out_beside_serving(
    model: Path,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    num_rounds: int,
    burst: Event,
    stop: Event,
    **args: Any,
) -> EventChecks:
    """Rounds of answers, each with a serving burst that cuts the budget; then the end of leases, a cut and a
    reset of the prefix cache. All along, a consumer replays the KV events."""
    from kv_consumer import KVConsumer

    settings = {
        "role": "rollout",
        "pool": pool,
        "engine_id": "rollout",
        "lease_s": LEASE_S,
        "stall_s": STALL_S,
    }
    with KVConsumer() as consumer:
        engine = make_engine(
            model, settings, kv_events_config=consumer.config, disable_log_stats=False, **args
        )
        run = _ConsumedRollout(engine, consumer, prompts, max_tokens)
        driver, tenant = run.driver, run.tenant
        driver.step_until(lambda: tenant.ledger.num_held(Role.SERVING) > 0, "a serving engine", 1200.0)
        before = num_changes(tenant)
        run.answer_beside_bursts(num_rounds, burst)
        stop.set()
        driver.step_until(lambda: tenant.ledger.num_held(Role.SERVING) == 0, "serving has left")
        run.begin_rl_step()
        # Bursts may have ended every answer; these come whole, on slabs that serving has used.
        run.replies.append(driver.answer(prompts, max_tokens))
        run.compare("whole")
        num_moves = num_changes(tenant) - before
        run.lose_the_cache()
        return run.checks(num_moves)


class _ConsumedRollout:
    """A rollout engine, and a consumer of its KV events that must know what is cached."""

    def __init__(self, engine: Any, consumer: Any, prompts: Prompts, max_tokens: int) -> None:
        self._engine, self._consumer = engine, consumer
        self._prompts, self._max_tokens = prompts, max_tokens
        self.driver = Driver(engine)
        self.tenant = tenant_of(self.driver)
        self.replies: list[list[Reply]] = []
        self._cached: dict[str, int] = {}
        self._hits: dict[str, tuple[float, float, int]] = {}
        self._rl_step = 0

    def begin_rl_step(self) -> None:
        self._rl_step += 1
        begin_rl_step(self.driver, self._rl_step)

    def answer_beside_bursts(self, num_rounds: int, burst: Event) -> None:
        """Takes more rounds where the bursts came so late that no rollout had to end."""
        while len(self.replies) < num_rounds or not self._has_ended_any():
            self.driver.step_until(self._is_serving_quiet, "serving's recent peak has passed")
            self.begin_rl_step()
            names = self.driver.ask(self._prompts, self._max_tokens)
            _wait_for_tokens(self.driver, names)
            burst.set()
            self.replies.append(self.driver.wait(names))
            self.compare(f"round {len(self.replies)}")

    def _has_ended_any(self) -> bool:
        return any(reply.finish_reason == "abort" for answers in self.replies for reply in answers)

    def _is_serving_quiet(self) -> bool:
        return self.tenant.ledger.serving_reserve_slabs == 0

    def lose_the_cache(self) -> None:
        """First by the end of leases, then by a cut, then by a reset."""
        self._lose_all("leases ended")
        self._look_up("first")
        self._look_up("again")
        self.compare("again")
        _cut(self.driver, 1)
        self._lose_all("cut")
        self.begin_rl_step()
        self._look_up("after the cut")
        self.driver.step_until(lambda: not self.driver.scheduler.has_requests(), "an idle engine")
        assert self._engine.reset_prefix_cache()
        self.compare("reset")
        self.tenant.pool.check_integrity()

    def compare(self, moment: str) -> None:
        from kv_consumer import really_cached

        consumer, pool = self._consumer, self.tenant.pool
        self.driver.step_until(
            lambda: consumer.cached() == really_cached(pool), f"{moment}: events say what is cached"
        )
        self._cached[moment] = len(consumer.cached())

    def _look_up(self, moment: str) -> None:
        before = _prefix_counts(self._engine)
        (reply,) = self.driver.answer(self._prompts[:1], 4)
        after = _prefix_counts(self._engine)
        self._hits[moment] = (after[0] - before[0], after[1] - before[1], reply.num_cached_tokens)

    def _lose_all(self, why: str) -> None:
        tenant = self.tenant
        self.driver.step_until(lambda: tenant.num_owned == 1 and not tenant.has_unmaps, why)
        self.compare(why)

    def checks(self, num_moves: int) -> EventChecks:
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

        num_events = self._consumer.view.num_events
        return EventChecks(
            moves=Moves(replies=self.replies, num_moves=num_moves),
            cached=self._cached,
            num_removed=num_events[BlockRemoved],
            num_cleared=num_events[AllBlocksCleared],
            hits=self._hits,
        )


def _prefix_counts(engine: Any) -> tuple[float, float]:
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return values["vllm:prefix_cache_queries"], values["vllm:prefix_cache_hits"]


def refusals(cases: list[dict[str, Any]]) -> list[str]:
    """What the configuration of an engine with these arguments is refused with, "" where it is not."""
    os.environ["VLLM_PLUGINS"] = "rose"
    import inspecting  # noqa: F401
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from rose.errors import ConfigError

    messages = []
    for case in cases:
        given = dict(case)
        if "kv_transfer_config" in given:
            given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
        try:
            EngineArgs(**given).create_engine_config()
        except ConfigError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def refusals_by_another_version(version: str, cases: list[dict[str, Any]]) -> list[str]:
    import vllm

    vllm.__version__ = version
    return refusals(cases)
