"""The engine cores behind one API server, one for each data-parallel rank, as its routes see them.

Owns their status pages, and this process's view of their pools and boards. Promises that a status never
touches a step loop, and that a command reaches all of them. vLLM chooses the core of each request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.engine.protocol import EngineClient

from rose._shm import Words
from rose.admission.board import absorb_arrival, announce_arrival
from rose.admission.board_snapshot import ServingTime
from rose.admission.deadlines import monotonic_arrival
from rose.config import Settings
from rose.engine.harm_records import HarmRecords, records_path
from rose.engine.hooks.patches import report_chosen_cores
from rose.engine.http.harm import HarmWatch
from rose.engine.settings import EngineSettings
from rose.engine.status import Field, StatusPage, page_path
from rose.errors import ConfigError
from rose.memory.ledger.policy_word import Pressure
from rose.memory.pool.pool import PoolClient, describe_pool
from rose.messages import GateStatus, HarmHistory, WorkerStatus
from rose.types import GateMode, Role

GATE_MODES = list(GateMode)
_SUMMED = (
    *("steps", "num_running", "num_waiting", "kv_slabs_owned", "kv_slabs_in_use", "kv_slabs_budget"),
    *("pool_slabs_quarantined", "kv_cached_blocks", "kv_live_blocks", "stalled_requests"),
    *("reclaimed_requests", "leases_expired", "cuts", "generated_tokens", "busy_s", "device_weights_bytes"),
    *("device_kv_bytes", "device_fixed_bytes", "computed_tokens"),
)


class EngineCore:
    """One engine core: its page, its pool, and what rollouts cost it."""

    def __init__(self, settings: EngineSettings) -> None:
        """``settings`` are those of its rank."""
        self._settings = settings
        pool = settings.pool
        size = describe_pool(pool) if pool is not None else None
        self._slab_bytes = size.slab_bytes * size.num_shards if size is not None else 0
        # It stays open, because the board and the ledger are mapped through it.
        self._pool = PoolClient.observe(pool) if pool is not None else None
        self._serving_time = ServingTime(self._pool.board_words) if self._pool is not None else None
        runtime_dir = Settings.from_environment().runtime_dir
        self.page = StatusPage(page_path(runtime_dir, settings.engine_id), create=False)
        self.watch: HarmWatch | None = None
        """None on a rollout engine and without a pool."""
        if self.board is not None:
            records = HarmRecords(records_path(runtime_dir, settings.engine_id), create=False)
            self.watch = HarmWatch(self.board, records, settings, self._floors_s, self.board_slot)

    @property
    def board(self) -> Words | None:
        """The board if the core is one of its serving engines, else None."""
        is_serving = self._settings.role is Role.SERVING
        return self._pool.board_words if self._pool is not None and is_serving else None

    @property
    def board_slot(self) -> int:
        return self.page.get(Field.BOARD_SLOT)

    def gate_mode(self) -> GateMode:
        """Returns the gate's mode now; the profiling run and the operator change it."""
        return GATE_MODES[self.page.get(Field.GATE_MODE)]

    def harm(self) -> HarmHistory | None:
        """Returns what rollouts cost serving; None on a rollout engine and without a pool."""
        return self.watch.history() if self.watch is not None else None

    def _floors_s(self) -> tuple[float, float]:
        return self.page.get(Field.TTFT_FLOOR_US) / 1e6, self.page.get(Field.TPOT_FLOOR_US) / 1e6

    def status(self, **engine: Any) -> WorkerStatus:
        """Returns the core's status; ``engine`` has the fields that it does not know."""
        get, pool = self.page.get, self._pool
        return WorkerStatus(
            **engine,
            role=self._settings.role,
            deployment=self._settings.deployment,
            engine_id=self._settings.engine_id,
            steps=get(Field.STEPS),
            num_running=get(Field.NUM_RUNNING),
            num_waiting=get(Field.NUM_WAITING),
            kv_slabs_owned=get(Field.KV_SLABS_OWNED),
            kv_slabs_in_use=get(Field.SLABS_IN_USE),
            kv_slabs_budget=get(Field.KV_SLABS_BUDGET),
            pool_slabs_quarantined=get(Field.SLABS_QUARANTINED),
            kv_cached_blocks=get(Field.KV_CACHED_BLOCKS),
            kv_live_blocks=get(Field.KV_LIVE_BLOCKS),
            pressure=Pressure(get(Field.PRESSURE)).name.lower(),
            gate=GateStatus(
                mode=self.gate_mode(),
                tpot_target_ms=get(Field.TPOT_TARGET_US) / 1000 or None,
                admitted_steps=get(Field.ADMITTED_STEPS),
                declined_steps=get(Field.DECLINED_STEPS),
            ),
            harm=self.watch.status() if self.watch is not None else None,
            stalled_requests=get(Field.STALLED_REQUESTS),
            reclaimed_requests=get(Field.RECLAIMED_REQUESTS),
            leases_expired=get(Field.LEASES_EXPIRED),
            cuts=get(Field.CUTS),
            generated_tokens=get(Field.GENERATED_TOKENS),
            computed_tokens=get(Field.COMPUTED_TOKENS),
            busy_s=get(Field.BUSY_NS) / 1e9,
            serving_busy_s=self._serving_time.read_s() if self._serving_time is not None else None,
            serving_kv_usage=pool.ledger.serving_used_slabs / pool.num_slabs if pool is not None else None,
            continues_state=self._settings.role is Role.ROLLOUT,
            device_kv_bytes=get(Field.KV_SLABS_OWNED) * self._slab_bytes,
        )


