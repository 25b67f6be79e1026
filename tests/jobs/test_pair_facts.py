"""What a running pair tells the commands and the dashboard that ask the cluster's scheduler."""

from contextlib import closing
from pathlib import Path
from typing import Any

from rose.jobs.pair import PairRun, cores_of
from rose.jobs.pair_facts import PairFacts, Side
from rose.node.processes import ServerProcess
from rose.scheduler.dashboard.metrics import prometheus_text
from rose.scheduler.dashboard.view import state_view
from rose.scheduler.gpu.live import ROLLOUT
from rose.scheduler.gpu.pairing import Pairing
from rose.scheduler.gpu.slowdown import WHOLE, Share
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Completed,
    Release,
    Request,
    Status,
    Stepped,
    StepRun,
    decode_scheduler_message,
)
from rose.scheduler.runtime.channel.opening import ChannelUrl
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


def test_a_call_that_is_sent_again_counts_once(tmp_path: Path) -> None:
    pairing = Pairing(("math", "code"), "two cores", (0.5,))
    channel = ChannelUrl.parse(f"unix:{tmp_path / 'channel'}")
    with closing(channel.serve()) as served:
        specs = (side("math").spec, side("code").spec)
        run = PairRun(specs, pairing, [0, 1], (channel.url, served), tmp_path, tmp_path / "cache")
        of_job: dict[str, Any] = {"job": "math", "attempt": 1}
        steps = [StepRun(tokens=4, num_running=4, seconds=1.0, epoch=1)]
        for call in (
            Request(seq=1, phase=Phase.ROLLOUT, iteration=0, **of_job),
            Stepped(seq=2, steps=steps, epoch=1, **of_job),
            Release(seq=3, phase=Phase.ROLLOUT, epoch=1, **of_job),
            Request(seq=4, phase=Phase.TRAIN, iteration=0, **of_job),
            Release(seq=5, phase=Phase.TRAIN, epoch=2, **of_job),
            Completed(seq=6, iteration=0, **of_job),
        ):
            for _ in range(2):
                run._handle("math's client", call, float(call.seq))
            run._carry_out(call.seq + 0.5)
    assert (run.sides[0].num_done, pairing.pipelines[0].num_done) == (1, 1)
    past = pairing.pipelines[0].past
    assert past is not None and past.phases[0].seconds == 1.0, "the step counts once"
    answers = [decode_scheduler_message(each.body) for each in run._batch.outgoing]
    assert [each.seq for each in answers if isinstance(each, Answer)].count(6) == 2, "both are answered"


def test_both_shares_together_are_all_cores() -> None:
    cores = [4, 5, 6, 7]
    shares = (Share(compute=0.25), Share(compute=0.75))
    assert [cores_of(index, shares, cores) for index in (0, 1)] == [[4], [5, 6, 7]]
    assert cores_of(0, (WHOLE, None), cores) == cores
    assert cores_of(0, (None, WHOLE), cores) == []
    assert cores_of(1, (Share(compute=0.999), Share(compute=0.001)), cores) == [7], "one core each at least"
