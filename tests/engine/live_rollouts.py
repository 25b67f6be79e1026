"""A pool in which a rollout engine answers all along, beside the engines that a test forks there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import prefill_decode_runs
from engine_runs import Moves
from forked_engines import Fork, forks_in_pool
from preloaded import FORKS
from probes import ROLLOUT_TOKENS, wave_prompts
from references import ModelDirs, StockAnswers
from tiny_models import SLAB_BYTES

from rose.types import Role


class LiveRollouts:
    """Rollouts round after round. ``stop`` ends them, and the other engines that are given it."""

    def __init__(
        self, fork: Callable[..., Fork], model: Path, pool: str, stock: StockAnswers, gate: str | None
    ) -> None:
        self.fork = fork
        """Forks another engine beside them."""
        self.stop = FORKS.Event()
        self._stock = stock
        self._prompts = wave_prompts(Role.ROLLOUT, 0)
        given = {"prompts": self._prompts, "max_tokens": ROLLOUT_TOKENS, "stop": self.stop}
        self._engine = fork(prefill_decode_runs.roll_out, model=model, pool=pool, gate=gate, **given)

    def end(self) -> int:
        """Returns how often slabs moved. Asserts that all answers are stock vLLM's, as far as they came."""
        self.stop.set()
        moves: Moves = self._engine.result()
        expected = self._stock.of("rollout")
        for replies in moves.replies:
            for given, reply in zip(self._prompts, replies, strict=True):
                assert reply.tokens == expected[tuple(given)]["tokens"][: len(reply.tokens)]
        return moves.num_moves


@contextmanager
def live_rollouts(
    folder: Path,
    pool: str,
    models: ModelDirs,
    stock: StockAnswers,
    gate: str | None = "off",
    /,
    *,
    num_slabs: int,
    headroom_slabs: int,
    slab_bytes: int = SLAB_BYTES,
) -> Iterator[LiveRollouts]:
    """Starts a pool and the rollout engine in it. Everything that was forked there is stopped at the end."""
    size = {"num_slabs": num_slabs, "headroom_slabs": headroom_slabs, "slab_bytes": slab_bytes}
    with forks_in_pool(folder, pool, **size) as fork:
        yield LiveRollouts(fork, models.untied[0], pool, stock, gate)
