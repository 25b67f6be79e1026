"""The two real engines of bench_slo's measured runs: their start, their gate, what they and a board counted.

Owns both engines' profiles and settings. Runs no traffic; the rig stops what it started.
"""

import os
import time
from dataclasses import dataclass

from lib.cpu_times import cpu_use_s
from rose.admission.board import snapshot
from rose.admission.step_time import StepTimeModel
from rose.demo.plan import DemoPlan
from rose.measure.rig import Rig
from rose.types import SLO, GateMode, Role

SERVING_SLO = SLO(ttft_s=0.6, tpot_s=0.15)
"""Of the serving model on one CPU core; the paper's ratio of TTFT to TPOT is similar (500/150 ms)."""
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How both engines share their compute; without a target the gate's own."""

    mode: GateMode
    tpot_target_s: float | None = None


class SloEngines:
    """Serving and rollout on one pool, both profiled."""

    def __init__(self, rig: Rig, plan: DemoPlan) -> None:
        self._rig = rig
        rig.others = plan.cpus.others
        pool = f"slo-{os.getpid()}"
        self._observer = rig.pool(pool, **plan.pool)
        for role in Role:
            rig.start_engine(
                str(role),
                role,
                pool=pool,
                slo_ttft_ms=1000 * SERVING_SLO.ttft_s,
                slo_tpot_ms=1000 * SERVING_SLO.tpot_s,
                compute_cpus=plan.cpus.compute,
            )
        controls = {role: rig.wait_engine(str(role)) for role in Role}
        self.serving, self.rollout = controls[Role.SERVING], controls[Role.ROLLOUT]
        # Rollout first: profiling serving takes the whole pool, which cuts rollout's budget to nothing.
        self.rollout.profile()
        model = StepTimeModel.from_json(self.serving.profile().model)
        self.decode_s = model.predict(0, 1)
        """Serving's decode step with one request."""

    def set_gate(self, policy: Policy) -> None:
        """Both engines go by ``policy`` from here on."""
        target_ms = None if policy.tpot_target_s is None else 1e3 * policy.tpot_target_s
        for engine in (self.serving, self.rollout):
            engine.set_gate(policy.mode, target_ms)
        time.sleep(SETTLE_S)  # an idle engine obeys within 50 ms

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
