"""The two real engines of bench_slo's measured runs: their start, their gate, what they and a board counted.

Owns both engines' models, profiles and settings. Runs no traffic; the rig stops what it started.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import psutil

from lib.cpu_times import CORE, cpu_use_s
from rose.admission.board import closed_slices
from rose.admission.board_snapshot import EngineState, snapshot
from rose.admission.step_time import StepTimeModel
from rose.demo.plan import DemoPlan
from rose.engine.hooks.priority import GUEST_NICE
from rose.errors import WorkerError
from rose.measure.models import ROLLOUT_SPEC, ModelSpec, make_rollout_model
from rose.measure.rig import PoolSetup, Rig
from rose.measure.windows import RolloutTraffic
from rose.types import GateMode, Role

MIN_STEP_S = 0.045
"""The least that a rollout decode step takes. On a GPU, those of large models take 30 to 200 ms."""
LONG_STEPS = ModelSpec(
    hidden_size=512,
    intermediate_size=2048,
    num_layers=12,
    num_heads=8,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=ROLLOUT_SPEC.vocab_size,
    max_positions=1024,
)
"""The rollout model on a slow machine; on a faster one its MLPs are wider. Its decode steps and the prefill
of its prompts take several times as long as a serving step, as those of a larger model do."""
MAX_WIDTHS = 12
LONG_STEP_ROLLOUTS = RolloutTraffic(concurrency=8, vocab_size=LONG_STEPS.vocab_size, task_tokens=384)
POOL = PoolSetup(num_slabs=112, slab_bytes=768 << 10, headroom_slabs=8)
"""A slab holds one block of either model. Rollouts alone want 24 to 64 of them and the largest burst 36, so
that memory does not decide: other benchmarks measure how it is shared."""


def long_steps() -> ModelSpec:
    """Returns a rollout model whose decode step takes MIN_STEP_S or more on this machine.

    A decode step of a small batch reads all weights, and most are in the MLPs: their products with a batch
    are timed here on one thread, with weights packed as the engine packs them, and they are as many times
    wider as they are too short. The fastest of many tries counts: others slow the machine down, and are gone
    when a window runs.
    """
    import torch

    torch.set_num_threads(1)
    width, hidden = LONG_STEPS.intermediate_size, LONG_STEPS.hidden_size
    batch = LONG_STEP_ROLLOUTS.concurrency
    gate_up, down = (hidden, 2 * width), (width, hidden)
    products = [_packed_product(*sizes, batch) for sizes in LONG_STEPS.num_layers * (gate_up, down)]
    seconds = []
    for _ in range(20):
        before_s = time.perf_counter()
        for product in products:
            product()
        seconds.append(time.perf_counter() - before_s)
    widths = min(max(MIN_STEP_S / min(seconds), 1.0), MAX_WIDTHS)
    return replace(LONG_STEPS, intermediate_size=256 * math.ceil(widths * width / 256))


def _packed_product(num_inputs: int, num_outputs: int, batch: int) -> Callable[[], object]:
    """Returns what multiplies a batch with a layer of an engine, whose weights vLLM has packed for a CPU."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer: Any = torch.nn.Linear(num_inputs, num_outputs, bias=False).requires_grad_(False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return partial(layer.cpu_linear, torch.ones(batch, num_inputs), layer.weight, None)


class Look(NamedTuple):
    """The board at one moment, for the shares of a window."""

    at_s: float
    closed_share: float
    """The share of time in which rollouts are shut out, to measure and to bound harm."""
    serving_s: float
    """Seconds in serving steps so far."""
    rollout_s: float
    has_work: bool
    """Whether serving has work."""


def shares(looks: Sequence[Look]) -> dict[str, float]:
    """Returns where the time between the first look and the last went. Serving has work during its steps and
    between them, and the time between them is of no use to rollouts that run on an idle GPU alone."""
    first, last = looks[0], looks[-1]
    seconds = last.at_s - first.at_s
    return {
        "closed_share": sum(look.closed_share for look in looks) / len(looks),
        "in rollout steps": (last.rollout_s - first.rollout_s) / seconds,
        "in serving steps": (last.serving_s - first.serving_s) / seconds,
        "serving has work": sum(look.has_work for look in looks) / len(looks),
    }


class SloEngines:
    """Serving and rollout on one pool, both profiled."""

    def __init__(self, rig: Rig, plan: DemoPlan) -> None:
        self._rig = rig
        rig.others = plan.cpus.others
        self._compute = plan.cpus.compute
        pool = f"slo-{os.getpid()}"
        self._observer = rig.pool(pool, **POOL)
        models = {
            Role.SERVING: rig.model(Role.SERVING),
            Role.ROLLOUT: make_rollout_model(rig.folder / "long-steps", long_steps()),
        }
        for role, model in models.items():
            rig.start_engine(str(role), role, model=model, pool=pool, compute_cpus=plan.cpus.compute)
        controls = {role: rig.wait_engine(str(role)) for role in Role}
        self.serving, self.rollout = controls[Role.SERVING], controls[Role.ROLLOUT]
        # Rollout first: profiling serving takes the whole pool, which cuts rollout's budget to nothing.
        self.rollout_step_s = StepTimeModel.from_json(self.rollout.profile().model).predict(
            0, LONG_STEP_ROLLOUTS.concurrency
        )
        """The rollout model's decode step with all its sequences."""
        self.serving.profile()

    def set_gate(self, mode: GateMode, tpot_target_s: float | None = None) -> None:
        """Both engines go by ``mode`` from here on; without a gate, at equal priorities as on a GPU.

        ``tpot_target_s``: the TPOT that the gate may let serving come to, its own without one.
        """
        target_ms = None if tpot_target_s is None else 1e3 * tpot_target_s
        for engine in (self.serving, self.rollout):
            engine.set_gate(mode, target_ms)
        nice = 0 if mode is GateMode.OFF else GUEST_NICE
        try:
            for thread_id in self._step_threads(Role.ROLLOUT):
                os.setpriority(os.PRIO_PROCESS, thread_id, nice)
        except PermissionError:
            raise WorkerError(
                "naive co-location gives the rollout engine serving's priority again: run this benchmark "
                "with CAP_SYS_NICE, e.g. as root"
            ) from None

    def _step_threads(self, role: Role) -> Iterator[int]:
        """Yields those of an engine core's threads that compute its steps."""
        for process in psutil.Process(self._rig.pid(str(role))).children(recursive=True):
            if not process.name().startswith(CORE):
                continue
            for thread in process.threads():
                if self._compute is None or os.sched_getaffinity(thread.id) == {int(self._compute)}:
                    yield thread.id

    def look(self) -> Look:
        words = self._observer.board_words
        board = snapshot(words)
        return Look(
            at_s=board.taken_s,
            closed_share=closed_slices(words).share,
            serving_s=board.serving.busy_s,
            rollout_s=board.rollout.busy_s,
            has_work=board.serving.state > EngineState.IDLE,
        )

    def counters(self) -> dict[str, float]:
        """Returns what the board counted so far, and what the engines' threads had of the CPUs."""
        board = snapshot(self._observer.board_words)
        use = {
            f"{role}: {part}": seconds
            for role in Role
            for part, seconds in cpu_use_s(self._rig.pid(str(role))).items()
        }
        return {
            "serving steps": board.serving.num_steps,
            "rollout steps": board.rollout.num_steps,
            "seconds that serving waited for a rollout step": board.begin_wait_s,
            "in turns it had offered": board.yield_wait_s,
            "overruns": board.num_overruns,
            **{f"refused: {reason}": count for reason, count in board.declines.items()},
            **use,
        }
