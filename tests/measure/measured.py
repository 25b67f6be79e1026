"""Records as a replay would have made them."""

from collections.abc import Sequence

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
