"""Model Runner V2 under ROSE, where there is no GPU: a program, as its choices come before vLLM's import.

    python v2_runs.py ARGUMENTS.json ANSWERS.json

V2 needs Triton, whose kernels run in its interpreter if ``ENV`` is set. Triton's wheel has no backend for
CPUs, and vLLM wants one, so an empty one is entered.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENV = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
WARM_UP_TOKENS = 300


def main(arguments: Path, answers: Path) -> None:
    given = json.loads(arguments.read_text())
    if "speculative" in given:
        answers.write_text(json.dumps(drafted(given)))
        return
    if "layers" in given:
        answers.write_text(json.dumps(staged(given)))
        return
    if "num_moves" in given:
        answers.write_text(json.dumps(over_cuts(given)))
        return
    from forked_engines import Driver, make_engine

    settings = {"role": "rollout", "pool": given["pool"], "stall_s": 600.0}
    driver = Driver(make_engine(Path(given["model"]), settings))
    worker = driver.core.model_executor.driver_worker.worker
    assert worker.use_v2_model_runner
    found: dict[str, Any] = {"written": warm_up(worker)}
    from engine_runs import _cut, _wait_for_tokens, tenant_of

    found |= penalized(driver, given["prompts"][0], given["max_tokens"])
    names = driver.ask(given["prompts"], given["max_tokens"])
    _wait_for_tokens(driver, names)
    _cut(driver, tenant_of(driver).pool.num_positions_in_use() // 2)
    found["replies"] = [(reply.tokens, reply.finish_reason) for reply in driver.wait(names)]
    tenant_of(driver).pool.check_integrity()
    answers.write_text(json.dumps(found))


def over_cuts(given: dict[str, Any]) -> dict[str, Any]:
    """Answers over and over while slabs leave, until so many have changed hands (engine_runs.py)."""
    from dataclasses import asdict

    from engine_runs import answer_over_cuts

    return asdict(answer_over_cuts(**given, num_at_once=len(given["prompts"])))


def staged(given: dict[str, Any]) -> dict[str, Any]:
    """Answers of a pipeline with so many layers in its stages: while slabs leave, and behind a gate."""
    from async_runs import use_ranks
    from engine_runs import _cut, _wait_for_tokens, begin_rl_step, tenant_of
    from forked_engines import Driver, make_engine

    from rose.types import GateMode

    ranks, layers = use_ranks(given["layers"]), given["layers"].split(",")
    settings = {"role": "rollout", "pool": given["pool"], "stall_s": 600.0}
    driver = Driver(make_engine(Path(given["model"]), settings, pipeline_parallel_size=len(layers)))
    scheduler = driver.scheduler
    assert scheduler.use_v2_model_runner
    queue = driver.core.batch_queue_size
    names = driver.ask(given["prompts"], given["max_tokens"])
    _wait_for_tokens(driver, names)
    _cut(driver, tenant_of(driver).pool.num_positions_in_use() // 2)
    replies, in_flight = driver.wait(names), [ranks.most_in_flight]
    begin_rl_step(driver, 1)
    scheduler.set_gate(scheduler.rose.gate_settings(GateMode.IDLE))
    ranks.most_in_flight = 0
    gated = driver.answer(given["prompts"], given["max_tokens"])
    tenant_of(driver).pool.check_integrity()
    return {
        "queue": queue,
        "in_flight": [*in_flight, ranks.most_in_flight],
        "replies": [(reply.tokens, reply.finish_reason) for reply in replies],
        "gated": [reply.tokens for reply in gated],
    }


def drafted(given: dict[str, Any]) -> dict[str, Any]:
    """Answers with draft tokens while slabs leave (speculative_runs.py); and V2's modules that drafted.
    ``layers``: how many a pipeline's stages have, if there are stages."""
    from dataclasses import asdict

    from async_runs import use_ranks
    from speculative_runs import draft_over_cuts

    if layers := given.pop("layers", ""):
        use_ranks(layers)
        given["pipeline_parallel_size"] = len(layers.split(","))
    found = asdict(draft_over_cuts(**given))
    made = "vllm.v1.worker.gpu.spec_decode."
    return {**found, "modules": [name.removeprefix(made) for name in sys.modules if name.startswith(made)]}


def read_moves(read: dict[str, Any]) -> Any:
    """What :func:`over_cuts` found, as engine_runs has it."""
    from engine_runs import Moves
    from forked_engines import Reply

    replies = [[Reply(**reply) for reply in answers] for answers in read["replies"]]
    return Moves(replies=replies, num_moves=read["num_moves"])


def penalized(driver: Any, prompt: list[int], max_tokens: int) -> dict[str, list[int]]:
    """Answers with penalties: in one piece, and going on behind the first half, which the engine is told was
    generated, or is not told. A token wins until it has been said about ten times."""

    def answer(so_far: list[int], **told: Any) -> list[int]:
        rest = max_tokens - len(so_far)
        names = driver.ask([[*prompt, *so_far]], rest, logit_bias={5: 20.0}, frequency_penalty=2.0, **told)
        return [*so_far, *driver.wait(names)[0].tokens]

    whole = answer([])
    half = whole[: max_tokens // 2]
    told = answer(half, extra_args={"rose_generated": len(half)})
    return {"whole": whole, "told": told, "not told": answer(half)}


def warm_up(worker: Any) -> list[int]:
    """Runs a part of V2's warm-up that the interpreter can run; returns the blocks of the first slab that it
    wrote to. It asks for blocks 1 to 4."""
    import torch
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    runner = worker.model_runner
    with worker._rose.warm_up(runner):
        assert run_mixed_prefill_decode_warmup(
            runner, worker.execute_model, worker.sample_tokens, WARM_UP_TOKENS
        )
    cache = runner.kv_caches[0]
    slab_blocks = worker._rose._kv._client.slab_bytes // (cache.stride(0) * cache.element_size())
    return [block for block in range(slab_blocks) if bool(torch.count_nonzero(cache[block]))]


if __name__ == "__main__":
    from triton.backends import backends  # type: ignore[import-untyped]

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
