"""Holds what the phases of bench_failover.py share: engines, findings, and turns under way.

Owns RunningEngine and Samples. Never disturbs an engine.
"""

import asyncio
from dataclasses import dataclass, field

from lib.load.turns import RouterClient, Turn, random_prompt, until
from rose.config import Settings
from rose.engine.status import Field, StatusPage, page_path
from rose.errors import WorkerError
from rose.node.control import EngineControl

PROMPT_TOKENS = 24
LONG_TOKENS, SHORT_TOKENS = 900, 16
NUM_TURNS = 6
"""The turns at a time, on two engines."""
RUNNING_TOKENS = 20
"""A turn that has this many is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """One running engine."""

    control: EngineControl
    engine_id: str
    pid: int

    @property
    def id(self) -> str:
        """The worker's name in the router."""
        return self.control.url.removeprefix("http://")

    def generated_tokens(self) -> int:
        """Returns its scheduler's count, from the status page that outlives the engine."""
        return self._word(Field.GENERATED_TOKENS)

    def running_turns(self) -> int:
        """Returns how many turns its scheduler runs."""
        return self._word(Field.NUM_RUNNING)

    def _word(self, word: Field) -> int:
        page = StatusPage(page_path(Settings.from_environment().runtime_dir, self.engine_id), create=False)
        return page.get(word)


@dataclass(slots=True)
class Samples:
    """What the phases found."""

    is_equal: list[bool] = field(default_factory=list)
    reroutes_s: list[float] = field(default_factory=list)
    num_sent_unaware: int = 0
    num_sent_aware: int = 0
    tags: list[bool] = field(default_factory=list)
    num_untold: int = 0
    num_pinned: int = 0
    num_stale: int = 0
    num_cut: int = 0
    failed: list[str] = field(default_factory=list)
    lost_per_turn: list[float] = field(default_factory=list)


async def is_idle(client: RouterClient, engine: RunningEngine) -> bool:
    worker = await client.worker(engine.id)
    return bool(worker["alive"]) and worker["in_flight"] == 0


async def begin_turns(
    client: RouterClient, engine: RunningEngine, name: str
) -> tuple[list[Turn], list[asyncio.Task[Turn]]]:
    """Begins long turns and returns once all run. Raises: WorkerError if none runs on the engine."""
    begun = [client.begin(random_prompt(f"{name}-{i}", PROMPT_TOKENS), LONG_TOKENS) for i in range(NUM_TURNS)]
    turns, tasks = [turn for turn, _ in begun], [task for _, task in begun]
    await until(
        lambda: all(len(turn.token_ids) >= RUNNING_TOKENS or turn.error is not None for turn in turns),
        "all turns run",
    )
    if errors := [turn.error for turn in turns if turn.error is not None]:
        raise WorkerError(f"turns failed before anything was done to them: {errors}")
    if not engine.running_turns():
        lengths = [len(turn.token_ids) for turn in turns]
        raise WorkerError(f"no turn runs on {engine.id}; all of them have {lengths} tokens")
    return turns, tasks
