"""What an earlier scheduler has left on the Ray cluster: attempts that go on, and remains that are ended.

The scheduler's namespace has its keepers and parts alone, and their names say what they are. An attempt goes
on if all its parts answer and have started their processes. All else is ended: attempts of which a part is
missing, then their nodes, and at once the keepers and placement groups that no attempt uses.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import ray

from rose.jobs.on_ray.actors import Begun
from rose.jobs.on_ray.groups import GroupNodes, Seat
from rose.jobs.on_ray.parts import PartRef, wait_some
from rose.scheduler.runtime.channel.messages import Start
from rose.scheduler.runtime.job.spec import Launch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """An attempt that goes on."""

    order: Start
    seats: Sequence[Seat]
    parts: Sequence[PartRef]


@dataclass(slots=True, kw_only=True)
class Broken:
    """An attempt that can't go on. Its nodes are its group's until all its parts have ended."""

    attempt: int = 0
    """The latest, if there are several: their parts are ended together."""
    group: str = ""
    parts: list[PartRef] = field(default_factory=list)
    is_single: bool = True


def find(groups: GroupNodes, hung_s: float) -> tuple[list[Survivor], dict[str, Broken]]:
    """Returns the attempts that go on, and by job those that must be ended.

    hung_s: a part that takes longer to answer has hung. Frees the nodes of groups that no attempt uses.
    """
    found = _listed()
    begun = _ask([part for each in found.values() for part in each.parts], hung_s)
    survivors, broken = [], {}
    users: list[tuple[str, str, dict[str, str]]] = []
    for job, each in found.items():
        survivor = _survivor(each.parts, begun) if each.is_single else None
        if survivor is not None:
            survivors.append(survivor)
            users.append((job, each.group, {seat.node.name: seat.ray_node for seat in survivor.seats}))
        else:
            broken[job] = each
            users.append((job, each.group, {part.node: part.ray_node for part in each.parts}))
    groups.adopt(users)
    return survivors, broken


def _listed() -> dict[str, Broken]:
    """Returns all jobs' parts."""
    found: dict[str, Broken] = {}
    for name in ray.util.list_named_actors():
        kind, *fields = name.split("/")
        if kind == "part":
            job, attempt, *group, node, ray_node = fields
            try:
                actor = ray.get_actor(name)
            except ValueError:  # it has ended since it was listed
                continue
            each = found.setdefault(job, Broken(attempt=int(attempt), group="/".join(group)))
            each.is_single &= each.attempt == int(attempt)
            if int(attempt) > each.attempt:
                each.attempt, each.group = int(attempt), "/".join(group)
            each.parts.append(PartRef(node=node, ray_node=ray_node, actor=actor))
    return found


def _ask(parts: Iterable[PartRef], hung_s: float) -> dict[int, Begun]:
    """Returns what parts have started, by their ids. Parts that are silent or have started nothing are left
    out."""
    left = {part.actor.begun.remote(): part for part in parts}
    answers: dict[int, Begun] = {}
    waited_s = 0.0
    while left and waited_s < hung_s:
        done, waited_s = wait_some(list(left), waited_s, hung_s)
        for each in done:
            part = left.pop(each)
            try:
                answer: Begun | None = ray.get(each)
            except ray.exceptions.RayError as error:
                logger.info("not adopted part=%s reason=%s", part.place, str(error).splitlines()[0])
                continue
            if answer is not None:
                part.identity = answer.identity
                answers[id(part)] = answer
    for part in left.values():
        logger.warning("not adopted part=%s: no answer for %.0f s", part.place, hung_s)
        part.is_hung = True
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
