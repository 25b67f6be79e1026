"""Which waiting requests join a node's next pass.

Source: LeMix §V-D, Algorithm 3, corrected: the request that ends the batch stays in the queue; the printed
loop takes it out. Sequences that are being decoded are in every pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """`max_tokens`: of prompts in one pass, so that the last request doesn't delay the first for long."""

    max_requests: int = 8
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if self.max_requests < 1 or self.max_tokens < 1:
            raise ValueError(f"a batch needs room for a request and a token, got {self}")

    def take(self, prompt_tokens: Iterable[int]) -> int:
        """Returns how many requests from the head of a queue with these prompts join; at least one, if
        any."""
        count, tokens = 0, 0
        for length in prompt_tokens:
            tokens += length
            if count == self.max_requests or (count and tokens > self.max_tokens):
                break
            count += 1
        return count
