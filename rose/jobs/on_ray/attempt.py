"""One attempt of a job on the nodes of its group: placed, started and watched, by a thread of its own.

It goes on when its scheduler ends: the next one adopts it (adopt.py).
"""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rose.errors import ConfigError
from rose.jobs.on_ray.actors import Part, Polled, Prepared
from rose.jobs.on_ray.ending import AttemptSetup, AttemptThread, Say
from rose.jobs.on_ray.failures import checked_env, env_limit_s, failure, is_passing, reason
from rose.jobs.on_ray.groups import Seat, Spot
from rose.jobs.on_ray.parts import KILL_ASK_S, POLL_S, Hung, PartRef, ask
from rose.jobs.ranks import Attempt, Ended, HostPart
from rose.scheduler.runtime.channel.messages import Start
from rose.scheduler.runtime.job.spec import Launch, RunSpec

logger = logging.getLogger(__name__)

SPREAD_GRACE_S = 10.0
"""The time between SIGTERM and SIGKILL for the other processes when one has failed."""
ENV_RETRY_S = 65.0
"""Ray answers with the same failure for a minute before it prepares an environment again."""


class NodeMoved(Exception):
    """Ray has moved a node between the creation of its part and its keeper's answer."""


class RayAttempt(AttemptThread):
    """One attempt. Its thread owns everything but the wish to end it."""

    def __init__(
        self,
        spec: RunSpec,
        order: Start,
        *,
        setup: AttemptSetup,
        code: Callable[[], bytes | None],
        log: Path,
        say: Say,
        before: Attempt | None = None,
        running: tuple[Sequence[Seat], Sequence[PartRef]] | None = None,
    ) -> None:
        """before: an earlier attempt, whose end is awaited first.

        code: packs what is sent to each host, in the attempt's thread. running: the attempt was started by
        an earlier scheduler, on these nodes and with these parts.
        """
        super().__init__(spec.name, list(running[1]) if running is not None else [], setup, say)
        self._spec, self._order = spec, order
        self._code, self._log, self._before = code, log, before
        self._seats: Sequence[Seat] = running[0] if running is not None else []
        self._packed: bytes | None = None
        self._is_running = running is not None
        self._kill_s: float | None = None
        self._thread.start()

    def end(self, grace_s: float) -> None:
        kill_s = time.monotonic() + grace_s
        self._kill_s = min(kill_s, self._kill_s) if self._kill_s is not None else kill_s

    def _life(self) -> Ended | None:
        try:
            if not self._is_running and not self._start():
                return Ended(exit_status=-signal.SIGTERM)
            self._say([_describe(seat) for seat in self._seats], runs=True)
            return self._watch()
        except Hung as error:
            self._write("", f"{error}\n".encode())
            return Ended(exit_status=-signal.SIGKILL, why=str(error))
        except NodeMoved:
            lost = f"Ray moved nodes of {self._order.group} while the attempt started"
            return Ended(exit_status=-signal.SIGKILL, lost=lost)
        except (ray.exceptions.RuntimeEnvSetupError, ray.exceptions.RayTaskError, ConfigError) as error:
            ended = failure(self._spec.command, error)
            self._write("", f"{ended.cannot_start or ended.why or reason(error)}\n".encode())
            if is_passing(error):
                self._wait(ENV_RETRY_S, f"{ended.why}; it is tried again in {ENV_RETRY_S:.0f} s")
            return ended
        except ray.exceptions.ActorAlreadyExistsError as error:  # also a RayError, but no node is lost
            return Ended(exit_status=-signal.SIGKILL, why=reason(error))
        except ray.exceptions.RayError as error:
            if not self._is_let_go:
                logger.info("lost job=%s reason=%s", self._job, reason(error))
            return None

    def _is_wanted(self) -> bool:
        return self._kill_s is None and not self._is_let_go

    def _wait(self, seconds: float, why: str) -> None:
        self._say([why], runs=False)
        until_s = time.monotonic() + seconds
        while self._is_wanted() and time.monotonic() < until_s:
            time.sleep(POLL_S)

    # Start --------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Starts the processes on all nodes, the first node's as master. Returns whether it did."""
        while self._before is not None and self._before.ended() is None:
            if self._is_let_go:
                return False
            time.sleep(POLL_S)
        nodes = nodes_of(self._order)
        self._say([f"waits for Ray to place {', '.join(nodes)} of {self._order.group}"], runs=False)
        seats = self._setup.groups.seat(
            self._spec.name,
            self._order.group,
            nodes,
            self._spec.placement,
            self._is_wanted,
            self._create,
            spare=_spare(self._spec, self._order),
        )
        if seats is None:
            return False
        self._seats = seats
        at = {seat.node.name: seat.ray_node for seat in seats}
        if any(at[part.node] != part.ray_node for part in self._parts):
            raise NodeMoved
        self._say([f"prepares {_describe(seat)}: packages and code" for seat in seats], runs=False)
        packed = self._packed
        code = ray.put(packed) if packed is not None else None
        limit_s = self._setup.hung_s + env_limit_s(self._spec.runtime_env)
        asked = [(part, part.actor.prepare.remote(code)) for part in self._parts]
        prepared: list[Prepared] = self._ask(asked, "to prepare its packages and code", limit_s)
        for part, each in zip(self._parts, prepared, strict=True):
            part.identity = each.identity
        all_nodes, ray_nodes = tuple(seat.node for seat in seats), tuple(seat.ray_node for seat in seats)
        recording = self._setup.recording.recording if self._setup.recording is not None else None
        starts = []
        for index, part in enumerate(self._parts):
            its_part = HostPart(nodes=all_nodes, index=index, master_port=prepared[0].free_port)
            order = part.actor.start.remote(self._order, its_part, ray_nodes, self._setup.channel, recording)
            starts.append((part, order))
        self._ask(starts, "to start its processes", self._setup.hung_s)
        return True

    def _create(self, spots: Sequence[Spot]) -> None:
        """Creates the parts, which start beside the nodes' keepers."""
        self._packed = self._code()
        environment = checked_env(
            {
                name: value
                for name, value in self._spec.runtime_env.items()
                if name != "working_dir" or self._packed is None
            }
        )
        actor = ray.remote(Part)
        for spot in spots[:1] if self._spec.launch is Launch.ONCE else spots:
            options: dict[str, Any] = {
                "name": part_name(self._order, spot),
                "lifetime": self._setup.groups.lifetime,
                "num_cpus": 0,
                "max_concurrency": 2,
                "scheduling_strategy": spot.strategy,
                "runtime_env": environment,
            }
            made = actor.options(**options).remote(self._spec.name, spot.node, self._setup.root)
            self._parts.append(PartRef(node=spot.node, ray_node=spot.ray_node, actor=made))

    # Watch --------------------------------------------------------------------------------------------------

    def _watch(self) -> Ended | None:
        """Returns how the processes have ended; None: a node of the job has died, and some may still run.

        Once one has failed, or they were told to, all end.
        """
        first: Ended | None = None
        """The first one that failed: the others fail because of it."""
        told_s: float | None = None
        while True:
            asked = [(part, part.actor.poll.remote(part.kept)) for part in self._parts]
            polled: list[Polled] = self._ask(asked, "to say how its processes are", self._setup.hung_s)
            for part, each in zip(self._parts, polled, strict=True):
                self._write(part.node, each.output)
                part.kept = each.end
            self._measure()
            found = [each.ended for each in polled]
            is_done = all(each is not None and each.exit_status == 0 for each in found)
            # A command that is started once has no part on its other nodes that would notice their death.
            if not is_done and any(self._setup.nodes.has_died(seat.ray_node) for seat in self._seats):
                return None
            failed = next((each for each in found if each is not None and each.exit_status), None)
            if None not in found:
                return first or failed or Ended(exit_status=0)
            if failed is not None and first is None:
                first = failed
                self.end(SPREAD_GRACE_S)
            if self._kill_s != told_s:
                told_s = self._kill_s
                grace_s = max(0.0, told_s - time.monotonic()) if told_s is not None else 0.0
                ends = [(part, part.actor.end.remote(grace_s)) for part in self._parts]
                self._ask(ends, "to end its processes", self._setup.hung_s)
            time.sleep(POLL_S)

    def _measure(self) -> None:
        """Fetches what the parts of a profiled job have recorded."""
        if (recording := self._setup.recording) is None:
            return
        asked_s, nodes = time.monotonic(), [part.node for part in self._parts]
        asked = [(part, part.actor.measured.remote(recording.kept(part.node))) for part in self._parts]
        found = self._ask(asked, "for what it has recorded", self._setup.hung_s)
        recording.take(nodes, found, asked_s, time.monotonic())

    def _ask(self, questions: Sequence[tuple[PartRef, Any]], what: str, limit_s: float) -> list[Any]:
        """Raises: RayError of the first part that has ended, Hung, LetGo."""
        said = self._said
        answers = ask(questions, what, limit_s, look=self._look, say=partial(self._say, runs=False))
        if said is not None:
            self._say(said[0], runs=said[1])
        self._look()
        return answers

    def _look(self) -> None:
        self._check_held()
        if self._kill_s is not None and time.monotonic() > self._kill_s + KILL_ASK_S:
            raise Hung(f"the processes of {self._spec.name} have not ended in time")

    def _lost(self) -> str | None:
        """Names the dead nodes; None if all live, and the job itself has failed."""
        addresses = {seat.ray_node: f" on {seat.node.address}" for seat in self._seats}
        known = dict.fromkeys([*addresses, *(part.ray_node for part in self._parts)])
        dead = [each for each in known if not self._setup.nodes.is_alive(each)]
        names = [f"Ray node {each[:8]}{addresses.get(each, '')}" for each in dead]
        return f"{', '.join(names)} died" if names else None

    def _write(self, node: str, output: bytes) -> None:
        """Appends lines to the job's log; those of several nodes begin with the node's name."""
        if not output:
            return
        prefix = f"{node}: ".encode() if len(self._parts) > 1 and node else b""
        try:
            with self._log.open("ab") as log:
                log.write(b"".join(prefix + line + b"\n" for line in output.removesuffix(b"\n").split(b"\n")))
        except OSError as error:  # such as a full disk: the job goes on, and its end must be told
            logger.warning("output lost job=%s reason=%s", self._spec.name, error)


def part_name(order: Start, spot: Spot) -> str:
    """Names a part for the next scheduler: the job, the attempt, the group, the node and its Ray node."""
    return f"part/{order.job}/{order.attempt}/{order.group}/{spot.node}/{spot.ray_node}"


def nodes_of(order: Start) -> tuple[str, ...]:
    """Names the nodes of the job: its rollout nodes, then its group's training nodes."""
    rollout = [f"rollout-{node}" for node in order.rollout_nodes]
    return (*rollout, *(f"train-{node}" for node in range(order.num_train_nodes)))


def _spare(spec: RunSpec, order: Start) -> tuple[str, ...]:
    """The rollout nodes that the job may hand back. Nodes of a strict placement stay together."""
    nodes = nodes_of(order)[: len(order.rollout_nodes)]
    return () if spec.placement.is_strict else nodes[spec.fewest_nodes :]


def _describe(seat: Seat) -> str:
    devices = f", GPU {', '.join(seat.node.devices)}" if seat.node.devices else ""
    return f"{seat.node.name} on {seat.node.address} (Ray node {seat.ray_node[:8]}{devices})"
