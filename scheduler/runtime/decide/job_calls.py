"""A job's life: submitted, placed, started, started again after a crash, ended.

Owns the answers to those who submit and cancel jobs and to the runners that start processes. A job runs only
in a group whose order is certified, and a job that ends returns its nodes and memory. Pure: takes ``now``;
runners are told to start processes.
"""

from rose.config import parse_config
from rose.errors import ConfigError, JobRefused, PoolsFull
from rose.scheduler.group.certificate import Certificate, CertificateError
from rose.scheduler.runtime.channel.messages import Cancel, Exited, Start, Stop, Submit
from rose.scheduler.runtime.decide import accounts
from rose.scheduler.runtime.decide.move_calls import MoveCalls
from rose.scheduler.runtime.decide.permit_calls import PermitCalls
from rose.scheduler.runtime.decide.placing import Placed
from rose.scheduler.runtime.decide.records import JobRecord, JobState
from rose.scheduler.runtime.decide.state import State
from rose.scheduler.runtime.job.spec import RunSpec


class JobCalls:
    """Answers Submit, Cancel and Exited calls."""

    def __init__(self, state: State, permits: PermitCalls, moves: MoveCalls) -> None:
        self._state = state
        self._permits = permits
        self._moves = moves

    def submit(self, client: str, call: Submit, now: float) -> None:
        """Places and starts a new job. A dry run only says where the job would go."""
        caller = f"{client}#{call.seq}"
        name = call.spec.get("name")
        earlier = self._state.jobs.get(name) if isinstance(name, str) else None
        if earlier is not None and earlier.submitted_by == caller:
            self._state.answer(client, call.seq, body={"job": name, "state": earlier.state})
            return
        try:
            spec = parse_config(call.spec, RunSpec, "job")
            if earlier is not None and not earlier.state.is_over:
                raise JobRefused(f"{name}: a job of this name is {earlier.state}; choose another name")
            placed, certificate = self.place(spec, now)
        except (ConfigError, PoolsFull, CertificateError) as error:
            self._state.answer(client, call.seq, str(error))
            return
        member = next(each for each in placed.group.members if each.job.name == spec.name)
        body = {
            "job": spec.name,
            "group": placed.group.name,
            "rollout_nodes": list(member.rollout_nodes),
            "why": placed.why,
            "iteration_s": certificate.bounds[spec.name].longest_s,
            "limit_s": certificate.bounds[spec.name].limit_s,
        }
        if call.dry_run:
            self._state.answer(client, call.seq, body={**body, "state": "would run"})
            return
        record = JobRecord(
            spec=call.spec,
            group=placed.group.name,
            rollout_nodes=member.rollout_nodes,
            why=placed.why,
            submitted_by=caller,
            number=max((each.number for each in self._state.jobs.values()), default=0) + 1,
        )
        self._state.jobs[spec.name], self._state.specs[spec.name] = record, spec
        self._state.meter.forget(spec.name)
        self._state.forget_past(spec.name)
        self._state.form(placed.group, certificate, now)
        self._state.event("submitted", spec.name, group=placed.group.name)
        self._start(spec.name, now)
        self._moves.rearrange(now)
        self._state.answer(client, call.seq, body={**body, "state": record.state})

    def place(self, spec: RunSpec, now: float, avoid: str | None = None) -> tuple[Placed, Certificate]:
        """Returns a group for the job whose order is certified, but never the group `avoid`.

        Raises: ConfigError, PoolsFull, CertificateError.
        """
        residents, closed = self._state.residents(now), dict(self._state.drained)
        if avoid is not None:
            closed[avoid] = ["all"]
        placed = self._state.groups.place(spec, closed, residents, now)
        try:
            return placed, self._state.certify(placed.group)
        except CertificateError:
            if spec.group is not None:
                raise
            placed = self._state.groups.place_alone(spec, residents, now)
            return placed, self._state.certify(placed.group)

    def start_waiting(self, now: float) -> None:
        """Starts the jobs that waited for nodes and have them now."""
        waiting = [
            name
            for name, record in self._state.jobs.items()
            if record.state is JobState.RUNNING and record.host is None
        ]
        if waiting:
            self._state.settle()
        for name in waiting:
            record = self._state.jobs[name]
            if self._state.hosts_of(record.group, record.rollout_nodes) is not None:
                self._start(name, now)

    def _start(self, name: str, now: float) -> None:
        """Starts a new attempt on the host of the job's nodes, or lets the job wait for nodes."""
        self._state.changed(name)
        self._moves.switch(name, now, is_warm=False)
        record = self._state.jobs[name]
        self._state.settle()
        hosts = self._state.hosts_of(record.group, record.rollout_nodes)
        host = hosts[0] if hosts is not None else None
        if record.host is not None and host != record.host:  # else its runner ends what it has
            self._state.order(Stop(job=name, attempt=record.attempt, is_lost=True, forget=True))
        record.host, record.is_leaving = host, False
        if host is None and record.attempt == 0:
            return
        record.attempt += 1  # also without a host: what may still run of the last attempt is nobody's
        if host is None:
            return
        accounts.started(record, now, self._state.clock)
        self._state.event("started", name, attempt=record.attempt, iteration=record.num_done, host=host)
        self._state.order(
            Start(
                job=name,
                attempt=record.attempt,
                spec=record.spec,
                first_iteration=record.num_done,
                group=record.group,
                rollout_nodes=list(record.rollout_nodes),
            )
        )

    def start_again(self, name: str, why: str, now: float) -> None:
        """Starts a new attempt after the last completed iteration."""
        self._free(name, now)
        self._state.jobs[name].num_restarts += 1
        self._state.jobs[name].note = why
        self._start(name, now)

    def _free(self, name: str, now: float) -> None:
        """No process of this attempt runs any more: its nodes go to the next job."""
        self._state.permits_of(name).drop(name, now)
        self._state.meter.dropped(name)
        self._state.jobs[name].waiting = None
        self._state.progress.pop(name, None)
        self._state.changed(name)
        self._state.changed_group(self._state.jobs[name].group)
        self._permits.grant(self._state.jobs[name].group, now)

    def exited(self, client: str, call: Exited, now: float) -> None:
        """A job's process has ended: the job is over, or starts again."""
        self._state.answer(client, call.seq)
        record = self._state.jobs.get(call.job)
        if record is None or record.attempt != call.attempt or record.state.is_over:
            return
        self._state.event("exited", call.job, attempt=call.attempt, exit_status=call.exit_status)
        num_iterations = self._state.specs[call.job].iterations
        how = f"attempt {call.attempt} ended with status {call.exit_status}"
        if record.state is JobState.CANCELLING:
            self.end(call.job, JobState.CANCELLED, "", now)
        elif record.is_leaving:
            self._free(call.job, now)
            self._start(call.job, now)
        elif call.cannot_start is not None:  # another attempt would fail in the same way
            self.end(call.job, JobState.FAILED, f"{how}: {call.cannot_start}", now)
        elif call.exit_status == 0 and record.num_done >= num_iterations:
            self.end(call.job, JobState.DONE, "", now)
        elif call.exit_status == 0:
            note = f"{how} after {record.num_done} of {num_iterations} iterations"
            self.end(call.job, JobState.FAILED, note, now)
        elif record.num_crashes >= self._state.specs[call.job].max_restarts:
            note = f"{how}: crash {record.num_crashes + 1} in iteration {record.num_done}"
            self.end(call.job, JobState.FAILED, note, now)
        else:
            record.num_crashes += 1
            self.start_again(call.job, how, now)

    def end(self, name: str, state: JobState, note: str, now: float) -> None:
        """The job is over: frees its place and its memory."""
        record = self._state.jobs[name]
        record.state, record.note = state, note
        self._free(name, now)
        self._moves.forget(name)
        self._state.groups.remove(name, record.group)
        self._state.event(state.value, name)
        self._state.order(Stop(job=name, attempt=record.attempt, forget=True))
        self._moves.rearrange(now)

    def cancel(self, client: str, call: Cancel, now: float) -> None:
        """Cancels a job; it is over when its process has ended."""
        record = self._state.jobs.get(call.job)
        if record is None:
            self._state.answer(client, call.seq, self._state.unknown(call.job))
            return
        if record.state is JobState.RUNNING:
            record.state = JobState.CANCELLING
            record.waiting = None
            self._state.changed(call.job)
            if call.job not in self._state.permits_of(call.job).holds:
                self._state.permits_of(call.job).drop(call.job, now)  # what it waits for
            self._state.order(Stop(job=call.job, attempt=record.attempt))
            if record.host is None:
                self.end(call.job, JobState.CANCELLED, "", now)
        self._state.answer(client, call.seq, body={"job": call.job, "state": record.state})
