"""What the scheduler decides to tell the router: loans within limits, a key for each job, no leftovers."""

import itertools
from typing import Any

import msgspec
import pytest
from lone_scheduler import Scheduler

from rose.scheduler.runtime.channel.messages import Answer, Cancel, Exited, Hello, SchedulerMessage, Start
from rose.scheduler.runtime.decide.records import BorrowedTime
from rose.scheduler.runtime.lending.loans import Loan, Loans, RouterNews, Use

URL = "http://router:8100"


def lending(serving_gpus: int = 8, **cluster: Any) -> Scheduler:
    scheduler = Scheduler(pools={"serving_gpus": serving_gpus}, router={"url": URL}, **cluster)
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    return scheduler


def submit(scheduler: Scheduler, name: str, rollout_s: float = 1.0, **borrow: Any) -> list[SchedulerMessage]:
    phases = {"rollout": {"seconds": rollout_s}, "train": {"seconds": 1.0}}
    return scheduler.submit(name, phases=phases, borrow={"run_id": f"run-{name}", **borrow}, group=None)


def started(messages: list[SchedulerMessage]) -> Start:
    [start] = [each for each in messages if isinstance(each, Start)]
    return start


def loans(scheduler: Scheduler) -> dict[str, Loan]:
    return {loan.job: loan for loan in scheduler.control.loans}


def gpus(scheduler: Scheduler) -> dict[str, int]:
    return {name: loan.max_serving_gpus for name, loan in loans(scheduler).items() if not loan.is_over}


def test_a_job_that_starts_is_declared_and_gets_the_routers_address_and_its_key() -> None:
    scheduler = lending()
    start = started(submit(scheduler, "math", model="policy", weight=2.0))
    loan = loans(scheduler)["math"]
    assert (loan.run_id, loan.model, loan.weight, loan.max_serving_gpus) == ("run-math", "policy", 2.0, 8)
    assert start.variables == {
        "ROSE_ROUTER_URL": URL,
        "ROSE_ROUTER_API_KEY": loan.key,
        "OPENAI_BASE_URL": f"{URL}/v1",
        "OPENAI_API_KEY": loan.key,
    }


def test_a_jobs_priority_is_its_priority_at_the_router_also_after_an_earlier_version_noted_none() -> None:
    scheduler = lending()
    phases = {"rollout": {"seconds": 1.0}, "train": {"seconds": 1.0}}
    scheduler.submit("math", phases=phases, borrow={"run_id": "run"}, group=None, priority=7)
    loan = loans(scheduler)["math"]
    assert loan.priority == 7
    spec = scheduler.control._state.specs["math"]
    older = Loans(scheduler.cluster, lambda: "another-key")
    older.restore("math", msgspec.structs.replace(loan, priority=0))
    assert older.variables(spec, loan.submission)["OPENAI_API_KEY"] == loan.key
    assert older.wanted == (loan,)


def test_jobs_borrow_within_the_fleet_and_their_own_limits_and_are_lent_anew_when_others_come() -> None:
    scheduler = lending(serving_gpus=6)
    submit(scheduler, "light", max_serving_gpus=4)
    scheduler.submit("none", group=None)
    assert gpus(scheduler) == {"light": 4}
    submit(scheduler, "heavy", rollout_s=9.0, max_serving_gpus=5)
    assert gpus(scheduler) == {"light": 1, "heavy": 5}
    scheduler.call(Exited, job="heavy", attempt=1, exit_status=127, cannot_start="no such program")
    assert gpus(scheduler) == {"light": 4}


def test_a_job_keeps_its_key_through_crashes_and_restarts_of_the_scheduler() -> None:
    scheduler = lending()
    submit(scheduler, "math")
    before = loans(scheduler)["math"]
    again = started(scheduler.call(Exited, job="math", attempt=1, exit_status=1))
    assert again.variables["OPENAI_API_KEY"] == before.key
    scheduler.restart(5.0)
    scheduler.wait(0.25)
    assert loans(scheduler) == {"math": before}


def test_a_loan_that_is_over_is_kept_until_the_router_has_forgotten_it() -> None:
    scheduler = lending()
    submit(scheduler, "math")
    scheduler.call(Exited, job="math", attempt=1, exit_status=127, cannot_start="no such program")
    scheduler.restart(5.0)
    scheduler.wait(0.25)
    over = loans(scheduler)["math"]
    assert over.is_over and scheduler.job("math")["serving_gpus"] is None
    scheduler.control.router_heard(RouterNews(forgotten=(over,)))
    scheduler.wait(0.25)
    assert loans(scheduler) == {} and not [key for key in scheduler.rows if key.startswith("loan:")]


def test_a_later_job_of_the_same_name_has_a_key_of_its_own_and_is_not_forgotten_with_the_earlier_one() -> (
    None
):
    scheduler = lending()
    submit(scheduler, "math")
    scheduler.call(Exited, job="math", attempt=1, exit_status=127, cannot_start="no such program")
    over = loans(scheduler)["math"]
    submit(scheduler, "math")
    later = loans(scheduler)["math"]
    assert later.key != over.key and not later.is_over
    scheduler.control.router_heard(RouterNews(forgotten=(over,)))
    assert loans(scheduler) == {"math": later}


def test_queued_and_cancelled_jobs_borrow_nothing() -> None:
    one_node = {"rollout": {"name": "h20", "dollars_per_gpu_hour": 1, "num_nodes": 1}, "serving_gpus": 8}
    scheduler = Scheduler(pools=one_node, router={"url": URL}, policy="solo", groups={})
    submit(scheduler, "first")
    submit(scheduler, "second")
    assert scheduler.job("second")["state"] == "queued"
    assert gpus(scheduler) == {"first": 8}
    scheduler.call(Cancel, job="first")
    assert gpus(scheduler) == {"second": 8}


