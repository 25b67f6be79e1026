"""The order of a group in which some members may run more often than others: how often, and when.

Gives members periods that are whole multiples of a common one, and packs their phases into a timetable. It is
enough to keep two jobs apart over the greatest common divisor of their periods, after which they meet again.
Returns the order in which the timetable trains. The timetable proves that the order can be certified
(certificate.py): no two phases meet on a node, every job's training follows its rollout, and no period
exceeds the job's limit. Not finding an order proves nothing.

WEAVE holds that repeating a job's phases in a cycle never pays. With several rollout nodes it does: a short
job need not wait for a long one's cycle.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import truediv

from rose.scheduler.group.cycle import EPSILON, depends_on_order, round_robin_s
from rose.scheduler.group.model import Group

MAX_RATIO = 8
"""Longest period over the common one: beyond it there was nothing to gain on Table 6's jobs."""
ROOM_EPSILON = 1e-6
"""More than the slack that packed phases may have, so that none is refused that could be packed."""
MAX_ITERATIONS = 40
"""Iterations in a pass: five jobs, one of them in every eighth iteration of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """When a member's phases start, again and again after `period_s`."""

    period_s: float
    rollout_at_s: float
    train_at_s: float


@dataclass(frozen=True, slots=True)
class _Task:
    """A member on its group's nodes."""

    name: str
    rollout_s: float
    between_s: float
    """From the rollout's end to training."""
    train_s: float
    solo_s: float
    limit_s: float
    nodes: frozenset[int]


_Busy = tuple[float, float, int]
"""A phase already in the timetable, on one resource: its start, its length, and its period in common ones."""
_Met = tuple[float, float, int, float]
"""Such a phase beside a job: its start, its length, and when both meet again, in common periods and in s."""


def ordered(group: Group, limits_s: Mapping[str, float], *, multi_rate: bool) -> Group | None:
    """Returns the group in an order that keeps the limits of all members; None: none found.

    Round-robin as the members stand; with the last member at another place, where that matters; then, if
    that may be, a multi-rate order. Those who were in the group before the last member follow each other as
    before in round-robin.
    """
    found = _shortest_round_robin(replace(group, iterations=()))
    if round_robin_s(found) <= min(limits_s.values()) * (1 + EPSILON):
        return found
    return _multi_rate(found, limits_s) if multi_rate else None


def _shortest_round_robin(group: Group) -> Group:
    if not depends_on_order(group) or round_robin_s(group) <= group.round_robin_s * (1 + EPSILON):
        return group
    *others, last = group.members
    orders = ((*others[:place], last, *others[place:]) for place in range(1, len(others)))
    return min((group, *(replace(group, members=each) for each in orders)), key=round_robin_s)


def _multi_rate(group: Group, limits_s: Mapping[str, float]) -> Group | None:
    tasks = [
        _Task(
            member.job.name,
            member.job.rollout_s,
            member.job.after_rollout_s,
            member.job.train_s_on(group.num_train_nodes),
            group.solo_s(member.job),
            limits_s[member.job.name] * (1 + EPSILON),
            frozenset(member.rollout_nodes),
        )
        for member in group.members
    ]
    if not _could_fit(tasks):
        return None
    meetings, loads = _meetings(tasks), _loads(tasks)
    for nums, shortest_s, longest_s in _multiples(tasks, loads):
        if not _could_meet(meetings, nums, longest_s, EPSILON):
            continue
        for common_s in dict.fromkeys((shortest_s, longest_s)):
            is_short = common_s < longest_s
            if is_short and not _has_room(meetings, loads, nums, common_s):
                continue
            slots = _packed(tasks, nums, common_s)
            pass_s = math.lcm(*nums) * common_s
            if slots is not None and (iterations := _iterations(tasks, slots, pass_s)) is not None:
                return replace(group, iterations=iterations, pass_s=pass_s)
    return None


