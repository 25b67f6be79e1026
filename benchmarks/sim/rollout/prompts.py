"""What the simulated trajectories say, for clients that send no session key.

Owns: the token ids of every trajectory. Promises: a group has one first prompt, and its trajectories part
with the first token that they generate; the same seed gives the same ids. Never: a meaning.
"""

import random
from collections.abc import Sequence

from rose.scheduler.rollout.formats.bodies import TokenIds
from sim.rollout.scenario import Scenario, TrajectoryStep

_IDS = [b"%d," % token for token in range(100_000, 150_000)]
_ID_BYTES = len(_IDS[0])
"""All the same, so that the text of n ids is a slice."""


class Prompts:
    def __init__(
        self, scenario: Scenario, trajectories: Sequence[Sequence[TrajectoryStep]], seed: int
    ) -> None:
        chance = random.Random(f"prompts-{scenario.name}-{seed}")
        self._texts: list[bytes] = []
        shared = b""
        for index, steps in enumerate(trajectories):
            if index % scenario.group_size == 0:
                shared = _text(chance, scenario.first_prompt_tokens)
            num_tokens = sum(step.new_prompt_tokens + step.generated_tokens for step in steps)
            self._texts.append(shared + _text(chance, num_tokens - scenario.first_prompt_tokens))

    def begin(self, trajectory: int, num_tokens: int) -> TokenIds:
        """The first tokens of a trajectory."""
        return TokenIds(b"[%b]" % self._texts[trajectory][: num_tokens * _ID_BYTES - 1])


def _text(chance: random.Random, num_tokens: int) -> bytes:
    return b"".join(chance.choices(_IDS, k=num_tokens))
