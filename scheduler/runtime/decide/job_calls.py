"""A job's life: placed, started, started again after a crash, ended.

Owns the answers to those who cancel jobs and to the runners that start processes. A job runs only
in a group whose order is certified, and a job that ends returns its nodes and memory. Pure: takes ``now``;
runners are told to start processes.
"""

import signal
from dataclasses import replace

from rose.errors import ConfigError, JobRefused, PoolsFull
from rose.scheduler.group.certificate import Certificate, CertificateError, certify
from rose.scheduler.group.model import Group, Phase
from rose.scheduler.group.order import own_order
from rose.scheduler.runtime.channel.messages import Cancel, Exited, Start, Stop
from rose.scheduler.runtime.decide.move_calls import MoveCalls
from rose.scheduler.runtime.decide.permit_calls import HUNG, LATE, UNHEARD, PermitCalls, named
from rose.scheduler.runtime.decide.placing import Groups, JoinedGroup
from rose.scheduler.runtime.decide.records import JobState
from rose.scheduler.runtime.decide.state import State
from rose.scheduler.runtime.job.spec import Launch, RunSpec


class JobCalls:
    """Answers Cancel and Exited calls."""

    def __init__(self, state: State, permits: PermitCalls, moves: MoveCalls) -> None:
        self._state = state
        self._permits = permits
        self._moves = moves

    def place(
        self, spec: RunSpec, now: float, avoid: str | None = None, groups: Groups | None = None
    ) -> tuple[JoinedGroup, Certificate]:
        """Returns the best group for the job whose order is certified, but never the group `avoid`.

        groups: as they would be; None: as they are. Raises: ConfigError, PoolsFull, CertificateError.
        """
        aside = {avoid} if avoid is not None else set[str]()
        groups = groups if groups is not None else self._state.groups
        earlier = self._state.jobs.get(spec.name)
        resident = (
            self._state.resident(spec.name, now) if earlier is not None and earlier.is_resumed else None
        )
        while True:
            placed = groups.place(spec, now, aside, resident)
            if spec.group is not None:
                placed = replace(placed, group=self._state.ordered(placed.group, now))
            try:
                self._check_placement(spec, placed.group)
                return placed, self._state.certify(placed.group, now)
            except (CertificateError, JobRefused):
                if placed.group.name not in groups.by_name or spec.group is not None:
                    raise
                aside.add(placed.group.name)

    def _check_placement(self, spec: RunSpec, group: Group) -> None:
        """Raises: JobRefused if Ray can't place the group's nodes as this job and the others ask."""
        if self._state.cluster.ray is None:
            return
        others = [member for member in group.members if member.job.name != spec.name]
        asked = {self._state.specs[member.job.name].placement for member in others} - {spec.placement}
        if asked:
            raise JobRefused(
                f"{spec.name}: placement {spec.placement}: the jobs of group {group.name} have placement "
                f"{', '.join(sorted(asked))}; use the same, or leave `group` out"
            )
        known = {node for member in others for node in member.rollout_nodes}
        more = {node for member in group.members for node in member.rollout_nodes} - known
        if spec.placement.is_strict and others and more:
            raise JobRefused(
                f"{spec.name}: group {group.name} is placed {spec.placement} and can't get {len(more)} more "
                "rollout nodes; ask for its own number of nodes, or leave `group` out"
            )

    def check_devices(self, spec: RunSpec) -> None:
        """Raises: JobRefused if a node, or the one machine of all nodes, has fewer devices than ranks."""
        ray, runner = self._state.cluster.ray, self._state.runner
        if spec.num_ranks == 1:
            return
        if ray is None:
            num_devices = runner.num_devices if runner is not None else 0
            if 0 < num_devices < spec.num_ranks:
                raise JobRefused(
                    f"{_starts_all(spec, 'this machine', num_devices)}; for ranks that need none, start the "
                    "scheduler with CUDA_VISIBLE_DEVICES="
                )
            return
        is_once = spec.launch is Launch.ONCE
        num_local = spec.num_ranks if is_once else -(-spec.num_ranks // spec.num_nodes)
        for kind in (Phase.ROLLOUT,) if is_once else Phase:
            num_devices = int(ray.bundle(kind).get("GPU", 0))
            if not 0 < num_devices < num_local:
                continue
            if is_once:
                raise JobRefused(f"{_starts_all(spec, 'the first rollout node', num_devices)}, or per-node")
            raise JobRefused(
                f"{spec.name}: num_ranks {spec.num_ranks} on {spec.num_nodes} nodes are {num_local} on "
                f"each, and a {kind} node has {num_devices} GPUs; use at most "
                f"{num_devices * spec.num_nodes} ranks, or more nodes"
            )

    def check_router(self, spec: RunSpec) -> None:
        """Raises: JobRefused if the job wants to borrow serving GPUs and can't."""
        if spec.borrow is not None and spec.borrow.asked_nodes is not None:
            raise JobRefused(
                f"{spec.name}: borrow.asked_nodes is set by the scheduler when it hands nodes back; remove it"
            )
        is_sized = spec.borrow is not None and spec.borrow.fewest_nodes is not None
        if is_sized and spec.has_ranks_on_each_node and self._state.cluster.ray is None:
            raise JobRefused(
                f"{spec.name}: borrow.fewest_nodes: on one machine the {spec.num_ranks} ranks of launch "
                f"{spec.launch} would go on when nodes are handed back; use launch once, one rank, or a Ray "
                "cluster"
            )
        if spec.borrow is not None and self._state.cluster.router is None:
            raise JobRefused(
                f"{spec.name}: borrow asks for serving GPUs, and the cluster's file names no router that "
                "lends them: add `router` there, or remove `borrow`"
            )

    def check_possible(self, spec: RunSpec, now: float) -> None:
        """Raises what refuses the job even where no other job runs, on all nodes that there ever were.

        Raises: ConfigError, PoolsFull, CertificateError.
        """
        if spec.group is not None and spec.group not in self._state.cluster.groups:
            self.place(spec, now)  # a group that was formed for other jobs ends with them
            return
        runner = self._state.runner
        offered = runner.most_nodes if runner is not None and runner.most_nodes is not None else {}
        for kind, num_nodes in offered.items():
            wanted = spec.phases[kind].nodes
            if wanted > num_nodes:
                raise JobRefused(
                    f"{spec.name}: {kind} needs {wanted} nodes, but all hosts together offer {num_nodes}; "
                    "ask for fewer nodes, or start more hosts first"
                )
        empty = Groups(self._state.cluster, self._state.resident)
        empty.offered = offered
        group = empty.place(spec, now).group
        certify(group, own_order(group))

    def is_possible_now(self, spec: RunSpec, now: float) -> bool:
        """Returns whether the job has a place if no job runs on the nodes that there are and that are not
        drained."""
        empty = self._state.groups.without_jobs(self._state.groups.offered, spec.group)
        return self.has_place(empty, spec, now)

    def has_place(self, groups: Groups, spec: RunSpec, now: float) -> bool:
        """Returns whether the job has a place in these groups, in an order that can be certified."""
        try:
            group = groups.place(spec, now).group
            certify(group, own_order(group))
        except (ConfigError, PoolsFull, CertificateError):
            return False
        return True

    def admit(self, name: str, placed: JoinedGroup, certificate: Certificate, now: float) -> None:
        """Gives a waiting job its place, and starts it."""
        record = self._state.jobs[name]
        [member] = [each for each in placed.group.members if each.job.name == name]
        record.group, record.rollout_nodes, record.why = placed.group.name, member.rollout_nodes, placed.why
        record.placed(now, self._state.clock)
        self._state.become(name, JobState.RUNNING)
        self._state.form(placed.group, certificate, now)
        self._state.event("placed", name, group=record.group)
        self.start(name, now)
        self._state.has_come_or_gone = True

    def start(self, name: str, now: float) -> None:
        """Starts a new attempt, or lets the job wait for a runner."""
        self._state.changed(name)
        self._moves.switch(name, now, is_warm=False)
        record, runner = self._state.jobs[name], self._state.runner
        record.is_leaving = False
        record.host = runner.host if runner is not None else None
        if runner is None:
            return
        record.attempt += 1
        record.num_ranks = self._state.specs[name].num_ranks
        record.places, record.heard, record.is_warm = [], [], False
        record.runs = self._state.is_beside  # else the runner says when it has placed the processes
        record.started(now, self._state.clock)
        if record.runs:
            self._permits.begin(name, now)
        self._state.groups.touch(record.group)  # the time without a process has cost it some of its bank
        self._state.event("started", name, attempt=record.attempt, iteration=record.num_done)
        self._state.order(
            Start(
                job=name,
                attempt=record.attempt,
                spec=record.spec,
                first_iteration=record.num_done,
                group=record.group,
                rollout_nodes=list(record.rollout_nodes),
                num_train_nodes=self._state.groups.by_name[record.group].num_train_nodes,
                variables=self._state.loans.variables(self._state.specs[name], record.number),
            )
        )

    def start_again(self, name: str, why: str, now: float) -> None:
        """Starts a new attempt after the last completed iteration. A job that gives way waits for a place."""
        self._state.jobs[name].num_restarts += 1
        if self._state.jobs[name].gives_way is not None:
            self.requeue(name, now)
            return
        self._free(name, now)
        self._state.jobs[name].note = why
        self.start(name, now)

    def bury(self, name: str, why: str, now: float) -> None:
        """The job's process is known to have ended with its host: the job is over, or starts again."""
        if self._state.jobs[name].state is JobState.CANCELLING:
            self.end(name, JobState.CANCELLED, "", now)
        elif self._state.jobs[name].state is JobState.PREEMPTING:
            self.requeue(name, now)
        else:
            self.start_again(name, why, now)

    def _free(self, name: str, now: float) -> None:
        """Gives the nodes of an attempt of which no process runs any more to the next job."""
        self._state.permits_of(name).drop(name, now)
        self._state.meter.dropped(name)
        self._permits.forget(name)
        self._state.progress.pop(name, None)
        self._state.changed(name)
        self._state.changed_group(self._state.jobs[name].group)
        self._permits.grant(self._state.jobs[name].group, now)

    def exited(self, client: str, call: Exited, now: float) -> None:
        """A job's process has ended: the job is over, or starts again."""
        self._state.answer(client, call.seq)
        record = self._state.jobs.get(call.job)
        if record is None or record.attempt != call.attempt or not record.state.is_placed:
            return
        self._state.event("exited", call.job, attempt=call.attempt, exit_status=call.exit_status)
        num_iterations = self._state.specs[call.job].iterations
        known = f": {call.why}" if call.why is not None else self._blamed(call.job)
        how = f"attempt {call.attempt} ended with status {_shown(call.exit_status)}{known}"
        if record.state is JobState.CANCELLING:
            self.end(call.job, JobState.CANCELLED, "", now)
        elif record.state is JobState.PREEMPTING:
            self.requeue(call.job, now)
        elif record.is_leaving:
            self._free(call.job, now)
            self.start(call.job, now)
        elif call.lost is not None:
            self.start_again(call.job, call.lost, now)
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

    def _blamed(self, name: str) -> str:
        """Names the ranks that were silent, or for which others waited, for the note of the attempt's end."""
        hold, note = self._state.permits_of(name).holds.get(name), self._state.jobs[name].note
        if hold is None or not hold.silent:
            return f"; {note}" if note.startswith((LATE, UNHEARD, HUNG)) else ""
        who = named(hold.silent, self._state.jobs[name].num_ranks)
        return f": {who} fell silent in {hold.phase} of iteration {hold.iteration}"

    def end(self, name: str, state: JobState, note: str, now: float) -> None:
        """The job is over: frees its place and its memory."""
        record = self._state.jobs[name]
        self._state.become(name, state)
        record.note, record.gives_way = note, None
        self._vacate(name, now)
        self._state.event(state.value, name)

    def requeue(self, name: str, now: float) -> None:
        """Puts a job that gives way back into the queue. No process of it runs any more."""
        record = self._state.jobs[name]
        assert record.gives_way is not None
        by = record.gives_way.to
        self._vacate(name, now)
        record.preempted(self._state.jobs[by], by, now)
        self._state.become(name, JobState.QUEUED)
        self._state.event("preempted", name, by=by, iteration=record.num_done)

    def _vacate(self, name: str, now: float) -> None:
        """Frees the job's place and its memory."""
        record = self._state.jobs[name]
        self._free(name, now)
        self._moves.forget(name)
        was_multi_rate = bool(self._state.groups.by_name[record.group].iterations)
        rest = self._state.remove(name, record.group)
        if was_multi_rate:  # the others' iterations were chosen for this job as well
            self._moves.issue_again(rest, now)
        self._state.order(Stop(job=name, attempt=record.attempt, forget=True))
        self._state.has_come_or_gone = True

    def cancel(self, client: str, call: Cancel, now: float) -> None:
        """Cancels a job. One that runs is over when its process has ended."""
        record = self._state.jobs.get(call.job)
        if record is None:
            self._state.answer(client, call.seq, self._state.unknown(call.job))
            return
        if record.state.is_waiting:
            self._state.become(call.job, JobState.CANCELLED)
            self._state.event("cancelled", call.job)
            self._state.has_new_room = True  # it may have kept others from being placed
        elif record.state in (JobState.RUNNING, JobState.PREEMPTING):
            self._state.become(call.job, JobState.CANCELLING)
            record.waiting = None
            if call.job not in self._state.permits_of(call.job).holds:
                self._state.permits_of(call.job).drop(call.job, now)  # what it waits for
            self._state.order(Stop(job=call.job, attempt=record.attempt))
            if record.host is None:
                self.end(call.job, JobState.CANCELLED, "", now)
        self._state.answer(client, call.seq, body={"job": call.job, "state": record.state})


def _starts_all(spec: RunSpec, where: str, num_devices: int) -> str:
    """Says that more ranks start in one place than it has devices."""
    return (
        f"{spec.name}: num_ranks {spec.num_ranks}: launch {spec.launch} starts all of them on {where}, which "
        f"has {num_devices} GPUs; use at most {num_devices}"
    )


def _shown(exit_status: int) -> str:
    """Returns an exit status as people know it: -9 is a SIGKILL."""
    known = exit_status < 0 and -exit_status in set(signal.Signals)
    return f"{exit_status} ({signal.Signals(-exit_status).name})" if known else str(exit_status)
