"""What a running pair tells the commands and the dashboard that ask the cluster's scheduler."""

from pathlib import Path

from rose.jobs.pair import cores_of
from rose.jobs.pair_facts import PairFacts, Side
from rose.node.processes import ServerProcess
from rose.scheduler.dashboard.metrics import prometheus_text
from rose.scheduler.dashboard.view import state_view
from rose.scheduler.gpu.live import ROLLOUT
from rose.scheduler.gpu.pairing import Pairing
from rose.scheduler.gpu.slowdown import WHOLE, Share
from rose.scheduler.runtime.channel.messages import Status
from rose.scheduler.runtime.command.status import status_lines
from rose.scheduler.runtime.decide.meter import Meter
from rose.scheduler.runtime.job.spec import RunSpec


def side(name: str) -> Side:
    phases = {"rollout": {}, "train": {"after": ["rollout"]}}
    spec = RunSpec.model_validate(
        {"name": name, "command": ["x"], "max_tokens": 1, "iterations": 9, "phases": phases}
    )
    return Side(spec=spec, process=ServerProcess(["x"], name, Path("/logs") / name))


def facts() -> PairFacts:
    pairing = Pairing(("math", "code"), "two cores", (0.5,))
    pairing.asks(0, ROLLOUT, 10.0)
    pairing.granted(0, 10.0)
    return PairFacts((side("math"), side("code")), pairing, Meter(started_s=5.0))


def test_the_dashboard_shows_the_shared_device_and_both_jobs() -> None:
    view = state_view(facts().overview(12.0), [])
    [device] = view["devices"]
    assert (device["mode"], device["hardware"]) == ("profile", "two cores")
    assert device["now"] == ["alone", "waits or is between two phases"]
    assert device["decisions"][0]["ago_s"] == 2.0
    assert [job["name"] for job in view["jobs"]] == ["math", "code"]
    assert b'rose_sched_jobs{state="running"} 2.0' in prometheus_text(view)


def test_status_and_explain_name_the_other_job_and_the_reason() -> None:
    answer = facts().status(Status(seq=1, job=None), 12.0)
    assert status_lines(answer.body["jobs"], 80)[1].startswith("math")
    why = "shares this machine with code, one iteration after the other: "
    assert answer.body["jobs"][0]["why"].startswith(why)
    assert facts().status(Status(seq=1, job="x"), 12.0).error == "no job 'x'; the jobs are: math, code"


def test_both_shares_together_are_all_cores() -> None:
    cores = [4, 5, 6, 7]
    shares = (Share(compute=0.25), Share(compute=0.75))
    assert [cores_of(index, shares, cores) for index in (0, 1)] == [[4], [5, 6, 7]]
    assert cores_of(0, (WHOLE, None), cores) == cores
    assert cores_of(0, (None, WHOLE), cores) == []
    assert cores_of(1, (Share(compute=0.999), Share(compute=0.001)), cores) == [7], "one core each at least"
