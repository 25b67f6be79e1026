"""Two jobs on one device: starts them, answers their calls, and carries out what the pair's policy decides.

Owns both processes and the channel that they call. A job gets its permit when it has a share, and may get
other shares while it runs. Promises that both processes have ended when `run` returns or raises. When a job
ends or fails, the other one has the device to itself.
"""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rose.errors import ChannelError, WorkerError
from rose.jobs.pair_facts import PairFacts, Side, rollout_nodes
from rose.jobs.runner import GRACE_S, job_files, job_logs
from rose.node.processes import ProcessGroup, ServerProcess
from rose.scheduler.gpu.live import ROLLOUT, TRAIN
from rose.scheduler.gpu.pairing import Pairing, RolloutReport
from rose.scheduler.gpu.slowdown import Share
from rose.scheduler.gpu.substages import Steps
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import (
    Answer,
    AnyCall,
    Completed,
    Granted,
    Heartbeat,
    History,
    Message,
    Moved,
    Overview,
    Release,
    Report,
    Request,
    Shared,
    Status,
    Stepped,
    decode_call,
    encode,
)
from rose.scheduler.runtime.channel.protocol import Batch, Outgoing, SchedulerSide
from rose.scheduler.runtime.decide.meter import Meter
from rose.scheduler.runtime.job.job import JobFile
from rose.scheduler.runtime.job.spec import RunSpec

logger = logging.getLogger(__name__)

DEVICE = "device"
"""The name of the group of both jobs."""
POLL_S = 0.05
LEASE_S = 60.0
"""Permits need a lease, but nothing depends on it here: the job's process shows whether the job lives."""
PHASES = {Phase.ROLLOUT: ROLLOUT, Phase.TRAIN: TRAIN}