def test_certificates_are_the_same_with_and_without_borrowed_gpus() -> None:
    alone, beside = Scheduler(), lending()
    phases = {"rollout": {"seconds": 5.0}, "train": {"seconds": 1.0}}
    for scheduler, borrow in ((alone, {}), (beside, {"borrow": {"run_id": "r"}})):
        for name in "abc":
            scheduler.submit(name, phases=phases, slo=4.0, **borrow)
    limits = [each.control._state.permits_in("main").limits_s() for each in (alone, beside)]
    assert limits[0] == limits[1] and set(limits[0]) == set("abc")


def test_a_job_that_borrows_is_refused_where_nobody_lends() -> None:
    [refused] = [
        each for each in Scheduler().submit("math", borrow={"run_id": "r"}) if isinstance(each, Answer)
    ]
    assert refused.error is not None and "add `router` there, or remove `borrow`" in refused.error


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"router": {"url": URL}}, "pools.serving_gpus is 0"),
        ({"router": {"url": "router:8100"}, "pools": {"serving_gpus": 1}}, "expected http://HOST:PORT"),
    ],
)
def test_a_router_that_can_lend_nothing_is_refused(cluster: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Scheduler(**cluster)


def test_a_few_routers_are_named_to_a_job_and_the_first_one_to_openai_clients() -> None:
    scheduler = Scheduler(pools={"serving_gpus": 1}, router={"url": "http://a:1/, http://b:2"})
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    variables = started(submit(scheduler, "math")).variables
    assert variables["ROSE_ROUTER_URL"] == "http://a:1,http://b:2"
    assert variables["OPENAI_BASE_URL"] == "http://a:1/v1"


def test_jobs_that_come_and_go_leave_no_loan_behind() -> None:
    scheduler = lending(serving_gpus=3)
    for number, name in itertools.product(range(3), "ab"):
        submit(scheduler, name)
        assert sum(gpus(scheduler).values()) <= 3
        scheduler.call(Exited, job=name, attempt=number + 1, exit_status=127, cannot_start="gone")
    assert gpus(scheduler) == {}
    scheduler.control.router_heard(RouterNews(forgotten=scheduler.control.loans))
    scheduler.wait(0.25)
    assert not [key for key in scheduler.rows if key.startswith("loan:")]


def hear(scheduler: Scheduler, submission: int, **used_s: float) -> float:
    """Tells the scheduler what meters have counted. Returns what the job has used."""
    used = [Use(job="math", submission=submission, meter=meter, gpu_s=s) for meter, s in used_s.items()]
    scheduler.control.router_heard(RouterNews(used=tuple(used)))
    scheduler.wait(0.25)
    return float(scheduler.job("math")["serving_gpu_s"])


def test_the_borrowed_time_of_a_job_adds_up_through_restarts_of_routers_and_scheduler() -> None:
    pools = {"serving_gpus": 8, "serving_dollars_per_gpu_hour": 2.0}
    scheduler = Scheduler(pools=pools, router={"url": "http://a:1,http://b:2"})
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    submit(scheduler, "math")
    number = loans(scheduler)["math"].submission
    assert hear(scheduler, number, a=10.0) == 10.0
    assert hear(scheduler, number, a=12.0, b=3.0) == 15.0
    scheduler.restart(5.0)
    assert hear(scheduler, number, a=12.0, b=3.0) == 15.0
    assert hear(scheduler, number, a_again=30.0) == 45.0, "router a has started anew, and counted much since"
    assert hear(scheduler, number, b=2.5) == 45.0, "an older answer came late"
    scheduler.control.router_heard(RouterNews(forgotten=scheduler.control.loans))
    assert hear(scheduler, number, b=4.0) == 46.0
    assert scheduler.job("math")["serving_dollars"] == pytest.approx(46.0 / 3600 * 2.0)


def test_the_loan_of_an_earlier_version_gets_its_jobs_number_and_counts_on() -> None:
    scheduler = lending()
    submit(scheduler, "math")
    before = loans(scheduler)["math"]
    row = msgspec.json.decode(scheduler.rows["loan:math"])
    del row["submission"]
    scheduler.rows["loan:math"] = msgspec.json.encode(row)
    scheduler.restart(5.0)
    scheduler.call(Hello, client="runner", running={"math": 1}, log_folder="/logs")
    scheduler.wait(0.25)
    assert loans(scheduler)["math"] == before
    assert hear(scheduler, before.submission, a=10.0) == 10.0


def test_a_job_is_not_charged_for_what_an_earlier_job_of_its_name_has_used() -> None:
    scheduler = lending()
    submit(scheduler, "math")
    earlier = loans(scheduler)["math"]
    assert hear(scheduler, earlier.submission, a=10.0) == 10.0
    scheduler.call(Exited, job="math", attempt=1, exit_status=127, cannot_start="no such program")
    assert hear(scheduler, earlier.submission, a=11.0) == 11.0
    submit(scheduler, "math")
    later = loans(scheduler)["math"]
    assert later.submission != earlier.submission
    assert hear(scheduler, earlier.submission, a=12.0) == 0.0
    assert hear(scheduler, later.submission, a_later=13.0) == 13.0


def test_a_job_that_goes_on_under_another_key_is_charged_for_both() -> None:
    borrowed = BorrowedTime()
    assert borrowed.take("first-key", 10.0)
    assert borrowed.take("second-key", 25.0), "the router counts for each key by itself"
    assert not borrowed.take("first-key", 10.0)
    assert borrowed.gpu_s == 35.0
    for number in range(1000):
        borrowed.take(f"router-{number}", 1.0)
        borrowed.take("second-key", 25.0)
    assert borrowed.gpu_s == 1035.0
    assert len(borrowed.seen_s) < 300