def _iterations(tasks: Sequence[_Task], slots: Sequence[_Slot], pass_s: float) -> tuple[str, ...] | None:
    """The iterations in the order of their training; None if some node's rollouts follow another order."""
    found = sorted(
        (slot.train_at_s + again * slot.period_s, number)
        for number, slot in enumerate(slots)
        for again in range(round(pass_s / slot.period_s))
    )
    free_s: dict[int, float] = {}
    first_s: dict[int, float] = {}
    for train_at_s, number in found:
        start_s = train_at_s - (slots[number].train_at_s - slots[number].rollout_at_s)
        for node in tasks[number].nodes:
            if start_s < free_s.get(node, start_s) - EPSILON * pass_s:
                return None
            free_s[node] = start_s + tasks[number].rollout_s
            first_s.setdefault(node, start_s)
    if any(free_s[node] > start_s + pass_s * (1 + EPSILON) for node, start_s in first_s.items()):
        return None
    return tuple(tasks[number].name for _, number in found)


def _could_fit(tasks: Sequence[_Task]) -> bool:
    """Necessary for any periods: room for each job alone, all training, any two trainings in a row."""
    if any(task.solo_s > task.limit_s for task in tasks):
        return False
    if sum(task.train_s / task.limit_s for task in tasks) > 1 + EPSILON:
        return False
    return all(
        one.train_s + other.train_s <= min(one.limit_s, other.limit_s)
        for one, other in itertools.combinations(tasks, 2)
    )


def _meetings(tasks: Sequence[_Task]) -> list[tuple[int, int, float]]:
    """Every two tasks, and the least time between two of their meetings: that of both phases in a row."""
    return [
        (
            k,
            other,
            max(
                tasks[k].train_s + tasks[other].train_s,
                tasks[k].rollout_s + tasks[other].rollout_s if tasks[k].nodes & tasks[other].nodes else 0.0,
            ),
        )
        for k, other in itertools.combinations(range(len(tasks)), 2)
    ]


def _could_meet(
    meetings: Sequence[tuple[int, int, float]], nums: Sequence[int], common_s: float, rounding: float
) -> bool:
    """Necessary as well: two jobs that meet have room for both phases between two meetings."""
    most_s = common_s * (1 + rounding)
    return all(least_s <= math.gcd(nums[k], nums[other]) * most_s for k, other, least_s in meetings)


def _has_room(
    meetings: Sequence[tuple[int, int, float]],
    loads: Sequence[Sequence[float]],
    nums: Sequence[int],
    common_s: float,
) -> bool:
    """Whether packing may succeed: it allows less than `ROOM_EPSILON` for rounding."""
    most_s = common_s * (1 + ROOM_EPSILON)
    return all(sum(map(truediv, load_s, nums)) <= most_s for load_s in loads) and _could_meet(
        meetings, nums, common_s, ROOM_EPSILON
    )


