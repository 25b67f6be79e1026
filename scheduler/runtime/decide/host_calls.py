"""Hosts that appear, fall silent and come back, and what becomes of the jobs on them.

Owns the answers to runners about their hosts. A job whose nodes are on a silent host is started again on
other nodes or waits for some; no other job is touched. A host that runs an attempt it should not run is told
to end it. Pure: takes ``now``.
"""

import logging

import msgspec

from rose.scheduler.cluster.model import POOL_PHASES
from rose.scheduler.runtime.channel.messages import Alive, Hello, Stop
from rose.scheduler.runtime.decide.hosts import Host
from rose.scheduler.runtime.decide.job_calls import JobCalls
from rose.scheduler.runtime.decide.records import JobState
from rose.scheduler.runtime.decide.state import State

logger = logging.getLogger(__name__)


class HostCalls:
    """Answers Hello and Alive calls."""

    def __init__(self, state: State, jobs: JobCalls) -> None:
        self._state = state
        self._jobs = jobs

    def hello(self, client: str, call: Hello, now: float) -> None:
        """A runner has connected: starts the jobs that it lacks, and stops those that it should not have."""
        num_nodes = (
            {kind: call.num_nodes.get(kind, 0) for kind in POOL_PHASES}
            if call.num_nodes is not None
            else None
        )
        host = Host(client=client, log_folder=call.log_folder, num_nodes=num_nodes)
        self._state.hosts.by_name[call.host] = host
        self._state.hosts.heard_s[call.host] = now
        self._state.keep(f"host:{call.host}", msgspec.json.encode(host))
        self._state.settle_all()
        self._state.answer(client, call.seq)
        for name, attempt in call.running.items():
            record = self._state.jobs.get(name)
            is_its_own = record is not None and (record.host, record.attempt) == (call.host, attempt)
            if record is None or not is_its_own or record.state is not JobState.RUNNING:
                self._state.send(client, Stop(job=name, attempt=attempt, is_lost=True))
        for name in list(self._state.live):
            record = self._state.jobs[name]
            if (
                not record.state.is_placed
                or record.host != call.host
                or call.running.get(name) == record.attempt
            ):
                continue
            if record.state is JobState.CANCELLING:
                self._jobs.end(name, JobState.CANCELLED, "", now)
            else:
                self._jobs.start_again(name, "its runner was started again", now)
        self._jobs.start_waiting(now)
        self._state.has_new_room = True

    def alive(self, client: str, call: Alive, now: float) -> None:
        """An agent's heartbeat. One that counts as dead is told to say Hello again."""
        self._state.answer(client, call.seq)
        host = self._state.hosts.by_name.get(call.host)
        if host is None or host.client != client or not host.is_alive:
            self._state.answer(client, 0)
            return
        self._state.hosts.heard_s[call.host] = now

    def lose(self, host: str, now: float) -> None:
        """A host has been silent for its lease: its jobs continue on other hosts, or wait for nodes."""
        live = {name: self._state.jobs[name] for name in self._state.live}
        running = {name: record for name, record in live.items() if record.state.is_placed}
        lost = [
            name
            for name, record in running.items()
            if record.host == host or host in (self._state.hosts_of(record.group, record.rollout_nodes) or ())
        ]
        dead = self._state.hosts.by_name[host]
        dead.is_alive = False
        self._state.keep(f"host:{host}", msgspec.json.encode(dead))
        self._state.settle_all()
        self._state.event("host_lost", "", host=host)
        logger.warning("host lost name=%s jobs=%s", host, ",".join(lost))
        for name in lost:
            if running[name].state is JobState.CANCELLING:
                self._jobs.end(name, JobState.CANCELLED, "", now)
            else:
                self._jobs.start_again(name, f"host {host} fell silent", now)
