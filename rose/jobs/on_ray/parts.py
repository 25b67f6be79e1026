"""The actors of one attempt: questions to them have a time limit, and their end is made certain.

A part has ended when its actor says so, or what it has left was killed on its host, or Ray has declared its
node dead, whose devices then go to nobody.
"""

import logging
import math
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
    """Names the actor on its host; empty until it has started something."""
    is_hung: bool = False
    """It did not answer in time, and is not waited for again."""
    kept: int | None = None
    """The end of its output that is in the job's log; None: it has not been polled by this scheduler."""

    @property
    def place(self) -> str:
        return f"{self.node} on Ray node {self.ray_node[:8]}"


def ask(
    questions: Sequence[tuple[PartRef, Any]],
    what: str,
    limit_s: float,
    *,
    look: Callable[[], None],
    say: Callable[[list[str]], None],
) -> list[Any]:
    """Waits for the answers of all parts.

    what: the purpose of the question, such as "to start". look: called from time to time; may raise. say:
    hears which parts are late. Raises: RayError of the first part that has ended; Hung after ``limit_s``.
    """
    waited_s, told_s = 0.0, min(QUIET_S, limit_s / 4)
    left = {answer: part for part, answer in questions}
    while left:
        done, waited_s = wait_some(list(left), waited_s, limit_s)
        for each in done:
            ray.get(each)
            del left[each]
        if not left:
            break
        look()
        names = ", ".join(part.place for part in left.values())
        if waited_s >= limit_s:
            for part in left.values():
                part.is_hung = True
            raise Hung(f"{names}: no answer for {limit_s:.0f} s when asked {what}")
        if waited_s >= told_s:
            most = f"; the attempt ends after {limit_s:.0f} s" if math.isfinite(limit_s) else ""
            say([f"waits for {names} {what}, for {waited_s:.0f} s{most}"])
            told_s = waited_s + QUIET_S
    return ray.get([answer for _, answer in questions])  # type: ignore[no-any-return]


def wait_some(asked: list[Any], waited_s: float, limit_s: float) -> tuple[list[Any], float]:
    """Waits `ASK_S` for answers, as long as ``waited_s`` is below ``limit_s``.

    Returns those that are there, and how long all have been waited for. Time in which this process stands
    still does not count: the answers may have come meanwhile.
    """
    began_s, until_s = time.monotonic(), min(ASK_S, max(0.0, limit_s - waited_s))
    done = ray.wait(asked, num_returns=len(asked), timeout=until_s)[0]
    return done, waited_s + min(time.monotonic() - began_s, until_s)


def confirm_end(
    part: PartRef,
    nodes: RayNodes,
    root: str,
    job: str,
    *,
    look: Callable[[], None],
    say: Callable[[list[str]], None],
) -> None:
    """Returns when nothing of the part runs any more, or its node is dead. Its devices go to nobody before.

    look: called from time to time; may raise. say: hears what keeps a part that takes long.
    """
    began_s = time.monotonic()
    while nodes.is_alive(part.ray_node):
        look()
        why = "its actor does not answer"
        try:
            limit_s = ASK_S if part.is_hung else KILL_ASK_S
            if _answer(part.actor.kill.remote(), part, nodes, limit_s) is not None:
                ray.kill(part.actor)
                return
            logger.warning("no answer job=%s node=%s", job, part.place)
            is_dead = False
        except ray.exceptions.ActorUnavailableError:
            is_dead = False  # Ray does not know
        except ray.exceptions.RayError:
            is_dead = True
        if not is_dead:
            part.is_hung = True
            ray.kill(part.actor)
        # A hung actor that has not told its identity may still do what it was asked, until Ray calls it dead.
        if is_dead or part.identity:
            left = _sweep(part, nodes, root, job)
            if left == []:
                return
            why = f"pids {left} run on after SIGKILL" if left else "its host does not answer"
        if time.monotonic() - began_s >= QUIET_S:
            say([f"waits for the end of {part.place}, whose devices go to nobody before: {why}"])
        time.sleep(POLL_S)


def _sweep(part: PartRef, nodes: RayNodes, root: str, job: str) -> list[int] | None:
    """Ends and frees what a dead actor has left on its host. Returns the pids that stay; None: unknown."""
    work = ray.remote(sweep).options(num_cpus=0, scheduling_strategy=on_node(part.ray_node))
    dead = (part.identity,) if part.identity else ()
    try:
        left = _answer(work.remote(dead, root, job), part, nodes, KILL_ASK_S)
    except ray.exceptions.RayError as error:
        logger.info("not swept node=%s reason=%s", part.place, error)
        return None
    if left:
        logger.warning("still there after SIGKILL job=%s node=%s pids=%s", job, part.place, left)
    return left


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
