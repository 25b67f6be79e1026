"""What an earlier scheduler has left on the Ray cluster: attempts that go on, and remains that are ended.

The scheduler's namespace has its keepers and parts alone, and their names say what they are. An attempt goes
on if all its parts answer and have started their processes. All else is ended: keepers and placement groups
that no attempt uses, and attempts of which a part is missing.
"""

import logging
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import ray

from rose.jobs.on_ray.actors import Begun
from rose.jobs.on_ray.cluster import RayNodes
from rose.jobs.on_ray.groups import GroupNodes, Seat
from rose.jobs.on_ray.parts import PartRef, confirm_end
from rose.jobs.ranks import Ended
from rose.scheduler.runtime.channel.messages import Start
from rose.scheduler.runtime.job.spec import Launch

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""A part that takes longer to answer is ended: it has hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """An attempt that goes on."""

    order: Start
    seats: Sequence[Seat]
    parts: Sequence[PartRef]


class Remains:
    """The parts of a job's attempt that can't go on, until they have ended. One thread ends them."""

    def __init__(self, job: str, parts: Sequence[PartRef], nodes: RayNodes, root: str) -> None:
        self._ended: Ended | None = None
        arguments = (job, parts, nodes, root)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def _run(self, job: str, parts: Sequence[PartRef], nodes: RayNodes, root: str) -> None:
        for part in parts:
            confirm_end(part, nodes, root, job)
        self._ended = Ended(exit_status=-signal.SIGKILL, lost="a part of it was lost with its scheduler")

    def end(self, grace_s: float) -> None:
        """It ends anyhow."""

    def ended(self) -> Ended | None:
        return self._ended if not self._thread.is_alive() else None


@dataclass(slots=True, kw_only=True)
class _Found:
    attempts: set[int] = field(default_factory=set)
    parts: list[PartRef] = field(default_factory=list)


def find(groups: GroupNodes) -> tuple[list[Survivor], dict[str, tuple[int, list[PartRef]]]]:
    """Returns the attempts that go on, and by job the latest attempt and the parts that must be ended.

    Frees the nodes of groups that no attempt uses.
    """
    found: dict[str, _Found] = {}
    for name in ray.util.list_named_actors():
        kind, *fields = name.split("/")
        if kind == "part":
            job, attempt, node, ray_node = fields
            try:
                actor = ray.get_actor(name)
            except ValueError:  # it has ended since it was listed
                continue
            each = found.setdefault(job, _Found())
            each.attempts.add(int(attempt))
            each.parts.append(PartRef(node=node, ray_node=ray_node, actor=actor))
    begun = _ask([part for each in found.values() for part in each.parts])
    survivors, remains = [], {}
    for job, each in found.items():
        survivor = _survivor(each.parts, begun) if len(each.attempts) == 1 else None
        if survivor is not None:
            survivors.append(survivor)
        else:
            remains[job] = (max(each.attempts), each.parts)
    groups.adopt([(survivor.order.job, survivor.order.group, survivor.seats) for survivor in survivors])
    return survivors, remains


def _ask(parts: Iterable[PartRef]) -> dict[int, Begun]:
    """Returns what each part has started, by its id; without the parts that have started or say nothing."""
    asked = {part.actor.begun.remote(): part for part in parts}
    answers: dict[int, Begun] = {}
    deadline = time.monotonic() + ANSWER_S
    left = list(asked)
    while left and time.monotonic() < deadline:
        done, left = ray.wait(left, num_returns=len(left), timeout=max(0.0, deadline - time.monotonic()))
        for each in done:
            try:
                answer: Begun | None = ray.get(each)
            except ray.exceptions.RayError as error:
                logger.info("not adopted part=%s reason=%s", asked[each].place, str(error).splitlines()[0])
                continue
            if answer is not None:
                asked[each].identity = answer.identity
                answers[id(asked[each])] = answer
    return answers


def _survivor(parts: Sequence[PartRef], begun: dict[int, Begun]) -> Survivor | None:
    """Returns the attempt of these parts, in the order of its nodes, if it is whole."""
    answers = [begun[id(part)] for part in parts if id(part) in begun]
    if len(answers) < len(parts):
        return None
    first = answers[0]
    is_once = first.order.spec.get("launch", Launch.ONCE) == Launch.ONCE
    if len(parts) != (1 if is_once else len(first.part.nodes)):
        return None
    order = sorted(range(len(parts)), key=lambda index: answers[index].part.index)
    logger.info(
        "adopted job=%s attempt=%d pids=%s",
        first.order.job,
        first.order.attempt,
        {parts[index].node: answers[index].pids for index in order},
    )
    seats = [
        Seat(node=node, ray_node=home) for node, home in zip(first.part.nodes, first.ray_nodes, strict=True)
    ]
    return Survivor(order=first.order, seats=seats, parts=[parts[index] for index in order])
