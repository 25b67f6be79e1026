"""Records as a replay would have made them."""

from collections.abc import Sequence

from rose.demo.records import TrainingStep
from rose.measure.records import RequestRecord


def record(
    *,
    ttft_s: float = 0.1,
    tpot_s: float = 0.02,
    tokens: int = 5,
    request_id: str = "r0",
    output: Sequence[int] | None = None,
    error: str | None = None,
    finish_reason: str | None = "length",
) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        scheduled_s=10.0,
        sent_s=10.01,
        prompt=[1] * 8,
        max_tokens=tokens,
        token_times_s=[10.0 + ttft_s + index * tpot_s for index in range(tokens)],
        token_ids=list(output if output is not None else range(tokens)),
        status=200,
        error=error,
        finish_reason=finish_reason,
    )


def training_step(number: int, reward: float, engine_hashes: tuple[str, ...] = ()) -> TrainingStep:
    """Returns a step of the demo; without ``engine_hashes``, both engines run the published weights."""
    state_hash = f"hash-{number}"
    return TrainingStep(
        step=number,
        reward_mean=reward,
        success_share=reward,
        num_tokens=300,
        version=f"run/{number}",
        num_changed=20,
        wire_bytes=25,
        coo_bytes=120,
        dense_bytes=900,
        state_hash=state_hash,
        engine_hashes=engine_hashes if engine_hashes else (state_hash, state_hash),
    )
