"""Whose places a waiting job takes."""

from collections import Counter
from collections.abc import Callable, Collection

import pytest

from rose.scheduler.cluster.preemption import MAX_VICTIMS, Contender, Preemption


def running(name: str, priority: int = 0, team: str = "", dollars: float = 1.0) -> Contender:
    return Contender(name=name, priority=priority, team=team, dollars_per_hour=dollars)


def frees(num: int) -> Callable[[Collection[str]], bool]:
    """Any so many jobs make room."""
    return lambda victims: len(victims) >= num


@pytest.mark.parametrize(
    ("priority", "num", "victims"),
    [
        (0, 1, ()),
        (1, 1, ("young",)),
        (1, 2, ("young", "old")),
        (1, 3, ()),
        (6, 3, ("young", "old", "middle")),
        (6, 4, ()),
        (10, 4, ("young", "old", "middle", "high")),
    ],
)
def test_as_few_jobs_as_needed_leave_the_lowest_and_latest_first(
    priority: int, num: int, victims: tuple[str, ...]
) -> None:
    jobs = [running("high", 9), running("old"), running("middle", 5), running("young")]
    found = Preemption(by_priority=True).victims(running("new", priority), jobs, {}, frees(num))
    assert found == victims


def test_a_job_that_does_not_help_stays() -> None:
    jobs = [running("needed", 2), running("useless", 1), running("useless too", 0)]
    assert Preemption(by_priority=True).victims(
        running("new", 3), jobs, {}, lambda gone: "needed" in gone
    ) == ("needed",)


def test_two_of_a_low_priority_leave_before_one_of_a_higher() -> None:
    jobs = [running("middle", 5), running("a"), running("b")]

    def fits(gone: Collection[str]) -> bool:
        return "middle" in gone or {"a", "b"} <= set(gone)

    assert set(Preemption(by_priority=True).victims(running("new", 9), jobs, {}, fits)) == {"a", "b"}


def test_nobody_leaves_without_the_rule() -> None:
    jobs = [running("low", team="a")]
    assert Preemption().victims(running("new", 9), jobs, {}, frees(1)) == ()
    assert Preemption(by_priority=True).victims(running("new", team="b"), jobs, {"a": 9.0}, frees(1)) == ()


@pytest.mark.parametrize(
    ("used", "own_dollars", "share", "victims"),
    [
        ({"a": 4.0, "b": 0.0}, 1.0, 1.0, ("a3",)),
        ({"a": 4.0, "b": 3.0}, 1.0, 1.0, ()),  # equal with it: the other could take the place back
        ({"a": 4.0, "b": 3.0}, 1.0, 2.0, ("a3",)),
        ({"a": 4.0, "b": 0.0}, 4.0, 1.0, ()),
    ],
)
def test_a_team_takes_places_while_it_uses_less_for_its_share(
    used: dict[str, float], own_dollars: float, share: float, victims: tuple[str, ...]
) -> None:
    rules = Preemption(by_priority=True, by_share=True, shares={"a": 1.0, "b": share})
    jobs = [running(f"a{number}", team="a") for number in range(4)]
    found = rules.victims(running("new", team="b", dollars=own_dollars), jobs, used, frees(1))
    assert found == victims


def test_a_team_gives_no_more_places_than_bring_it_to_its_share() -> None:
    rules = Preemption(by_priority=True, by_share=True, shares={"a": 1.0, "b": 1.0})
    jobs = [running(f"a{number}", team="a") for number in range(4)]
    used = {"a": 4.0, "b": 0.0}
    assert len(rules.victims(running("new", team="b", dollars=2.5), jobs, used, frees(2))) == 2
    assert rules.victims(running("new", team="b", dollars=2.5), jobs, used, frees(3)) == ()


def test_teams_never_take_a_place_back_and_forth() -> None:
    """Each preemption by share makes the largest use smaller: from any start, it ends after a few."""
    shares = {"a": 1.0, "b": 2.0, "c": 0.5}
    rules = Preemption(by_priority=True, by_share=True, shares=shares)
    placed = [running(f"a{number}", team="a") for number in range(6)]
    waiting = [running(f"{team}{number}", team=team) for team in "bc" for number in range(6)]
    for _ in range(6):
        used = Counter(each.team for each in placed)
        for job in waiting:
            gone = rules.victims(job, placed, used, frees(1))
            if gone:
                left = [each for each in placed if each.name in gone]
                placed = [*(each for each in placed if each not in left), job]
                waiting = [*(each for each in waiting if each != job), *left]
                break
    used = Counter(each.team for each in placed)
    assert used == {"a": 2, "b": 4}, "for its share, c would use as much with one as a and b do"
    assert not any(rules.victims(job, placed, used, frees(1)) for job in waiting)


def test_a_job_of_a_higher_priority_than_another_team_needs_no_share() -> None:
    rules = Preemption(by_priority=True, by_share=True, shares={"a": 1.0, "b": 1.0})
    victim, job = running("low", 0, "a"), running("new", 1, "b", 100.0)
    assert rules.victims(job, [victim], {"a": 1.0, "b": 9.0}, frees(1)) == ("low",)
    assert rules.why(job, victim) == "priority 1 over 0"
    same = running("new", 0, "b")
    assert rules.why(same, victim) == "team b uses less for its share than team a"


def test_a_search_looks_at_the_first_victims_alone() -> None:
    jobs = [running(f"j{number}") for number in range(1000)]
    num_asked = 0

    def fits(gone: Collection[str]) -> bool:
        nonlocal num_asked
        num_asked += 1
        return len(gone) >= MAX_VICTIMS

    assert len(Preemption(by_priority=True).victims(running("new", 1), jobs, {}, fits)) == MAX_VICTIMS
    assert num_asked < 2 * MAX_VICTIMS
    assert Preemption(by_priority=True).victims(running("new", 1), jobs, {}, frees(MAX_VICTIMS + 1)) == ()


def test_many_lower_jobs_of_other_teams_do_not_hide_a_victim_of_the_jobs_own_team() -> None:
    others = [running(f"other {number}") for number in range(2 * MAX_VICTIMS)]
    jobs = [*others, running("own", 1, "math"), running("own too", 2, "math")]
    rules = Preemption(by_priority=True)

    def fits(gone: Collection[str]) -> bool:
        return "own" in gone and any(name.startswith("other") for name in gone)

    found = rules.victims(running("new", 3, "math"), jobs, {}, fits)
    assert len(found) == 2 and "own" in found, "the team's quota is used up, and so are the nodes"


def test_a_job_runs_a_least_time_before_it_leaves() -> None:
    rules = Preemption(by_priority=True, min_run_s=600.0)
    assert not rules.may_leave(599.0)
    assert rules.may_leave(600.0)
