"""The actors of one attempt: asked with a bound, and ended for certain.

A part has ended when its actor says so, or what it has left was killed on its host, or Ray has declared its
node dead, whose devices then go to nobody.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rose.jobs.on_ray.actors import sweep
from rose.jobs.on_ray.cluster import RayNodes, on_node

logger = logging.getLogger(__name__)

POLL_S = 0.2
ASK_S = 2.0
"""The time after which a question that has no answer looks whether the job is to end."""
QUIET_S = 10.0
"""An answer that takes longer is told to people."""
KILL_ASK_S = 20.0
LOOK_S = 1.0


class Hung(Exception):
    """Parts have not answered in time."""


@dataclass(slots=True, kw_only=True)
class PartRef:
    """One part of an attempt."""

    node: str
    """Its node in the group, such as rollout-0."""
    ray_node: str
    actor: Any
    identity: str = ""
    """Of the actor on its host; empty until it has started something."""
    is_hung: bool = False
    """It did not answer in time, and is not waited for again."""

    @property
    def place(self) -> str:
        return f"{self.node} on Ray node {self.ray_node[:8]}"


def ask(
    questions: Sequence[tuple[PartRef, Any]],
    what: str,
    limit_s: float,
    *,
    look: Callable[[], None],
    say: Callable[[str], None],
) -> list[Any]:
    """Waits for the answers of all parts.

    what: is waited for, such as "to start". look: called from time to time; may raise. say: hears whom a
    late answer is waited for. Raises: RayError of the first part that has ended; Hung after ``limit_s``, in
    which time does not count while this process stands still: the answers may have come meanwhile.
    """
    waited_s, told_s = 0.0, min(QUIET_S, limit_s / 4)
    left = {answer: part for part, answer in questions}
    while left:
        began_s = time.monotonic()
        until_s = min(ASK_S, max(0.0, limit_s - waited_s))
        for done in ray.wait(list(left), num_returns=len(left), timeout=until_s)[0]:
            ray.get(done)
            del left[done]
        if not left:
            break
        look()
        waited_s += min(time.monotonic() - began_s, until_s)
        names = ", ".join(part.place for part in left.values())
        if waited_s >= limit_s:
            for part in left.values():
                part.is_hung = True
            raise Hung(f"{names}: no answer for {limit_s:.0f} s when asked {what}")
        if waited_s >= told_s:
            say(f"waits for {names} {what}, for {waited_s:.0f} s; the attempt ends after {limit_s:.0f} s")
            told_s = waited_s + QUIET_S
    return ray.get([answer for _, answer in questions])  # type: ignore[no-any-return]


def confirm_end(part: PartRef, nodes: RayNodes, root: str, job: str) -> None:
    """Returns when nothing of the part runs any more, or its node is dead."""
    while nodes.is_alive(part.ray_node):
        try:
            limit_s = ASK_S if part.is_hung else KILL_ASK_S
            if _answer(part.actor.kill.remote(), part, nodes, limit_s) is not None:
                ray.kill(part.actor)
                return
            logger.warning("no answer job=%s node=%s", job, part.place)
            part.is_hung = True
            ray.kill(part.actor)
            is_killable = bool(part.identity)
        except ray.exceptions.RayError:
            is_killable = True  # the actor has ended
        if is_killable and _sweep(part, nodes, root, job):
            return
        time.sleep(POLL_S)


def _sweep(part: PartRef, nodes: RayNodes, root: str, job: str) -> bool:
    """Ends and frees what a dead actor has left on its host. Returns whether all of it is gone."""
    work = ray.remote(sweep).options(num_cpus=0, scheduling_strategy=on_node(part.ray_node))
    dead = (part.identity,) if part.identity else ()
    try:
        left = _answer(work.remote(dead, root, job), part, nodes, KILL_ASK_S)
    except ray.exceptions.RayError as error:
        logger.info("not swept node=%s reason=%s", part.place, error)
        return False
    if left:
        logger.warning("still there after SIGKILL job=%s node=%s pids=%s", job, part.place, left)
    return left == []


def _answer(asked: Any, part: PartRef, nodes: RayNodes, limit_s: float) -> list[int] | None:
    """Returns the pids in the answer; None if it is late, or the node has died. Raises: RayError."""
    until_s = time.monotonic() + limit_s
    while (left_s := until_s - time.monotonic()) > 0:
        if ray.wait([asked], timeout=min(left_s, LOOK_S))[0]:
            answer: list[int] | None = ray.get(asked)
            return answer if answer is not None else []
        if not nodes.is_alive(part.ray_node):
            return None
    return None
