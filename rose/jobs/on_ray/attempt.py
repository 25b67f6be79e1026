"""One attempt of a job on the nodes of its group: placed, started, watched and ended, by a thread of its own.

An attempt has ended when all its parts are known to have ended: their actors say so, or what an actor has
left was killed on its host, or Ray has declared the node dead, whose devices then go to nobody.
"""

import logging
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from rose.errors import ConfigError
from rose.jobs.on_ray.actors import Part, Polled, Prepared, sweep
from rose.jobs.on_ray.cluster import RayNodes, on_node
from rose.jobs.on_ray.groups import GroupNodes, Seat
from rose.jobs.ranks import START_FAILED_STATUS, Attempt, Ended, HostPart
from rose.scheduler.runtime.channel.messages import Start
from rose.scheduler.runtime.job.spec import Launch, RunSpec

logger = logging.getLogger(__name__)

POLL_S = 0.2
ASK_S = 2.0
"""The time after which a question that has no answer looks whether the job is to end."""
KILL_ASK_S = 20.0
SPREAD_GRACE_S = 10.0
"""Between SIGTERM and SIGKILL for the other processes, when one has failed."""


class RayAttempt:
    """One attempt. Its thread owns everything but the wish to end it."""

    def __init__(
        self,
        spec: RunSpec,
        order: Start,
        *,
        nodes: RayNodes,
        groups: GroupNodes,
        channel: str,
        root: str,
        code: Callable[[], bytes | None],
        log: Path,
        say: Callable[[list[str]], None],
        before: Attempt | None,
    ) -> None:
        """say: hears where the processes are. before: an earlier attempt, whose end is awaited first.

        code: packs what is sent to each host, in the attempt's thread. Raises: ConfigError.
        """
        self._spec, self._order = spec, order
        self._nodes, self._groups = nodes, groups
        self._channel, self._root, self._code = channel, root, code
        self._log, self._say, self._before = log, say, before
        self._seats: list[Seat] = []
        self._parts: list[tuple[Seat, Any, str]] = []
        """Each part's node, its actor, and the actor's identity on its host."""
        self._partial: dict[str, bytes] = {}
        """The last line of each node's output, while it has no end."""
        self._kill_s: float | None = None
        self._leaves = False
        self._ended: Ended | None = None
        self._thread = threading.Thread(target=self._run, name=f"rose-job-{spec.name}", daemon=True)
        self._thread.start()

    def end(self, grace_s: float) -> None:
        kill_s = time.monotonic() + grace_s
        self._kill_s = min(kill_s, self._kill_s) if self._kill_s is not None else kill_s

    def leave_group(self) -> None:
        """Gives back the nodes of the job's group when the attempt has ended."""
        self._leaves = True
        if self._ended is not None:
            self._groups.leave(self._spec.name)

    def ended(self) -> Ended | None:
        return self._ended if not self._thread.is_alive() else None

    def _run(self) -> None:
        ended, is_broken = Ended(exit_status=-signal.SIGTERM), False
        try:
            while self._before is not None and self._before.ended() is None:
                time.sleep(POLL_S)
            nodes = nodes_of(self._order)
            self._say([f"waits for Ray to place {', '.join(nodes)} of {self._order.group}"])
            seats = self._groups.seat(
                self._spec.name, self._order.group, nodes, self._spec.placement, self._is_wanted
            )
            if seats is not None:
                self._seats = seats
                self._start(seats)
                ended = self._watch()
        except (
            ray.exceptions.RuntimeEnvSetupError,
            ray.exceptions.RayTaskError,
            ConfigError,
            ValueError,
            TypeError,
        ) as error:
            ended = failure(self._spec.command, error)
            self._write("", f"{ended.cannot_start or _cause(error)}\n".encode())
        except ray.exceptions.RayError as error:
            logger.info("lost job=%s reason=%s", self._spec.name, _cause(error))
            is_broken = True
        except Exception:
            logger.exception("attempt failed job=%s", self._spec.name)
            ended = Ended(exit_status=-signal.SIGKILL)
        finally:
            for seat, actor, identity in self._parts:
                self._confirm_end(seat, actor, identity)
            if is_broken:  # Ray may hold a node for alive until then
                ended = Ended(exit_status=-signal.SIGKILL, lost=self._lost())
            self._flush()
            self._groups.vacate(self._spec.name)
            self._ended = ended
            if self._leaves:
                self._groups.leave(self._spec.name)

    def _is_wanted(self) -> bool:
        return self._kill_s is None

    # Start --------------------------------------------------------------------------------------------------

    def _start(self, seats: Sequence[Seat]) -> None:
        """Starts the processes on all nodes, the first node's as the others' master."""
        packed = self._code()
        environment = {
            name: value
            for name, value in self._spec.runtime_env.items()
            if name != "working_dir" or packed is None
        }
        used = seats[:1] if self._spec.launch is Launch.ONCE else seats
        actor = ray.remote(Part)
        for seat in used:
            name = f"{self._spec.name}/{self._order.attempt}/{seat.node.name}/{uuid.uuid4().hex[:8]}"
            options = {"scheduling_strategy": seat.strategy, "runtime_env": environment}
            part = actor.options(name=name, num_cpus=0, max_concurrency=2, **options).remote(
                self._spec.name, seat.node.name, self._root
            )
            self._parts.append((seat, part, ""))
        code = ray.put(packed) if packed is not None else None
        prepared: list[Prepared] = self._ask([part.prepare.remote(code) for _, part, _ in self._parts])
        self._parts = [
            (seat, part, each.identity) for (seat, part, _), each in zip(self._parts, prepared, strict=True)
        ]
        self._say([_describe(seat) for seat in seats])
        nodes = tuple(seat.node for seat in seats)
        starts = []
        for index, (_, part, _) in enumerate(self._parts):
            its_part = HostPart(nodes=nodes, index=index, master_port=prepared[0].free_port)
            starts.append(part.start.remote(self._order, its_part, self._channel))
        self._ask(starts)

    # Watch --------------------------------------------------------------------------------------------------

    def _watch(self) -> Ended:
        """Returns how the processes have ended. Once one has failed, or they were told to, all end."""
        first: Ended | None = None
        """The first one that failed: the others fail because of it."""
        told_s: float | None = None
        while True:
            polled: list[Polled] = self._ask([part.poll.remote() for _, part, _ in self._parts])
            for (seat, _, _), each in zip(self._parts, polled, strict=True):
                self._write(seat.node.name, each.output)
            found = [each.ended for each in polled]
            failed = next((each for each in found if each is not None and each.exit_status), None)
            if None not in found:
                return first or failed or Ended(exit_status=0)
            if failed is not None and first is None:
                first = failed
                self.end(SPREAD_GRACE_S)
            if self._kill_s != told_s:
                told_s = self._kill_s
                grace_s = max(0.0, told_s - time.monotonic()) if told_s is not None else 0.0
                self._ask([part.end.remote(grace_s) for _, part, _ in self._parts])
            time.sleep(POLL_S)

    def _ask(self, asked: Sequence[Any]) -> list[Any]:
        """Waits for the answers of all parts. Raises: RayError of the first part that has ended."""
        left = list(asked)
        while left:
            done, left = ray.wait(left, num_returns=len(left), timeout=ASK_S)
            for each in done:
                ray.get(each)
            if self._kill_s is not None and time.monotonic() > self._kill_s + KILL_ASK_S:
                break
        found: list[Any] = ray.get(list(asked), timeout=ASK_S)
        return found

    def _confirm_end(self, seat: Seat, actor: Any, identity: str) -> None:
        """Returns when nothing of the part runs any more, or its node is dead."""
        while self._nodes.is_alive(seat.ray_node):
            try:
                ray.get(actor.kill.remote(), timeout=KILL_ASK_S)
                ray.kill(actor)
                return
            except ray.exceptions.GetTimeoutError:
                logger.warning("no answer job=%s node=%s", self._spec.name, seat.ray_node)
                if not identity:  # it has started nothing, and Ray may prepare its environment for long
                    ray.kill(actor)
            except ray.exceptions.RayError:
                if self._sweep(seat, identity):
                    return
            time.sleep(POLL_S)

    def _sweep(self, seat: Seat, identity: str) -> bool:
        """Ends and frees what a dead actor has left on its host. Returns whether all of it is gone."""
        work = ray.remote(sweep).options(num_cpus=0, scheduling_strategy=on_node(seat.ray_node))
        dead = (identity,) if identity else ()
        try:
            left: list[int] = ray.get(work.remote(dead, self._root, self._spec.name), timeout=KILL_ASK_S)
        except ray.exceptions.RayError as error:
            logger.info("not swept node=%s reason=%s", seat.ray_node, _cause(error))
            return False
        return not left

    def _lost(self) -> str | None:
        """Names the dead nodes; None if all live, and the job itself has failed."""
        dead = [seat for seat in self._seats if not self._nodes.is_alive(seat.ray_node)]
        names = dict.fromkeys(f"Ray node {seat.ray_node[:8]} on {seat.node.address}" for seat in dead)
        return f"{', '.join(names)} died" if names else None

    # Output -------------------------------------------------------------------------------------------------

    def _write(self, node: str, output: bytes) -> None:
        """Appends whole lines to the job's log; those of several nodes begin with the node's name."""
        if not output:
            return
        whole, end, rest = (self._partial.get(node, b"") + output).rpartition(b"\n")
        self._partial[node] = rest
        if end:
            prefix = f"{node}: ".encode() if len(self._parts) > 1 and node else b""
            try:
                with self._log.open("ab") as log:
                    log.write(b"".join(prefix + line + b"\n" for line in whole.split(b"\n")))
            except OSError as error:  # such as a full disk: the job goes on, and its end must be told
                logger.warning("output lost job=%s reason=%s", self._spec.name, error)

    def _flush(self) -> None:
        for node, rest in list(self._partial.items()):
            if rest:
                self._write(node, b"\n")


def failure(command: Sequence[str], error: Exception) -> Ended:
    """How an attempt ends because of this error: for ever, or as a crash that may not come again."""
    is_of_part = isinstance(error, ray.exceptions.RayTaskError)
    if is_of_part and not isinstance(getattr(error, "cause", None), ConfigError):
        return Ended(exit_status=-signal.SIGKILL)
    reason = f"can't start {list(command)}: {_cause(error)}"
    return Ended(exit_status=START_FAILED_STATUS, cannot_start=reason)


def nodes_of(order: Start) -> tuple[str, ...]:
    """Names the nodes of the job: its rollout nodes, then its group's training nodes."""
    rollout = [f"rollout-{node}" for node in order.rollout_nodes]
    return (*rollout, *(f"train-{node}" for node in range(order.num_train_nodes)))


def _describe(seat: Seat) -> str:
    devices = f", GPU {', '.join(seat.node.devices)}" if seat.node.devices else ""
    return f"{seat.node.name} on {seat.node.address} (Ray node {seat.ray_node[:8]}{devices})"


def _cause(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    return str(cause if cause is not None else error).strip().splitlines()[0]
