"""Hosts that appear, fall silent and come back, and what becomes of the jobs on them.

Owns the answers to runners about their hosts. A job whose nodes are on a silent host is started again on
other nodes or waits for some; no other job is touched. No node of a living host goes to another job before
the process that had it is known to have ended. A host that runs an attempt it should not run is told to end
it. Pure: takes ``now``.
"""

import logging

import msgspec

from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import Alive, Dead, Hello, Stop
from rose.scheduler.runtime.decide.hosts import Host
from rose.scheduler.runtime.decide.job_calls import JobCalls
from rose.scheduler.runtime.decide.records import JobState
from rose.scheduler.runtime.decide.state import State

logger = logging.getLogger(__name__)


class HostCalls:
    """Answers Hello, Alive and Dead calls."""

    def __init__(self, state: State, jobs: JobCalls) -> None:
        self._state = state
        self._jobs = jobs

    def hello(self, client: str, call: Hello, now: float) -> None:
        """A runner has connected: starts the jobs that it lacks, and stops those that it should not have."""
        num_nodes = (
            {kind: call.num_nodes.get(kind, 0) for kind in Phase} if call.num_nodes is not None else None
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
            must_end = record is None or record.is_fenced or record.state is not JobState.RUNNING
            if must_end or not is_its_own:
                self._state.send(client, Stop(job=name, attempt=attempt, is_lost=True))
        for name in list(self._state.live):
            record = self._state.jobs[name]
            if (
                not record.state.is_placed
                or record.host != call.host
                or call.running.get(name) == record.attempt
            ):
                continue
            self._jobs.bury(name, "its runner was started again", now)
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
        """A host has been silent for its lease.

        A job with all its nodes there continues on other hosts, or waits for nodes. Any other may use nodes
        of living hosts, and keeps them until its process is known to have ended.
        """
        hosts = self._state.hosts.by_name
        homes = {name: self._homes(name) for name in self._state.live}
        lost = [name for name, found in homes.items() if host in found]
        hosts[host].is_alive = False
        self._state.keep(f"host:{host}", msgspec.json.encode(hosts[host]))
        self._state.settle_all()
        self._state.event("host_lost", "", host=host)
        logger.warning("host lost name=%s jobs=%s", host, ",".join(lost))
        why = f"host {host} fell silent"
        for name in lost:
            record = self._state.jobs[name]
            runner = record.host
            # The process of a fenced job may use nodes that have no home or another one by now.
            if not record.is_fenced and not any(hosts[home].is_alive for home in homes[name]):
                self._jobs.bury(name, why, now)
            elif runner is not None and hosts[runner].is_alive:
                self._jobs.fence(name, why, now)
            else:
                note = f"{why}; its nodes elsewhere stay its own until {runner} returns or is said to be off"
                self._jobs.fence(name, f"{note} (rose sched host-dead {runner})", now)

    def dead(self, client: str, call: Dead, now: float) -> None:
        """Somebody knows that a silent host is off, and that no process runs there."""
        host = self._state.hosts.by_name.get(call.host)
        if host is None or host.is_alive:
            problem = f"no host {call.host!r}" if host is None else f"host {call.host} is alive"
            silent = [name for name, each in self._state.hosts.by_name.items() if not each.is_alive]
            error = f"{problem}; the silent hosts are: {', '.join(silent) or 'none'}"
            self._state.answer(client, call.seq, error)
            return
        jobs = [(name, self._state.jobs[name]) for name in self._state.live]
        freed = [name for name, each in jobs if each.state.is_placed and each.host == call.host]
        for name in freed:
            self._jobs.bury(name, f"host {call.host} is off", now)
        self._state.answer(client, call.seq, body={"host": call.host, "freed": freed})

    def _homes(self, name: str) -> set[str]:
        """Returns the hosts of a job's process and of its nodes; none of a job without a process."""
        record = self._state.jobs[name]
        if record.host is None or not record.state.is_placed:
            return set()
        own = {f"rollout-{node}" for node in record.rollout_nodes}
        homes = self._state.hosts.homes.get(record.group, {})
        return {record.host, *(homes[node] for node in homes if node in own or node.startswith("train"))}