class EngineCores:
    """All cores of one engine, in the order of their data-parallel ranks."""

    def __init__(self, client: EngineClient, settings: EngineSettings, num_ranks: int) -> None:
        self._client = client
        self._has_pool = settings.pool is not None
        self._all = [EngineCore(settings.of_rank(rank)) for rank in range(num_ranks)]
        if num_ranks > 1:
            self._core_client: Any = client.engine_core
            report_chosen_cores(self._core_client, self._has_chosen)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[EngineCore]:
        return iter(self._all)

    def put(self, field: Field, value: int) -> None:
        """Gives all schedulers a command."""
        for core in self._all:
            core.page.put(field, value)

    def set_memory_share(self, share: float) -> None:
        """Bounds all cores by a share of their pools' rollout budgets. Raises: ConfigError without a pool,
        unless it is all of it."""
        if not self._has_pool and share < 1:
            raise ConfigError(
                f"a share of {share:g} of the memory: this engine is in no pool, and its memory is its own; "
                "start it with --pool"
            )
        for core in self._all:
            core.page.put_memory_share(share)

    def get(self, field: Field) -> list[int]:
        return [core.page.get(field) for core in self._all]

    def gate_mode(self) -> GateMode:
        return self._all[0].gate_mode()

    async def call_ranks(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Calls a method of the workers, and returns the answers of all ranks of all cores.

        Why: vLLM's own collective_rpc() asks all cores, and returns what the first of them answers.
        """
        if len(self._all) == 1:
            own: list[Any] = await self._client.collective_rpc(method, args=args)
            return own
        client = self._core_client
        answers: list[list[Any]] = await asyncio.gather(
            *(
                client._call_utility_async("collective_rpc", method, None, args, None, engine=core)
                for core in client.core_engines
            )
        )
        return [answer for core in answers for answer in core]

    def announce_arrival(self) -> None:
        """Tells waiting serving schedulers that a request is on its way through this API server. The cores
        that do not get it are told so once vLLM has chosen."""
        for core in self._all:
            if core.board is not None:
                announce_arrival(core.board, core.board_slot)

    def _has_chosen(self, chosen: int, arrival_time: float) -> None:
        arrival_s = monotonic_arrival(time.monotonic(), time.time(), arrival_time)
        for rank, core in enumerate(self._all):
            if rank != chosen and core.board is not None:
                absorb_arrival(core.board, arrival_s, core.board_slot)

    def harm(self) -> HarmHistory | None:
        """Returns what rollouts cost serving, on the rank that shuts them out most; None on a rollout engine
        and without a pool."""
        known = [found for core in self._all if (found := core.harm()) is not None]
        return max(known, key=lambda each: each.closed_share, default=None)

    def status(self, **engine: Any) -> WorkerStatus:
        """Returns the engine's status; ``engine`` has the fields that the cores do not know."""
        return _together([core.status(**engine) for core in self._all])


def _together(ranks: Sequence[WorkerStatus]) -> WorkerStatus:
    """Returns the status of an engine from those of its data-parallel ranks."""
    first = ranks[0]
    if len(ranks) == 1:
        return first
    gate = first.gate.model_copy(
        update={
            name: sum(getattr(rank.gate, name) for rank in ranks)
            for name in ("admitted_steps", "declined_steps")
        }
    )
    harms = [rank.harm for rank in ranks if rank.harm is not None]
    return first.model_copy(
        update={
            **{name: sum(getattr(rank, name) for rank in ranks) for name in _SUMMED},
            "gate": gate,
            "harm": max(harms, key=lambda harm: harm.closed_share, default=None),
            "pressure": max((rank.pressure for rank in ranks), key=lambda name: Pressure[name.upper()]),
            "serving_busy_s": _mean([rank.serving_busy_s for rank in ranks]),
            "serving_kv_usage": _mean([rank.serving_kv_usage for rank in ranks]),
            "ranks": list(ranks),
        }
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
