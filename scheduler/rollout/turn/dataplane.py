"""The router's parts, put together.

Owns: the construction of the parts and what an operator does to all of them: abort, change the version rule,
show the status.
Promises: each part exists once.
Never does: run a turn (runner.py), speak HTTP (http/).
"""

import ssl
import time
from collections.abc import Callable, Mapping

import aiohttp

from rose.scheduler.rollout.placing.cost import CostPolicy
from rose.scheduler.rollout.placing.policy import PaperPolicy, PinnedPolicy, PlacementPolicy, TurnwisePolicy
from rose.scheduler.rollout.placing.versions import VersionMode, VersionRule
from rose.scheduler.rollout.router_config import RouterConfig
from rose.scheduler.rollout.turn.accounts import JobAccounts
from rose.scheduler.rollout.turn.attempt.attempt import AttemptParts
from rose.scheduler.rollout.turn.dispatch import Dispatcher
from rose.scheduler.rollout.turn.records import TurnRecords
from rose.scheduler.rollout.turn.rerouting import Rerouting
from rose.scheduler.rollout.turn.runner import TurnRunner
from rose.scheduler.rollout.turn.trajectories import Trajectories
from rose.scheduler.rollout.workers.registry import Registry
from rose.scheduler.rollout.workers.shown import worker_json
from rose.scheduler.rollout.workers.wire import Wire
from rose.scheduler.rollout.workers.worker import Worker

POLICIES: Mapping[str, Callable[..., PlacementPolicy]] = {
    "paper": PaperPolicy,
    "cost": CostPolicy,
    "turnwise": TurnwisePolicy,
    "pinned": PinnedPolicy,
}


class DataPlane:
    """Everything behind the router's HTTP routes. Lives on the router's event loop."""

    def __init__(self, config: RouterConfig, http: aiohttp.ClientSession, trusts: ssl.SSLContext) -> None:
        """trusts: the certificates that workers at https addresses must show one of."""
        self.config = config
        self.http = http
        self.wire = Wire(trusts)
        self.jobs = JobAccounts(config)
        self.registry = Registry(
            config,
            http,
            self.wire,
            self._workers_changed,
            self._num_waiting,
            self._is_waited_for,
            lambda job: self.jobs.spec(job).priority,
        )
        members = self.registry.members()
        self.trajectories = Trajectories(config, members, self.jobs)
        self.records = TurnRecords(config, self.jobs, self.registry.catalogue, self.trajectories)
        self.rerouting = Rerouting(config, self.records.counters, self.registry.catalogue)
        self.versions = self._rule(config.version_mode, config.max_lag)
        policy = POLICIES[config.policy](versions=self.versions)
        self.dispatcher = Dispatcher(
            members,
            policy,
            self.jobs,
            self.trajectories,
            config.max_queued_per_job,
            config.weights_s,
        )
        self.dispatcher.pins_versions = config.version_mode is VersionMode.PINNED
        parts = AttemptParts(config=config, http=http, wire=self.wire, records=self.records)
        self.turns = TurnRunner(parts, self.jobs, self.dispatcher, self.rerouting)

    def _workers_changed(self) -> None:
        self.dispatcher.pump()

    def _num_waiting(self) -> int:
        return self.dispatcher.num_queued

    def _is_waited_for(self, worker: Worker, job: str) -> bool:
        return self.dispatcher.is_waited_for(worker, job)

    def _rule(self, mode: VersionMode, max_lag: int) -> VersionRule:
        return VersionRule(mode=mode, max_lag=max_lag, known=self.registry.newest)

    def set_versions(self, mode: VersionMode, max_lag: int) -> None:
        """Places turns by another version rule from now on."""
        self.versions = self._rule(mode, max_lag)
        self.dispatcher.pins_versions = mode is VersionMode.PINNED
        self.dispatcher.set_policy(POLICIES[self.config.policy](versions=self.versions))

    def abort(self, job_name: str | None) -> int:
        """Ends all requests of a job, or of all jobs if it is None. Returns how many there were."""
        aborts = [abort for job in self.jobs if job_name in (None, job.name) for abort in job.aborts]
        for abort in aborts:
            abort()
        return len(aborts)

    def job_status(self) -> dict[str, object]:
        queued = self.dispatcher.queued_by_job()
        jobs, now = (*self.jobs, *self.jobs.without_account()), time.monotonic()
        proves = self.config.admin_key is not None
        return {job.name: job.as_json(queued.get(job.name, 0), now, shows_proof=proves) for job in jobs}

    def status(self) -> Mapping[str, object]:
        now = time.monotonic()
        return {
            "policy": self.config.policy,
            "version_mode": self.versions.mode.value,
            "max_lag": self.versions.max_lag,
            "paused": self.dispatcher.is_paused,
            "workers": [worker_json(worker, now) for worker in self.registry.workers()],
            "queued": self.dispatcher.queued_by_job(),
            "jobs": self.job_status(),
            "sessions": len(self.trajectories.sessions),
            "counters": self.records.counters.as_json(),
        }
