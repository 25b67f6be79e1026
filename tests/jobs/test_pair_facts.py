"""What a running pair tells the commands and the dashboard that ask the cluster's scheduler."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rose.jobs.pair import PairRun, cores_of
from rose.jobs.pair_facts import PairFacts, Side
from rose.node.processes import ServerProcess
from rose.scheduler.dashboard.metrics import prometheus_text
from rose.scheduler.dashboard.view import state_view
from rose.scheduler.gpu.live import ROLLOUT
from rose.scheduler.gpu.pairing import Mode, Pairing
from rose.scheduler.gpu.slowdown import WHOLE, Share, SlowdownTable
from rose.scheduler.gpu.substages import SubStageKind
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Completed,
    EngineRun,
    Moved,
    RankCall,
    Release,
    Report,
    Request,
    Shared,
    Status,
    Stepped,
    StepRun,
    decode_scheduler_message,
)
from rose.scheduler.runtime.channel.opening import ChannelUrl
from rose.scheduler.runtime.command.status import status_lines
from rose.scheduler.runtime.decide.meter import Meter
from rose.scheduler.runtime.job.spec import RunSpec

UNSHARED = SlowdownTable(
    hardware="four cores",
    entries={
        (one, two): ((3.0,),)
        for one in (SubStageKind.ROLLOUT_SMALL, SubStageKind.TRAIN)
        for two in (SubStageKind.ROLLOUT_SMALL, SubStageKind.TRAIN)
    },
    compute=(0.5,),
    memory=(0.5,),
)
"""Nothing pays but merging."""


def side(name: str, nodes: int = 1) -> Side:
    phases = {"rollout": {"nodes": nodes}, "train": {"after": ["rollout"]}}
    spec = RunSpec.model_validate(
        {"name": name, "command": ["x"], "max_tokens": 1, "iterations": 9, "phases": phases}
    )
    return Side(spec=spec, process=ServerProcess(["x"], name, Path("/logs") / name))


@contextmanager
def pair_run(
    folder: Path, pairing: Pairing, cores: list[int], nodes: tuple[int, int] = (1, 1)
) -> Iterator[PairRun]:
    """A pair of jobs on a channel that nobody has joined, not started."""
    channel = ChannelUrl.parse(f"unix:{folder / 'channel'}")
    with closing(channel.serve()) as served:
        specs = (side("math", nodes[0]).spec, side("code", nodes[1]).spec)
        yield PairRun(specs, pairing, cores, (channel.url, served), folder, folder / "cache")


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
    with pair_run(tmp_path, pairing, [0, 1]) as run:
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


def test_a_release_counts_after_a_later_call_of_another_thread(tmp_path: Path) -> None:
    pairing = Pairing(("math", "code"), "two cores", (0.5,))
    with pair_run(tmp_path, pairing, [0, 1]) as run:
        of_job: dict[str, Any] = {"job": "math", "attempt": 1}
        run._handle("math's client", Request(seq=1, phase=Phase.ROLLOUT, iteration=0, **of_job), 1.0)
        run._carry_out(1.0)
        assert pairing.shares == (WHOLE, None)
        report = Report(seq=3, phase=Phase.ROLLOUT, num_done=1, num_total=1, **of_job)
        run._handle("math's client", report, 2.0)
        run._handle("math's client", Release(seq=2, phase=Phase.ROLLOUT, epoch=1, **of_job), 3.0)
    assert run.sides[0].holds is None
    assert not pairing.pipelines[0].holds


@pytest.mark.parametrize("tailed", ["math", "code"])
def test_a_merge_gives_the_freed_cores_to_the_other_job_and_is_told(tmp_path: Path, tailed: str) -> None:
    """One job has two engines, the other one a process. Each call arrives twice, as after a lost
    connection."""
    other = "code" if tailed == "math" else "math"
    nodes = {tailed: 2, other: 1}
    workers = nodes["math"], nodes["code"]
    pairing = Pairing(("math", "code"), "four cores", (0.5,), num_workers=workers, table=UNSHARED)
    with pair_run(tmp_path, pairing, [4, 5, 6, 7], workers) as run:
        calls = Calls(run, tailed)
        for _ in range(2):
            for job in ("math", "code"):
                calls.iteration(job)
        assert pairing.mode is Mode.SHARED
        calls.send(tailed, Request, phase=Phase.ROLLOUT, iteration=2)
        calls.send(other, Request, phase=Phase.ROLLOUT, iteration=2)
        ended = [EngineRun(num_steps=9, seconds=0.9, tokens=9, generated=9, num_requests=1)] * 2
        refused = calls.send(tailed, Moved, epoch=9, keep=[1])
        assert refused.error is not None and f"{tailed} was not told" in refused.error
        report = {"phase": Phase.ROLLOUT, "num_done": 2, "num_total": 4, "num_tokens": 9}
        assert calls.send(tailed, Report, **report, engines=ended[:1]).body == {}
        keep = calls.send(tailed, Report, **report, engines=ended).body["keep"]
        calls.shared.clear()
        assert calls.send(tailed, Moved, epoch=9, keep=keep).error is None
        kept = [[4, 5], [6, 7]][keep[0]]
        assert calls.shared == {tailed: kept, other: [each for each in (4, 5, 6, 7) if each not in kept]}
        said = PairFacts(run.sides, pairing, run.meter).events(1)[0]["runs"]
        assert said.startswith(f"the tail of {tailed} continues on worker {keep[0]} alone: saves ")
        jobs = PairFacts(run.sides, pairing, run.meter).overview(99.0)["jobs"]
        assert {job["name"]: job["num_rollout_nodes"] for job in jobs} == nodes
        assert {job["name"]: len(job["rollout_nodes"]) for job in jobs} == nodes
        calls.send(tailed, Release, phase=Phase.ROLLOUT, epoch=9)
        assert calls.shared[other] == [4, 5, 6, 7]


class Calls:
    """Sends a pair its jobs' calls. ``tailed``: the job with engines. ``shared``: the cores that each job was
    given last."""

    def __init__(self, run: PairRun, tailed: str) -> None:
        self._run, self._tailed, self._seq, self.shared = run, tailed, 0, dict[str, list[int]]()

    def send(self, job: str, kind: type[RankCall], **fields: Any) -> Answer:
        """Returns the answer of the first of two arrivals; an empty one if it comes later."""
        self._seq += 1
        call = kind(seq=self._seq, job=job, attempt=1, **fields)
        for _ in range(2 if kind is not Request else 1):
            self._run._handle(job, call, float(self._seq))  # type: ignore[arg-type]
        self._run._carry_out(self._seq + 0.5)
        sent = [(each.client, decode_scheduler_message(each.body)) for each in self._run._batch.outgoing]
        self._run._batch.outgoing.clear()
        self.shared |= {client: message.cores for client, message in sent if isinstance(message, Shared)}
        return next((each for _, each in sent if isinstance(each, Answer)), Answer(seq=self._seq))

    def iteration(self, job: str) -> None:
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            self.send(job, Request, phase=phase, iteration=0)
            if (job, phase) == (self._tailed, Phase.ROLLOUT):
                engines = [
                    EngineRun(num_steps=50, seconds=5.0, tokens=100, generated=100, num_requests=0)
                ] * 2
                report = {"phase": phase, "num_done": 4, "num_total": 4, "lengths": [50, 50, 50, 50]}
                self.send(job, Report, **report, engines=engines)
            else:
                steps = [StepRun(tokens=4, num_running=4, seconds=5.0, epoch=self._run._pairing.epoch)]
                self.send(job, Stepped, steps=steps, epoch=self._run._pairing.epoch)
            self.send(job, Release, phase=phase, epoch=1)
        self.send(job, Completed, iteration=0)


def test_both_shares_together_are_all_cores() -> None:
    cores = [4, 5, 6, 7]
    shares = (Share(compute=0.25), Share(compute=0.75))
    assert [cores_of(index, shares, cores) for index in (0, 1)] == [[4], [5, 6, 7]]
    assert cores_of(0, (WHOLE, None), cores) == cores
    assert cores_of(0, (None, WHOLE), cores) == []
    assert cores_of(1, (Share(compute=0.999), Share(compute=0.001)), cores) == [7], "one core each at least"
