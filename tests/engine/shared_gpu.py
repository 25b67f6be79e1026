"""One slab pool with a serving and a rollout engine, shared by all tests that need the pair."""

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preloaded import LATE, STAGES
from real_engine import RealEngine, runtime_dir, until
from tiny_models import SLAB_BYTES
from weight_probes import update, version_name

from rose._shm import Words
from rose.admission.board import NUM_WORDS, BoardWord
from rose.memory.daemon.daemon import start_daemon
from rose.memory.ledger.ledger import Ledger
from rose.memory.pool.pool import PoolClient
from rose.messages import Profile
from rose.types import GateMode, Role

POOL = "tiny"
NUM_SLABS = 24
HEADROOM_SLABS = 6
LEASE_S = 6.0
"""Longer than a machine stalls between two turns that must find each other's cache."""
WINDOW_S = 0.5
STALL_S = 4.0
SETTINGS = {
    # The SLOs are loose, so that rollouts get grants even if two busy cores run everything ten times slower.
    "slo_ttft_ms": 8000.0,
    "slo_tpot_ms": 2000.0,
    "lease_s": LEASE_S,
    "serving_window_s": WINDOW_S,
    "poison_slabs": True,
}


class SharedGpu:
    """The pool's daemon, its ledger, and the two engines. An engine that a test killed is started again."""

    def __init__(
        self,
        folder: Path,
        models: dict[Role, Path],
        *,
        num_ranks: int = 1,
        stages: Mapping[Role, str] | None = None,
        gate: GateMode = GateMode.DUAL,
        stall_s: float = STALL_S,
        is_late: bool = False,
    ) -> None:
        """``num_ranks``: each with its part of every block in a shard of its own. They are tensor-parallel,
        or the stages of a pipeline where ``stages`` has their numbers of layers, with commas.
        ``is_late``: with async scheduling, on late devices."""
        self.folder = folder
        self._variables = LATE if is_late else {}
        self.pool = POOL if num_ranks == 1 else f"{POOL}-{num_ranks}"
        self._models = models
        self._num_ranks = num_ranks
        self._stages = stages if stages is not None else {}
        self._gate = gate
        self._settings = {**SETTINGS, "pool": self.pool, "gate": gate, "stall_s": stall_s}
        self.start_daemon()
        self.observer = PoolClient.observe(self.pool, runtime_dir=runtime_dir(folder))
        self.ledger: Ledger = self.observer.ledger
        self._engines: dict[Role, RealEngine] = {}
        self._rl_step = 0
        self.profiles: dict[Role, Profile] = {}
        """Taken when an engine first starts: without one the gate admits little more than nothing. One that
        starts again finds its own in the cache."""

    def start_daemon(self) -> None:
        """The pool's first daemon, or one that takes over from its predecessor."""
        self._daemon = start_daemon(
            self.pool,
            num_slabs=NUM_SLABS,
            num_shards=self._num_ranks,
            slab_bytes=SLAB_BYTES // self._num_ranks,
            headroom_slabs=HEADROOM_SLABS,
            runtime_dir=runtime_dir(self.folder),
        )

    def kill_daemon(self) -> None:
        os.kill(self._daemon.pid, signal.SIGKILL)
        self._daemon.stop()

    def engine(self, role: Role) -> RealEngine:
        return self._engines[role]

    def ensure_running(self) -> None:
        """Starts what isn't running, side by side."""
        for role in Role:
            engine = self._engines.get(role)
            if engine is not None and not engine.process.is_alive():
                engine.stop()
                del self._engines[role]
            if role not in self._engines:
                self._engines[role] = self._start(role)
        # Rollout first: profiling serving takes the whole pool, and so cuts the rollout budget to nothing.
        for role in (Role.ROLLOUT, Role.SERVING):
            engine = self._engines[role].wait_ready()
            if role not in self.profiles and self._gate is not GateMode.OFF:
                self.profiles[role] = engine.profile()

    def _start(self, role: Role) -> RealEngine:
        layers = self._stages.get(role)
        kind, variables = ("tensor", {}) if layers is None else ("pipeline", {STAGES: layers})
        flags = ("--dtype", "float32", f"--{kind}-parallel-size", str(self._num_ranks))
        variables |= self._variables
        return RealEngine(
            self._models[role], role, self.folder, *flags, variables=variables, **self._settings
        )

    def settle(self) -> None:
        """Idle engines, active, with their first weights, default gate, no pressure: where every test starts.

        A test that failed half-way may have left them anywhere else.
        """
        rollout = self.engine(Role.ROLLOUT)
        if rollout.status().has_subscriber:
            until(lambda: rollout.loaned_run() is None, "the end of the loan")
        rollout.activate()
        for engine in self._engines.values():
            engine.set_gate(self._gate)
        until(lambda: not any(map(_has_requests, self._engines.values())), "idle engines")
        until(lambda: self.ledger.serving_reserve_slabs == 0, "serving's recent peak has passed")
        self._restore_weights()
        self.begin_rl_step()

    def _restore_weights(self) -> None:
        rollout = self.engine(Role.ROLLOUT)
        # An engine that has had no update names no version.
        if rollout.status().weight_version not in (None, version_name(0)):
            update(rollout, self._models[Role.ROLLOUT], 0)

    def begin_rl_step(self) -> None:
        """Begins an RL step, as the router does. Returns once its budget counts."""
        self._rl_step += 1
        self.engine(Role.ROLLOUT).begin_rl_step(self._rl_step)
        until(lambda: self.ledger.policy.rl_step == self._rl_step, "the rollout engine began the RL step")

    def stop_engines(self) -> None:
        while self._engines:
            self._engines.popitem()[1].stop()

    def close(self) -> None:
        self.stop_engines()
        self.observer.close()
        self._daemon.stop()


