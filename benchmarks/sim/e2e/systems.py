"""The systems that are compared: which engines each gives a job's rollouts, and with how much KV.

Owns what differs between them. All else is the same for all: the router and its policy, the trajectories, the
training, the weights' way to the job's own GPUs, and one seed for everything that is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rose.scheduler.rollout.placing.views import WorkerKind
from rose.types import GateMode
from sim.e2e.calibration import (
    ACTIVATION_S,
    APPLY_S,
    CHANGED,
    DECODE_BYTES_PER_S,
    ENCODE_BYTES_PER_S,
    LEASE_RECOVERY_S,
    LINK_GBPS,
    PaperWorkload,
)
from sim.e2e.fleet import Tape
from sim.e2e.supply import Away, From, Rented, Supply, serverless, spot
from sim.rollout.scenario import Scenario

FOR_EVER_S = 1e9


class System(StrEnum):
    """Where rollouts run besides the job's own GPUs."""

    FIXED = "resource-fixed"
    """Nowhere (ROLL)."""
    ROSE = "ROSE"
    """On lent serving GPUs whenever serving is idle: the default."""
    ROSE_DUAL = "ROSE, slack spent"
    """The same, within the slack of both SLOs too (--gate dual): the paper's mode."""
    SERVERLESS = "serverless-elastic"
    """On functions with a timeout (lambda-RL)."""
    SPOT = "spot-elastic"
    """On spot instances, turns moved with their tokens (RLBoost+)."""
    STATIC = "static split"
    """On serving GPUs, half of their KV memory each, and no gate."""
    RELOAD = "time-sharing with reload"
    """On whole serving GPUs that an autoscaler frees, turns moved with their tokens (ServerlessLLM)."""
    SHARED_LIMIT = "shared limit without slabs"
    """On serving GPUs with one limit of KV memory for both, no prefix cache for rollouts, no gate (Prism)."""


ELASTIC = (System.SERVERLESS, System.SPOT)
MODES = {
    System.ROSE: GateMode.IDLE,
    System.ROSE_DUAL: GateMode.DUAL,
    System.STATIC: GateMode.OFF,
    System.SHARED_LIMIT: GateMode.OFF,
}
"""The gate of the systems that share serving GPUs second by second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What surrounds a job: its workload, and what a fleet of serving engines lends."""

    workload: PaperWorkload
    tapes: dict[GateMode, tuple[Tape, ...]]
    alone: tuple[Tape, ...]
    """The same engines without rollouts."""
    lent_whole: tuple[Rented, ...]
    """What autoscaling frees."""
    reload: tuple[Tape, ...]
    """Engines of the autoscaled fleet, without rollouts."""
    wire_bytes: float
    """The size of a changed element, as our codec sends it."""

    def transfer_s(self, gbps: float = LINK_GBPS, num_senders: int | None = None) -> float:
        """New weights from the trainer to the serving cluster, as a delta over the link.

        Encoding and sending overlap, so the slower of the two counts; decoding and writing come after."""
        num_bytes = self.workload.weight_bytes
        sent_s = CHANGED * self.workload.model.parameters * self.wire_bytes / (gbps * 1e9 / 8)
        senders = num_senders if num_senders is not None else self.workload.num_senders
        encoded_s = num_bytes / senders / ENCODE_BYTES_PER_S
        decoded_s = num_bytes / self.workload.scenario.gpus_per_engine / DECODE_BYTES_PER_S
        return max(sent_s, encoded_s) + decoded_s + APPLY_S


def scenario_of(system: System, workload: PaperWorkload) -> Scenario:
    """The rollouts' scenario with the KV memory that serving GPUs give them under a system."""
    scenario = replace(workload.scenario, serving_kv_tokens=workload.lent_tokens)
    if system is System.STATIC:
        return replace(scenario, serving_kv_tokens=workload.pool_tokens // 2, lease_s=FOR_EVER_S)
    if system is System.SHARED_LIMIT:
        return replace(scenario, serving_kv_tokens=workload.pool_tokens, lease_s=0.0)
    return scenario


def beside(
    system: System, world: World, num_lent: int, *, lease_recovery_s: float = LEASE_RECOVERY_S, seed: int = 0
) -> list[Supply]:
    """The engines beside the job's own. `num_lent`: serving engines that it may borrow (N_serving)."""
    workload = world.workload
    gpus = workload.scenario.gpus_per_engine
    num_rented = workload.max_spot_gpus // gpus
    if system is System.SERVERLESS:
        return serverless(num_rented, recovery_s=lease_recovery_s)
    if system is System.SPOT:
        own_gpus = workload.scenario.num_dedicated * gpus
        return list(spot(num_rented, gpus_per_engine=gpus, own_gpus=own_gpus, seed=seed))
    if system is System.RELOAD:
        return list(world.lent_whole[:num_lent])
    if system is System.FIXED:
        return []
    tapes = world.tapes[MODES[system]]
    return [tapes[index % len(tapes)].supply() for index in range(num_lent)]


def ready(supplies: Sequence[Supply], world: World, start_s: float, weights_s: float | None) -> list[Supply]:
    """The engines of a phase that begins at `start_s`, each from when it has the phase's weights.

    `weights_s`: when their training ended. None: the first phase, before which serving GPUs load rollout's
    weights."""
    found: list[Supply] = []
    for supply in supplies:
        is_lent = supply.kind is WorkerKind.SERVING
        if weights_s is None:
            late = From(kind=supply.kind, inner=supply, ready_s=ACTIVATION_S, until_then=Away.STARTING)
            found.append(late if is_lent else supply)
            continue
        sync_s = world.transfer_s() if is_lent else world.workload.own_sync_s
        ready_s = max(weights_s + sync_s, start_s + APPLY_S)
        found.append(From(kind=supply.kind, keeps_tokens=supply.keeps_tokens, inner=supply, ready_s=ready_s))
    return found
