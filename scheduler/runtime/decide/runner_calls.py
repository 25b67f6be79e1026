"""The runner that starts and ends jobs' processes: it appears, comes back, and says how many nodes there are.

Owns the answers to it. The nodes of a process go to no other job before the process is known to have ended.
A runner that runs an attempt which it should not run is told to end it. Pure: takes ``now``.
"""

import logging

from msgspec.structs import replace

from rose.scheduler.runtime.channel.messages import Awaiting, Hello, Nodes, Placed, Stop
from rose.scheduler.runtime.decide.job_calls import JobCalls
from rose.scheduler.runtime.decide.permit_calls import PermitCalls
from rose.scheduler.runtime.decide.records import JobState, RunnerRow
from rose.scheduler.runtime.decide.state import State

logger = logging.getLogger(__name__)


class RunnerCalls:
    """Answers Awaiting, Hello, Nodes and Placed calls."""

    def __init__(self, state: State, permits: PermitCalls, jobs: JobCalls) -> None:
        self._state = state
        self._permits = permits
        self._jobs = jobs

    def awaiting(self, client: str, call: Awaiting) -> None:
        """The runner is not ready: jobs are queued meanwhile."""
        self._state.runner_waits_for = call.what
        self._state.has_new_room = True  # the queued jobs' reason is another one
        self._state.answer(client, call.seq)

    def hello(self, client: str, call: Hello, now: float) -> None:
        """A runner has connected: starts the jobs that it lacks, and stops those that it should not have."""
        # A runner that says hello again says once alone who leaves; an attempt's number is never used again.
        leaving = self._state.runner.leaving if self._state.runner is not None else {}
        runner = RunnerRow(
            client=client,
            log_folder=call.log_folder,
            host=call.host,
            leaving=leaving,
            num_devices=call.num_devices,
        )
        self._state.set_runner(runner, call.num_nodes)
        self._state.runner_waits_for = None
        self._state.answer(client, call.seq)
        lacking = [
            name for name in self._state.live if call.running.get(name) != self._state.jobs[name].attempt
        ]
        for name, attempt in call.running.items():
            record = self._state.jobs.get(name)
            is_right = record is not None and record.state is JobState.RUNNING
            if record is None or not is_right or record.attempt != attempt:
                has_no_place = record is None or not record.state.is_placed
                self._state.send(client, Stop(job=name, attempt=attempt, is_lost=True, forget=has_no_place))
            if record is None:
                self._state.strays[name] = attempt
            elif record.attempt < attempt:  # this scheduler lacks what an earlier one has committed
                record.attempt = attempt
                self._state.changed(name)
        for name in list(self._state.live):
            record = self._state.jobs[name]
            if not record.state.is_placed:
                continue
            if record.host is None:
                self._jobs.start(name, now)
            elif name in lacking:
                self._jobs.bury(name, "its runner was started again", now)

    def nodes(self, client: str, call: Nodes) -> None:
        """There are more or fewer nodes. Jobs whose nodes go away leave them after their iteration."""
        self._state.answer(client, call.seq)
        runner = self._state.runner
        if runner is not None and runner.client == client:
            self._state.runner_waits_for = None
            self._state.has_new_room = True
            self._state.set_runner(replace(runner, leaving=dict(call.leaving)), call.num_nodes)

    def placed(self, client: str, call: Placed, now: float) -> None:
        """Notes where an attempt's processes are, for people."""
        self._state.answer(client, call.seq)
        record = self._state.jobs.get(call.job)
        if record is not None and record.attempt == call.attempt:
            record.places, record.runs = call.places, call.runs
            if call.runs and record.state.is_placed:
                self._permits.begin(call.job, now)
            else:
                self._state.hung_s.pop(call.job, None)
            self._state.changed(call.job)