class PairRun:
    """One run of two jobs, in one thread."""

    def __init__(
        self,
        specs: tuple[RunSpec, RunSpec],
        pairing: Pairing,
        cores: Sequence[int],
        channel: tuple[str, SchedulerSide],
        folder: Path,
        cache_root: Path,
        *,
        is_gpu: bool = False,
    ) -> None:
        """``cores``: those of the device, or a GPU's multiprocessors. ``channel``: its URL, and the
        scheduler's end of it. ``folder``: the place of job files and logs."""
        self._pairing = pairing
        self._cores, self._is_gpu = list(cores), is_gpu
        self._url, self._channel = channel
        self._folder, self._cache_root = folder, cache_root
        one, two = (Side(spec=spec, process=self._process(spec)) for spec in specs)
        self.sides = (one, two)
        self.meter = Meter(started_s=time.monotonic())
        self.began_s: float | None = None
        self._epoch = self._permits = 0
        self._facts = PairFacts(self.sides, pairing, self.meter)
        self._batch = Batch()
        self._processes = ProcessGroup()

    def run(self, check: Callable[[], object]) -> None:
        """Serves both jobs until they have ended, and calls ``check`` in between. Raises: WorkerError if a
        job can't be started."""
        shutil.rmtree(self._cache_root, ignore_errors=True)  # left by a run that was killed
        try:
            for side in self.sides:
                self._start(side)
            while any(side.exit_status is None for side in self.sides):
                check()
                self._step()
        finally:
            self._processes.stop(GRACE_S)
            shutil.rmtree(self._cache_root, ignore_errors=True)  # no other run uses this folder

    @property
    def elapsed_s(self) -> float:
        """Returns the seconds from the first permit to the last completed iteration."""
        ends = [at_s for side in self.sides for at_s in side.done_s]
        return max(ends) - self.began_s if ends and self.began_s is not None else 0.0

    def _job_file(self, spec: RunSpec) -> Path:
        return job_files(self._folder, self._cache_root) / spec.name / "pair.json"

    def _process(self, spec: RunSpec) -> ServerProcess:
        return ServerProcess(
            spec.command,
            spec.name,
            job_logs(self._folder, self._cache_root.name) / f"{spec.name}.log",
            env={"ROSE_JOB": str(self._job_file(spec))},
            folder=Path(spec.folder),
        )

    def _start(self, side: Side) -> None:
        spec, path = side.spec, self._job_file(side.spec)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = JobFile(
            channel=self._url,
            name=spec.name,
            attempt=1,
            first_iteration=0,
            num_iterations=spec.iterations,
            group=DEVICE,
            rollout_nodes=rollout_nodes(spec),
            cache_folder=str(self._cache_root / spec.name),
            limit_bytes={name: round(phase.memory_gb * 1e9) for name, phase in spec.phases.items()},
            shares_device=True,
            shares_gpu=self._is_gpu,
        )
        path.write_bytes(msgspec.json.encode(file))
        try:
            self._processes.start(side.process)
        except OSError as error:
            reason = f"{error.strerror}: {str(error.filename)!r}"
            raise WorkerError(f"job {spec.name}: can't start {list(spec.command)}: {reason}") from error

    def _step(self) -> None:
        arrived = self._channel.receive(POLL_S)
        now = time.monotonic()
        for each in arrived:
            try:
                self._handle(each.client, decode_call(each.body), now)
            except ChannelError:
                logger.exception("dropped client=%s", each.client)
        self._bury(now)
        self._pairing.tick(now)
        self._carry_out(now)
        batch, self._batch = self._batch, Batch()
        self._channel.commit(batch, arrived)

    def _handle(self, client: str, call: AnyCall, now: float) -> None:
        match call:
            case Request() | Release() | Completed() | Stepped() | Heartbeat() | Report() | Moved():
                index = {side.spec.name: k for k, side in enumerate(self.sides)}.get(call.job)
                if index is None or self.sides[index].exit_status is not None:
                    self._send(client, Answer(seq=call.seq, error=f"no job {call.job!r} runs here"))
                    return
                self.sides[index].caller = client
                self._handle_job(index, call, now)
            case Overview():
                self._send(client, Answer(seq=call.seq, body=self._facts.overview(now)))
            case Status():
                self._send(client, self._facts.status(call, now))
            case History():
                self._send(client, Answer(seq=call.seq, body={"events": self._facts.events(call.last)}))
            case _:
                names = " and ".join(side.spec.name for side in self.sides)
                error = f"rose sched multiplex runs {names} alone; stop it, and start: rose sched serve"
                self._send(client, Answer(seq=call.seq, error=error))

    def _handle_job(
        self,
        index: int,
        call: Request | Release | Completed | Stepped | Heartbeat | Report | Moved,
        now: float,
    ) -> None:
        side, pairing = self.sides[index], self._pairing
        body: dict[str, object] = {}
        refusal: str | None = None
        if isinstance(call, Release | Completed | Stepped | Report | Moved):
            # A client that lost its connection sends again what was not answered.
            is_repeated = call.seq in side.carried_out
            side.carried_out.append(call.seq)
        else:
            is_repeated = False
        match call:
            case Request():
                side.waiting = call
                self.meter.asked(call.job, call.phase, now)
                pairing.asks(index, PHASES[call.phase], now)
                return  # the permit will be the answer
            case Release() | Stepped() | Report() | Moved() if is_repeated:
                pass
            case Release():
                side.holds = None
                self.meter.released(call.job, now)
                pairing.released(index, now)
            case Completed():
                if not is_repeated:
                    side.num_done += 1
                    side.done_s.append(now)
                    self.meter.completed(call.job, now)
                    pairing.completed(index, now)
                body = {"group": DEVICE, "rollout_nodes": rollout_nodes(side.spec), "ends": False}
            case Stepped():
                for each in call.steps:
                    pairing.stepped(index, each.tokens, each.num_running, each.seconds, each.epoch)
                pairing.obeys(index, call.epoch, now)
            case Report() if len(call.engines) == pairing.pipelines[index].num_workers > 1:
                worker = pairing.reported(index, rollout_report(call))
                body = {"keep": [worker]} if worker is not None else {}
            case Moved():
                refusal = pairing.moved(index, call.keep, now)
        assert side.caller is not None
        self._send(side.caller, Answer(seq=call.seq, error=refusal, body=body))

    def _bury(self, now: float) -> None:
        for index, side in enumerate(self.sides):
            if side.exit_status is None and not side.process.is_alive():
                side.exit_status, side.holds, side.waiting = side.process.stop(0.0), None, None
                self.meter.dropped(side.spec.name)
                if side.has_failed:
                    name, how = side.spec.name, side.how_it_ended
                    logger.warning("%s %s; its log: %s", name, how, side.process.log_path)
                self._pairing.ended(index, now)

    def _carry_out(self, now: float) -> None:
        """Sends new shares, the smaller share first, and permits to waiting jobs that have a share."""
        shares = self._pairing.shares
        is_new, self._epoch = self._pairing.epoch != self._epoch, self._pairing.epoch
        for index in sorted((0, 1), key=lambda k: len(self._cores_of(k))):
            side, share = self.sides[index], shares[index]
            if side.caller is None:
                continue
            is_granted = side.waiting is not None and share is not None
            if is_granted or (is_new and side.holds is not None):
                self._send(side.caller, self._shared(index, share))
            if is_granted:
                self._grant(index, now)

    def _shared(self, index: int, share: Share | None) -> Shared:
        return Shared(
            epoch=self._pairing.epoch,
            cores=self._cores_of(index),
            compute=share.compute if share is not None else 0.0,
            memory=share.memory if share is not None else 0.0,
        )

    def _cores_of(self, index: int) -> list[int]:
        """Returns a pipeline's cores. Behind a merge, one has the worker of its engine, and the other one the
        rest."""
        pairing = self._pairing
        if pairing.merged is None or None in pairing.shares:
            return cores_of(index, pairing.shares, self._cores)
        kept, worker = pairing.merged
        count = len(self._cores) // pairing.num_workers
        begin, end = worker * count, (worker + 1) * count
        return self._cores[begin:end] if index == kept else self._cores[:begin] + self._cores[end:]

    def _grant(self, index: int, now: float) -> None:
        side = self.sides[index]
        request = side.waiting
        assert request is not None and side.caller is not None
        side.waiting, side.holds = None, request.phase
        self._permits += 1
        self.began_s = self.began_s if self.began_s is not None else now
        self.meter.granted(request.job, request.phase, now)
        self._pairing.granted(index, now)
        granted = Granted(
            seq=request.seq,
            job=request.job,
            attempt=request.attempt,
            phase=request.phase,
            iteration=request.iteration,
            epoch=self._permits,
            lease_s=LEASE_S,
        )
        self._send(side.caller, granted)

    def _send(self, client: str, message: Message) -> None:
        self._batch.outgoing.append(Outgoing(client=client, body=encode(message)))


def rollout_report(call: Report) -> RolloutReport:
    """Returns a rollout's progress with the mean step of each engine."""
    logs = [
        [
            Steps(
                tokens=round(run.tokens / run.num_steps),
                num_running=round(run.generated / run.num_steps),
                seconds=run.seconds / run.num_steps,
                count=run.num_steps,
            )
        ]
        if run.num_steps
        else []
        for run in call.engines
    ]
    return RolloutReport(
        logs=logs,
        num_running=[run.num_requests for run in call.engines],
        num_samples=call.num_total,
        num_done=call.num_done,
        num_tokens=call.num_tokens,
        lengths=call.lengths or [],
    )


def cores_of(index: int, shares: Sequence[Share | None], cores: Sequence[int]) -> list[int]:
    """Returns a pipeline's cores. The first pipeline has the lowest cores, the second one has the rest."""
    share, other = shares[index], shares[1 - index]
    if share is None:
        return []
    if other is None:
        return list(cores)
    first = share.compute if index == 0 else other.compute
    count = min(len(cores) - 1, max(1, round(first * len(cores))))
    return list(cores[:count] if index == 0 else cores[count:])