class LedgerLog:
    """A context manager that samples every few milliseconds, in a thread, who owns which slab."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-log", daemon=True)
        self.owners: dict[int, set[Role]] = defaultdict(set)
        """The roles that have owned each slab."""
        self.num_moves = 0
        """Times that a slab was seen with another role than before."""
        self._last: dict[int, Role] = {}
        self.budgets: list[int] = []
        self.peak: dict[Role, int] = dict.fromkeys(Role, 0)

    @property
    def moved(self) -> list[int]:
        """Slabs that both engines owned at some time."""
        return [slab for slab, roles in self.owners.items() if len(roles) == 2]

    def _run(self) -> None:
        while not self._closing.is_set():
            self._look()
            time.sleep(0.003)

    def _look(self) -> None:
        ledger = self._ledger
        for slot, engine in ledger.engines().items():
            owned = ledger.owned(slot)
            self.peak[engine.role] = max(self.peak[engine.role], len(owned))
            for slab in owned:
                self.owners[slab].add(engine.role)
                self.num_moves += self._last.get(slab, engine.role) is not engine.role
                self._last[slab] = engine.role
        budget = ledger.policy.rollout_budget_slabs
        if not self.budgets or self.budgets[-1] != budget:
            self.budgets.append(budget)

    def __enter__(self) -> "LedgerLog":
        self._look()  # before anything happens, whenever the thread gets to run
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._closing.set()
        self._thread.join()
        self._look()


class BoardLog:
    """A context manager that looks at the board's grants every fraction of a millisecond, in a thread."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._first = self._counters()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="board-log", daemon=True)
        self.num_overlaps = 0
        """Looks that found steps of both engines."""

    def has_grown(self, word: int) -> bool:
        """Whether a counter of the board has grown since this log was made."""
        return self._counters()[word] > self._first[word]

    def _counters(self) -> list[int]:
        return [self._words.load(word) for word in range(NUM_WORDS)]

    def _run(self) -> None:
        load = self._words.load
        while not self._closing.is_set():
            rollout_ns = load(BoardWord.R_STARTED)
            is_serving = load(BoardWord.S_STARTED) > 0
            # A step's start is its name: the same before and after means that it ran in between.
            if is_serving and rollout_ns > 0 and load(BoardWord.R_STARTED) == rollout_ns:
                self.num_overlaps += 1
            time.sleep(0.0005)

    def __enter__(self) -> "BoardLog":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._closing.set()
        self._thread.join()


def _has_requests(engine: RealEngine) -> bool:
    status = engine.status()
    return status.num_running + status.num_waiting > 0
