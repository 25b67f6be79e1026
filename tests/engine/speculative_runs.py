"""What the forked engines with speculative decoding do. Each function runs in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import async_on_cpu  # noqa: F401
import engine_runs
from async_runs import PATIENT_S, SLO
from engine_runs import (
    WINDOW_S,
    Moves,
    Prompts,
    _batches,
    _cut,
    _wait_for_tokens,
    begin_rl_step,
    num_changes,
    tenant_of,
)
from forked_engines import Driver, Reply, make_engine
from late_device import use_late_device
from mended_states import mend_states

from rose.admission.board import BoardWord
from rose.engine.status import Field, ProfileCommand
from rose.engine.weights.weights import StagedUpdate
from rose.transfer.format.checkpoint import checkpoint_state_hash
from rose.types import GateMode, Role

NUM_DRAFTS = 3
MANY_TOKENS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What an engine with draft tokens answered, and what became of them."""

    moves: Moves
    most_in_flight: int
    num_drafts: int
    num_accepted: int
    num_granted: int = 0
    """Rollout steps that were taken behind the gate."""
    num_taken: Sequence[int] = ()
    """For each prompt, the slabs that the other engine had before it and this one had during it."""


def speculation(method: str, drafter: Path | None = None) -> dict[str, Any]:
    given: dict[str, Any] = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "ngram":
        return {**given, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {**given, "model": str(drafter)} if drafter is not None else given


def draft_over_cuts(
    model: Path,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    num_rounds: int,
    speculative: dict[str, Any],
    *,
    num_at_once: int = 99,
    is_late: bool = False,
    is_gated: bool = False,
    **args: Any,
) -> Drafted:
    """A rollout engine with draft tokens loses half its slabs in the midst of decoding, round after round."""
    mend_states()
    device = use_late_device() if is_late else None
    settings = {"role": "rollout", "pool": pool, "stall_s": PATIENT_S, **SLO}
    if is_gated:
        settings["gate"] = str(GateMode.DUAL)
    llm = make_engine(model, settings, speculative_config=speculative, disable_log_stats=False, **args)
    driver = Driver(llm)
    before, replies, rl_steps = num_changes(tenant_of(driver)), list[list[Reply]](), count(1)
    for step in range(1, num_rounds + 1):
        answers: list[Reply] = []
        for batch in _batches(prompts, num_at_once):
            names = driver.ask(batch, max_tokens)
            _wait_for_tokens(driver, names)
            if step < num_rounds:  # the last round comes whole
                _cut(driver, tenant_of(driver).pool.num_positions_in_use() // 2)
                driver.step()
            begin_rl_step(driver, next(rl_steps))
            answers += driver.wait(names)
        replies.append(answers)
    return _drafted(
        llm,
        driver,
        Moves(replies=replies, num_moves=num_changes(tenant_of(driver)) - before),
        most_in_flight=device.most_in_flight if device is not None else 1,
        num_granted=tenant_of(driver).client.board_words.load(BoardWord.R_STEPS) if is_gated else 0,
    )


def _drafted(
    llm: Any,
    driver: Driver,
    moves: Moves,
    *,
    most_in_flight: int = 1,
    num_granted: int = 0,
    num_taken: Sequence[int] = (),
) -> Drafted:
    tenant_of(driver).pool.check_integrity()
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return Drafted(
        moves=moves,
        most_in_flight=most_in_flight,
        num_drafts=counts["vllm:spec_decode_num_draft_tokens"],
        num_accepted=counts["vllm:spec_decode_num_accepted_tokens"],
        num_granted=num_granted,
        num_taken=num_taken,
    )


def draft_beside_another(
    model: Path,
    pool: str,
    role: Role,
    prompts: Prompts,
    max_tokens: int,
    num_rounds: int,
    speculative: dict[str, Any],
    stop: Event,
    burst: Event | None = None,
    **args: Any,
) -> Drafted:
    """An engine with draft tokens answers one prompt at a time, beside an engine of the other role that takes
    slabs all the time, or on ``burst``; then tells it to stop. Before each prompt, an engine that serves
    waits until rollouts have half of all slabs."""
    mend_states()
    settings = {"role": str(role), "pool": pool, "engine_id": "drafting", "stall_s": PATIENT_S}
    settings |= {"serving_window_s": WINDOW_S, "floor_slabs": 0} if role is Role.SERVING else {}
    llm = make_engine(model, settings, speculative_config=speculative, disable_log_stats=False, **args)
    driver, replies, rl_steps, num_taken = Driver(llm), list[list[Reply]](), count(1), list[int]()
    other = next(each for each in Role if each is not role)
    ledger, mine = tenant_of(driver).ledger, tenant_of(driver).client.slot
    driver.step_until(lambda: ledger.num_held(other) > 0, "the other engine", 1200.0)
    before = num_changes(tenant_of(driver))
    for _ in range(num_rounds):
        answers: list[Reply] = []
        for prompt in prompts:
            if role is Role.ROLLOUT:  # a cut freezes the budget until then
                driver.step_until(
                    lambda: ledger.serving_reserve_slabs == 0, "serving's recent peak has passed"
                )
                begin_rl_step(driver, next(rl_steps))
            else:
                driver.step_until(
                    lambda: ledger.num_held(other) >= ledger.num_slabs // 2, "rollouts have half of the slabs"
                )
            theirs = {slab for slot in ledger.slots_of(other) for slab in ledger.owned(slot)}
            (name,) = driver.ask([prompt], max_tokens)
            driver.step_until(partial(_has_begun, driver, name), "a few tokens, or its end")
            num_taken.append(len(theirs.intersection(ledger.owned(mine))))
            if burst is not None:
                burst.set()
            answers += driver.wait([name])
        replies.append(answers)
    stop.set()
    moves = Moves(replies=replies, num_moves=num_changes(tenant_of(driver)) - before)
    return _drafted(llm, driver, moves, num_taken=num_taken)


def _has_begun(driver: Driver, name: str) -> bool:
    """An earlier burst may end it at once."""
    reply = driver.replies.get(name)
    return reply is not None and (len(reply.tokens) > MANY_TOKENS or reply.finish_reason is not None)


def stock_answers(**given: Any) -> list[list[int]]:
    """Stock vLLM with draft tokens, whose kernels of states are mended as those of the engines here."""
    mend_states()
    return engine_runs.stock_answers(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a serving engine with draft tokens answered and knows of its steps."""

    replies: list[Reply]
    num_tokens: int
    """The output tokens that its books of deadlines counted."""
    tokens_per_step: float
    num_preempted: int
    is_profiled: bool
    tpot_floor_us: int
    step_us: float
    """What a step with one decode takes at most, as its profile says."""


def serve_drafted(
    model: Path, pool: str, prompts: Prompts, max_tokens: int, speculative: dict[str, Any]
) -> Served:
    """A serving engine under the gate, which makes a profile of its own steps."""
    settings = {"role": "serving", "pool": pool, "stall_s": PATIENT_S, "gate": str(GateMode.DUAL), **SLO}
    llm = make_engine(model, settings, speculative_config=speculative, disable_log_stats=False)
    driver = Driver(llm)
    scheduler, page = driver.scheduler, driver.scheduler.page
    page.put(Field.PROFILE, ProfileCommand.RECORD)
    for number in (1, 2, len(prompts), len(prompts)):
        driver.answer(prompts[:number], max_tokens)
    page.put(Field.PROFILE, ProfileCommand.FIT)
    driver.step_until(lambda: page.get(Field.PROFILE) == ProfileCommand.NONE, "a profile")
    books = scheduler._deadlines
    counted = [0]
    forget = books.finished

    def finished(request_ids: Any) -> None:
        ended = list(request_ids)
        counted[0] += sum(books._decodes[each].num_output_tokens for each in ended if each in books._decodes)
        forget(ended)

    books.finished = finished
    replies = driver.answer(prompts, max_tokens)
    tenant_of(driver).pool.check_integrity()
    model_of_steps = scheduler.recorder.observed_model
    scheduler._tell_floors()
    return Served(
        replies=replies,
        num_tokens=counted[0],
        tokens_per_step=books._tokens_per_step,
        num_preempted=sum(
            metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
        ),
        is_profiled=scheduler.recorder.is_profiled,
        tpot_floor_us=page.get(Field.TPOT_FLOOR_US),
        step_us=1e6 * model_of_steps.predict_safe(0, 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What an engine answered, before the first update and after each."""

    answers: list[list[list[int]]]
    stale: list[str | None]
    """Why the drafter was not updated, after each update."""
    drafter: list[dict[str, Any]]
    """Its parameters that are no part of the model, after each update."""


def answer_under_new_weights(
    model: Path,
    pool: str,
    prompts: Prompts,
    max_tokens: int,
    speculative: dict[str, Any],
    checkpoints: Sequence[Path],
) -> Updated:
    """Loads the checkpoints one after the other."""
    from vllm.config import set_current_vllm_config

    settings = {"role": "rollout", "pool": pool, "stall_s": PATIENT_S}
    llm = make_engine(model, settings, speculative_config=speculative)
    driver = Driver(llm)
    answers = [driver.answer(prompts, max_tokens)]
    worker = driver.core.model_executor.driver_worker.worker
    shared = {id(each) for each in worker.get_model().parameters()}
    stale, drafter = [], []
    for path in checkpoints:
        update = StagedUpdate(path=str(path), state_hash=str(checkpoint_state_hash(path)))
        with set_current_vllm_config(worker.vllm_config):
            worker.weight_transfer_engine.receive_weights(update)
        assert llm.reset_prefix_cache()
        answers.append(driver.answer(prompts, max_tokens))
        stale.append(worker.weight_transfer_engine.stale_drafter)
        named = worker.get_draft_model().named_parameters()
        drafter.append({name: each.detach().numpy().copy() for name, each in named if id(each) not in shared})
    return Updated(
        answers=[[reply.tokens for reply in replies] for replies in answers], stale=stale, drafter=drafter
    )


def refused_with(model: Path, pool: str, speculative: dict[str, Any]) -> str:
    """What an engine with this drafter is refused with, "" if it is not."""
    settings = {"role": "serving", "pool": pool}
    try:
        make_engine(model, settings, speculative_config=speculative)
    except ValueError as error:
        return str(error)
    return ""