def _multiples(
    tasks: Sequence[_Task], loads: Sequence[Sequence[float]]
) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Periods as multiples of a common one, and that one's bounds; long common periods first.

    Leaves out those in which a resource has no time for all phases that hold it.
    """
    solos_s, limits_s = [task.solo_s for task in tasks], [task.limit_s for task in tasks]
    fastest_s = min(limits_s)
    commons = {
        limit_s / num for limit_s in limits_s for num in range(1, MAX_RATIO + 1) if limit_s / num <= fastest_s
    }
    windows = list(zip(solos_s, limits_s, strict=True))
    seen: set[tuple[int, ...]] = set()
    for common_s in sorted(commons, reverse=True):
        for nums in _roundings(windows, common_s):
            if nums in seen:
                continue
            seen.add(nums)
            longest_s = min(map(truediv, limits_s, nums))
            most_s = longest_s * (1 + ROOM_EPSILON)
            for load_s in loads:
                if sum(map(truediv, load_s, nums)) > most_s:
                    break
            else:
                whole = math.lcm(*nums)
                if sum([whole // num for num in nums]) <= MAX_ITERATIONS:
                    yield nums, min(max(map(truediv, solos_s, nums)), longest_s), longest_s


def _roundings(windows: Sequence[tuple[float, float]], common_s: float) -> tuple[tuple[int, ...], ...]:
    """The multiples of a common period: the least, powers of two, the most. None where a task has none.

    windows: the shortest and the longest period of each task.
    """
    low, powers, high = [], [], []
    for solo_s, limit_s in windows:
        least, most = math.ceil(solo_s / common_s - EPSILON) or 1, int(limit_s / common_s + EPSILON)
        if least > most or least > MAX_RATIO:
            return ()
        low.append(least)
        high.append(most)
        power = 1 << (most.bit_length() - 1)
        powers.append(power if power > least else least)
    return tuple(low), tuple(powers), tuple(high)


def _loads(tasks: Sequence[_Task]) -> list[list[float]]:
    """How long each task holds each resource that several hold: the training nodes, and rollout nodes."""
    nodes = [node for task in tasks for node in task.nodes]
    shared = sorted({node for node in nodes if nodes.count(node) > 1})
    return [
        [task.train_s for task in tasks],
        *([task.rollout_s if node in task.nodes else 0.0 for task in tasks] for node in shared),
    ]


def _packed(tasks: Sequence[_Task], nums: Sequence[int], common_s: float) -> tuple[_Slot, ...] | None:
    """Every job at the first free time, the most frequent and then the longest first."""
    training: list[_Busy] = []
    rollouts: list[tuple[frozenset[int], _Busy]] = []
    slots: dict[int, _Slot] = {}
    for k in sorted(range(len(tasks)), key=lambda k: (nums[k], -tasks[k].train_s)):
        task, num = tasks[k], nums[k]
        trainings = _met(training, num, common_s)
        others = _met([busy for nodes, busy in rollouts if nodes & task.nodes], num, common_s)
        period_s = num * common_s
        for train_at_s in _free_starts(trainings, task.train_s, num, common_s):
            at_s = _rollout_start(others, task, num, common_s, train_at_s)
            if at_s is not None:
                slots[k] = _Slot(period_s=period_s, rollout_at_s=at_s, train_at_s=train_at_s)
                training.append((train_at_s, task.train_s, num))
                rollouts.append((task.nodes, (at_s, task.rollout_s, num)))
                break
        else:
            return None
    return tuple(slots[k] for k in range(len(tasks)))


def _met(busy: Sequence[_Busy], num: int, common_s: float) -> list[_Met]:
    """The phases as a job with this period meets them."""
    found = []
    for start_s, length_s, other in busy:
        shared = math.gcd(num, other)
        found.append((start_s, length_s, shared, shared * common_s))
    return found


def _free_starts(busy: Sequence[_Met], length_s: float, num: int, common_s: float) -> Iterator[float]:
    """Times within the period at which the resource is free: right after another phase, or at 0."""
    if not busy:
        yield 0.0
        return
    for one_s, one_length_s, shared, _ in busy:
        for again in range(num // shared):
            start_s = (one_s + one_length_s + again * shared * common_s) % (num * common_s)
            if _is_free(busy, start_s, length_s, common_s):
                yield start_s


def _rollout_start(
    busy: Sequence[_Met], task: _Task, num: int, common_s: float, train_at_s: float
) -> float | None:
    """The latest free start that lets the rollout end before training, and after the training before."""
    latest_s = train_at_s - task.between_s - task.rollout_s
    if _is_free(busy, latest_s, task.rollout_s, common_s):
        return latest_s
    earliest_s = latest_s - (num * common_s - task.solo_s)
    for one_s, one_length_s, _, shared_s in busy:
        # Right before it, or, going backwards in the window, right after its end.
        for at_s in (one_s - task.rollout_s, one_s + one_length_s):
            start_s = latest_s - (latest_s - at_s) % shared_s
            while start_s >= earliest_s - EPSILON * common_s:
                if _is_free(busy, start_s, task.rollout_s, common_s):
                    return start_s
                start_s -= shared_s
    return None


def _is_free(busy: Sequence[_Met], start_s: float, length_s: float, common_s: float) -> bool:
    slack_s = 1e-9 * common_s
    for one_s, one_length_s, _, shared_s in busy:
        after_s = (start_s - one_s) % shared_s
        # A start that rounds to just before the other's is one just after it, a whole period later.
        if shared_s - after_s < slack_s:
            after_s = 0.0
        if after_s < one_length_s - slack_s or after_s + length_s > shared_s + slack_s:
            return False
    return True
