"""A job's use of serving GPUs: each GPU's time counts once, and outlasts the job's idle times."""

import pytest

from rose.messages import key_proof
from rose.scheduler.rollout.placing.views import TurnView, WorkerKind
from rose.scheduler.rollout.router_config import RouterConfig, RouterJob, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.gpu_meter import GpuMeter
from rose.scheduler.rollout.turn.place import take_place
from rose.scheduler.rollout.workers.worker import Worker


def worker(kind: WorkerKind, gpus: int = 1) -> Worker:
    found = Worker(WorkerSpec(url=f"http://{kind}:1", kind=kind, gpus=gpus), RouterConfig())
    found.note_changes(set())
    return found


def test_a_gpu_counts_once_however_many_turns_run_on_it_and_only_a_serving_gpu_counts() -> None:
    accounts = JobAccounts(RouterConfig())
    job = accounts.get("math", 0.0)
    lent, own = worker(WorkerKind.SERVING, gpus=2), worker(WorkerKind.DEDICATED)
    turn = TurnView(session="t", job="math")
    first, second = (take_place(turn, job, 0.0, lent, now) for now in (1.0, 2.0))
    take_place(turn, job, 0.0, own, 0.0).end(9.0)
    assert job.as_json(0, 3.0, shows_proof=True)["serving_gpu_s"] == pytest.approx(4.0)
    first.end(4.0)
    second.end(6.0)
    assert job.as_json(0, 20.0, shows_proof=True)["serving_gpu_s"] == pytest.approx(10.0)


def test_routers_that_use_a_gpu_together_count_its_time_once_between_them() -> None:
    one, other = GpuMeter(), GpuMeter()
    one.begin("gpu", 2, 0.0)
    other.begin("gpu", 2, 4.0, num_routers=2)
    one.divide("gpu", 2, 4.0)
    one.divide("gpu", 2, 5.0)
    one.divide("elsewhere", 3, 5.0)
    assert (one.used_s(6.0), other.used_s(6.0)) == (10.0, 2.0)
    assert one.end("gpu", 8.0)
    other.divide("gpu", 1, 8.0)
    assert other.end("gpu", 9.0)
    assert one.used_s(20.0) + other.used_s(20.0) == 2 * 9.0


def test_a_declared_job_keeps_its_use_through_idle_times_until_its_name_is_another_jobs() -> None:
    accounts = JobAccounts(RouterConfig(job_idle_s=5.0))
    job = accounts.change("math", RouterJob(key="key-of-math", run_id="run"), 0.0)
    take_place(TurnView(session="t", job="math"), job, 0.0, worker(WorkerKind.SERVING), 0.0).end(3.0)
    accounts.expire({}, 100.0)
    assert accounts.find("math") is None
    [shown] = accounts.without_account()
    assert shown.as_json(0, 100.0, shows_proof=True)["serving_gpu_s"] == pytest.approx(3.0)
    again = accounts.get("math", 101.0)
    assert again.as_json(0, 101.0, shows_proof=True)["serving_gpu_s"] == pytest.approx(3.0)
    running = take_place(TurnView(session="t", job="math"), again, 0.0, worker(WorkerKind.SERVING), 101.0)
    accounts.put("math", RouterJob(key="key-of-another", run_id="run"))
    running.end(105.0)
    assert again.as_json(0, 106.0, shows_proof=True)["serving_gpu_s"] == 0.0


def test_each_count_has_an_id_and_tells_those_who_know_the_key_that_it_is_theirs() -> None:
    accounts = JobAccounts(RouterConfig(job_idle_s=5.0))
    declared = RouterJob(key="key-of-math", run_id="run")

    def meter() -> dict[str, str]:
        [job] = [*accounts, *accounts.without_account()]
        found: dict[str, str] = job.as_json(0, 100.0, shows_proof=True)["serving_meter"]
        return found

    accounts.change("math", declared, 0.0)
    first = meter()
    assert first["proof"] == key_proof("key-of-math", first["id"]) != key_proof("another", first["id"])
    accounts.change("math", RouterJob(weight=2.0), 0.0)
    assert meter() == first
    accounts.expire({}, 100.0)
    assert accounts.find("math") is None and meter() == first
    accounts.change("math", RouterJob(key="key-of-another"), 101.0)
    second = meter()
    assert second["id"] != first["id"] and second["proof"] == key_proof("key-of-another", second["id"])
    [job] = accounts
    assert job.as_json(0, 100.0, shows_proof=False)["serving_meter"] == {"id": second["id"], "proof": None}
