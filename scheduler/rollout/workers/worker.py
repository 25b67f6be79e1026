"""One rollout engine as the router sees it.

Owns: Worker: its health, load, speed, share of the GPU and weights.
Promises: a worker that stalled or came back is on probation (one turn at a time) until it makes a token. What
runs on a worker is told at once when the worker is lost.
Never does: send requests (registry.py, turn/attempt/), place turns (placing/policy.py).
"""

import asyncio
import logging
import math
from collections import Counter

from yarl import URL

from rose.messages import NOTHING_PUBLISHED, Lease, RoutingStatus, parse_version
from rose.scheduler.rollout.formats.events import CHAT_PATH, COMPLETIONS_PATH
from rose.scheduler.rollout.placing.borrowing import UsageWindow
from rose.scheduler.rollout.placing.views import NO_ADAPTERS, NOBODY, AdapterVersions, Contexts, WorkerView
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.workers.answering import AnsweringWorker
from rose.scheduler.rollout.workers.models import ModelCard, adapters_of, with_adapters
from rose.scheduler.rollout.workers.watch import Watch
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

_SHARE_MEMORY_S = 15.0
"""About the length of a turn, which gets the mean share of its time and not that of its first second."""


class Worker(AnsweringWorker):
    """One rollout engine. Lives on the router's event loop.

    Whatever the policies see changes only through methods, each of which drops the cached view: every
    decision asks every worker for its view, mostly between changes.
    """

    def __init__(self, spec: WorkerSpec, config: RouterConfig) -> None:
        super().__init__(spec)
        self.turn_urls = {path: URL(spec.url + path) for path in (COMPLETIONS_PATH, CHAT_PATH)}
        key = config.worker_api_key
        self.openai_headers = f"Authorization: Bearer {key}\r\n".encode() if key is not None else b""
        self.cap = config.turns_per_gpu * spec.gpus
        self.is_alive = False
        self.is_active = True
        self.is_updating = False
        self.updated_at = -math.inf
        """When its weights last changed. The time between tokens before and after that says nothing of its
        speed."""
        self.is_draining = False
        self.is_removed = False
        """Whether an admin has removed it, so that what ran on it did not fail."""
        self.status: RoutingStatus | None = None
        self.weight_version: WeightVersion | None = None
        self.adapters: AdapterVersions = NO_ADAPTERS
        self.is_held_by_serving = False
        """Whether its gate has declined steps lately: it runs, and waits for serving."""
        self.is_gate_declining = False
        self.has_yielded = False
        self.problem: str | None = None
        self.owner: str | None = None
        """The job that this router lends the GPU to."""
        self.lent_run: str | None = None
        """The run that this job's turns get, and that the worker is to follow."""
        self.switch_s = 0.0
        """About how long it takes until it has the weights of another run."""
        self._switching_since: float | None = None
        self._has_subscriber = False
        """Whether it or an engine before it said so; base weights then say nothing of what a run has
        published."""
        self.run_since = -math.inf
        """When it came to its run."""
        self.lease: Lease | None = None
        """What the worker grants this router; None: it leaves everything to it."""
        self.is_due = asyncio.Event()
        """Set when the worker has to be asked at once."""
        self.gone_routers: set[str] = set()
        """Those of whose death the worker has to be told, once."""
        self.tenants: Counter[str] = Counter()
        """The number of turns on it by job."""
        self.pending_prefill_tokens = 0.0
        self.watches: set[Watch] = set()
        self.models: Contexts | None = None
        """What it serves, or served before it was lost; None: it does not say. Set before it becomes
        alive."""
        self.said_models: Contexts | None = None  # with each version of an adapter by itself
        self.cards: list[ModelCard] = []
        """The models as it shows them."""
        self.models_asked_at = -math.inf
        self.num_turns = 0
        self.kv_usage = UsageWindow(config.kv_window_s)
        self._telemetry_max_age_s = self._share_lasts_s = config.telemetry_max_age_s
        self._first_token_s = config.first_token_s
        self._status_at = 0.0

    def note_changes(self, changed: set[str]) -> None:
        """Adds the worker's id to this set whenever its view has changed."""
        self._changed = changed
        self._change()

    # What turns do to it --------------------------------------------------------------------------------

    def begin_turn(self, job: str, missing_tokens: float) -> None:
        """Takes in a turn that has `missing_tokens` of its prompt to prefill."""
        self._change()
        if not self.in_flight:
            self.speed.wakes()
        self.num_turns += 1
        self.tenants[job] += 1
        self.in_flight += 1
        self.pending_prefill_tokens += missing_tokens

    def end_prefill(self, missing_tokens: float) -> None:
        """Notes that a turn's prefill no longer delays others."""
        self._change()
        self.pending_prefill_tokens -= missing_tokens

    def end_turn(self, job: str) -> None:
        """Notes that a turn has left."""
        assert self.in_flight > 0, f"worker {self.id} was released more often than acquired"
        self._change()
        self.tenants[job] -= 1
        if not self.tenants[job]:
            del self.tenants[job]  # clients may name a job for each run
        self.in_flight -= 1
        if self.lease is not None and self.lease.is_wanted and not self.tenants[job]:
            self.is_due.set()  # another router may have the GPU

    def yielded(self) -> None:
        """Keeps new turns away until the next heartbeat: serving needs the GPU."""
        self._change()
        self.has_yielded = True

    def unleased(self) -> None:
        """Keeps new turns away until the worker, which is asked at once, has said what it leases."""
        self._change()
        if self.lease is not None:
            self.lease = self.lease.model_copy(update={"turns": 0})
        self.is_due.set()

    def without_lease(self) -> None:
        """Notes that it is a stock vLLM, which leaves everything to this router, whatever it was before."""
        if self.lease is not None:
            self._change()
            self.lease = None

    def deactivated(self) -> None:
        """Keeps new turns away until a heartbeat reports weights on the GPU again."""
        self._change()
        self.is_active = False

    # What the operator and the scheduler decide -------------------------------------------------------------

    def drain(self) -> None:
        """Keeps new turns away for good."""
        self._change()
        self.is_draining = True

    def lend(self, owner: str | None, run: str | None = None) -> None:
        """Lends a serving GPU to one job, to NOBODY, or to every job (None), once the worker agrees and has
        weights of the run, if one is given."""
        self._change()
        # An adapter is a model beside others, and not what the worker follows.
        self.owner, self.lent_run = owner, run if run not in self.adapters else None
        if self.is_contested:
            self.is_due.set()

    def told_gone(self, router: str | None) -> None:
        """Notes that the worker knows of a router's death, which may live again."""
        self.gone_routers.discard(router or "")
        if self.gone_routers:
            self.is_due.set()

    # What policies see ----------------------------------------------------------------------------------

    @property
    def is_eligible(self) -> bool:
        """Whether a serving GPU has no memory pressure, an open gate and no waiting rollouts."""
        status = self.status
        if self.has_yielded or self.is_gate_declining:
            return False
        if status is None:
            return True
        return (status.pressure or "").lower() != "pressure" and status.num_waiting == 0

    @property
    def continues_state(self) -> bool:
        """Whether grammars, penalties and bad words go on here over tokens that another worker has made."""
        return self.status is not None and self.status.continues_state

    def view(self) -> WorkerView:
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def _make_view(self) -> WorkerView:
        return WorkerView(
            id=self.id,
            kind=self.spec.kind,
            alive=self.is_alive and self.is_active and not (self.is_draining or self.is_updating),
            in_flight=self.in_flight,
            cap=self._most_turns(),
            eligible=self.is_eligible,
            owner=self._lent_to(),
            models=self.models,
            contexts=self.models or {},
            weight_version=self.weight_version,
            adapters=self.adapters,
            awaits_weights=self._is_dedicated and self.status is not None and self.status.awaits_weights,
            load=self.in_flight / self.cap,
            not_before=self.cooldown_until,
            share=self._share,
            share_until=float("inf") if self._is_dedicated else self._status_at + self._share_lasts_s,
            speed=self.speed.speed(is_idle=not self.in_flight),
            pending_prefill_tokens=self.pending_prefill_tokens,
        )

    def _most_turns(self) -> int:
        granted = self.lease.turns if self.lease is not None else self.cap
        return min(granted, 1 if self.is_on_probation else self.cap)

    def _lent_to(self) -> str | None:
        """Returns its owner, or NOBODY while turns of its previous owner are still on it, or the worker has
        not agreed, or does not have the weights yet."""
        is_agreed = self.lease is None or self._is_dedicated or self.lease.lent_to == self.owner
        has_others = self.owner is not None and self.in_flight > self.tenants[self.owner]
        return self.owner if is_agreed and not has_others and not self._is_switching else NOBODY

    @property
    def _is_switching(self) -> bool:
        """Whether its job has to wait for the weights of its run. A job whose run has published nothing may
        have base weights."""
        status, run, version = self.status, self.lent_run, self.weight_version
        if self.lease is None or self._is_dedicated or run is None or status is None:
            return False
        if version is None:
            return self.base_for is not None and run not in self.base_for
        return version.run_id != run

    @property
    def is_hurried(self) -> bool:
        """Whether the next heartbeat is waited for: the weights change, or the job that has the GPU."""
        is_closing = self.lease is not None and self.lease.lent_to == NOBODY
        return self.is_updating or self._is_switching or (is_closing and not self._is_dedicated)

    @property
    def is_contested(self) -> bool:
        """Whether this router would lend the GPU to another job, or for another run, than it is lent to."""
        lease, ours = self.lease, (self.owner, self.lent_run)
        return lease is not None and bool(self.owner) and ours != (lease.lent_to, lease.run)

    @property
    def follows_loans(self) -> bool:
        """Whether it gets the weights of the run of the job that it is lent to."""
        return self.status is not None and self.status.follows_loans

    @property
    def refused_runs(self) -> frozenset[str]:
        """The runs whose weights it could not get lately."""
        return frozenset(self.status.run_problems) if self.status is not None else frozenset()

    @property
    def base_for(self) -> frozenset[str] | None:
        """The runs for whose jobs base weights will do, because they have published nothing; None: all."""
        if self._is_dedicated or not self._has_subscriber or self.status is None:
            return None
        problems = self.status.run_problems
        return frozenset(run for run, found in problems.items() if found == NOTHING_PUBLISHED)

    def run_problem(self, run: str | None) -> str | None:
        """Returns why it could not get the weights of a run lately; None if nothing is known."""
        found = self.status.run_problems.get(run or "") if self.status is not None else None
        return f"worker {self.id}: {found}" if found is not None else None

    def idle_s(self, now: float) -> float:
        """Returns how long no turn has run on it, as far as tokens tell."""
        return 0.0 if self.in_flight else now - self.last_token_at

    @property
    def holder(self) -> str | None:
        """The job that has the GPU: by the word of the worker, or else by this router's own."""
        return self.lease.lent_to if self.lease is not None and self.lease.lent_to else self.owner

    @property
    def num_routers(self) -> int:
        """The routers with turns on it, this one included."""
        others = (self.lease.other_users, self.lease.others > 0) if self.lease is not None else (0,)
        return 1 + max(others)  # engines of earlier versions tell the turns alone

    # What heartbeats say --------------------------------------------------------------------------------

    def take_status(self, status: RoutingStatus, now: float, every_s: float = 0.0) -> None:
        """Takes in what the worker reports at `now`, as it does every `every_s` seconds."""
        self._change()
        self._share_lasts_s = max(self._telemetry_max_age_s, 2 * every_s)
        for run in status.run_problems.keys() - self.refused_runs:
            if (found := status.run_problems[run]) != NOTHING_PUBLISHED:
                text = "GPU goes back: worker=%s can't get weights of run=%s: %s"
                logger.warning(text, self.id, run, found)
        self._take_weights(status, now)
        self._take_adapters(status)
        before, gate = self.status.gate if self.status is not None else None, status.gate
        self.is_held_by_serving = self.is_gate_declining = False
        if before is not None and gate is not None:
            self.is_held_by_serving = gate.declined_steps > before.declined_steps
            self.is_gate_declining = self.is_held_by_serving and gate.admitted_steps == before.admitted_steps
        self.has_yielded = False
        self.lease = status.lease
        if status.is_active != self.is_active:
            logger.info("worker active=%s worker=%s", status.is_active, self.id)
        self.is_active = status.is_active
        if not self._is_dedicated:
            self._take_share(status, now)
        if status.serving_kv_usage is not None:
            self.kv_usage.add(status.serving_kv_usage, now)
        self.status, self._status_at = status, now
        self._has_subscriber = self._has_subscriber or status.has_subscriber or status.follows_loans
        self._note_switch(now)

    def _note_switch(self, now: float) -> None:
        """Learns how long another run's weights take, from the loan of the GPU on."""
        is_lent = self.lease is not None and bool(self.owner) and self.lease.lent_to == self.owner
        if is_lent and self._is_switching:
            if self._switching_since is None:
                self._switching_since = now
            return
        if self._switching_since is not None and is_lent and self.weight_version is not None:
            took_s = now - self._switching_since
            self.switch_s = took_s if not self.switch_s else (self.switch_s + took_s) / 2
            logger.info("worker=%s job=%s has its weights after %.2f s", self.id, self.owner, took_s)
        self._switching_since = None

    def _take_weights(self, status: RoutingStatus, now: float) -> None:
        """Keeps the stall clocks from counting a change of weights, after which KV is computed again.

        A short change may show only in the version.
        """
        version = parse_version(status.weight_version)
        was_updating, self.is_updating = self.is_updating, status.is_updating
        has_changed = self.status is not None and version != self.weight_version
        before, self.weight_version = self.weight_version, version
        if (version.run_id if version else None) != (before.run_id if before else None):
            self.run_since = now
        if not (was_updating or has_changed or self.is_updating):
            return
        self.updated_at = now
        for watch in self.watches:
            if self.is_updating:
                watch.worker_updating()
            else:
                watch.worker_updated(self._first_token_s)

    def _take_share(self, status: RoutingStatus, now: float) -> None:
        """Updates the share of the GPU's time that serving's steps left over since the previous status."""
        before = self.status.serving_busy_s if self.status is not None else None
        if status.serving_busy_s is None:
            self._share = None
            return
        if before is None or status.serving_busy_s < before or now <= self._status_at:
            return  # the first report of an engine, or the first since it restarted
        elapsed_s = now - self._status_at
        left = min(1.0, max(0.0, 1.0 - (status.serving_busy_s - before) / elapsed_s))
        known = self._share if self._share is not None else left
        self._share = known + (1.0 - math.exp(-elapsed_s / _SHARE_MEMORY_S)) * (left - known)

    def _take_adapters(self, status: RoutingStatus) -> None:
        before, self.adapters = self.adapters, adapters_of(status.adapters or ())
        if self.adapters.keys() != before.keys():
            logger.info("worker=%s adapters=%s", self.id, status.adapters)
            self.models = with_adapters(self.said_models, self.adapters)

    def says_models(self, models: Contexts | None) -> None:
        """Takes in what the worker serves; None: it does not say."""
        self._change()
        self.said_models, self.models = models, with_adapters(models, self.adapters)
        self.serves(next(iter(models or ()), None))

    def seen(self, now: float) -> None:
        """Notes a sign of life."""
        self._change()  # the speed of an idle worker ages
        self.last_seen = now
        self.problem = None
        if not self.is_alive:
            logger.info("worker alive worker=%s kind=%s", self.id, self.spec.kind)
            self.is_alive = True

    def lost(self, reason: str) -> None:
        """Marks the worker dead and tells everything that runs on it."""
        self._change()
        if self.is_alive:
            logger.warning("worker lost worker=%s in_flight=%d reason=%s", self.id, self.in_flight, reason)
            self.is_on_probation = True
            self.is_updating = False  # it can't report the end of the update any more
        elif self.problem is None:
            logger.warning("worker not reachable worker=%s reason=%s", self.id, reason)
        self.problem = reason
        self.is_alive = False
        for watch in self.watches:
            watch.worker_lost()
