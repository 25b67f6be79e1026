"""The queue: which jobs wait for a place, and which of them is placed next.

Owns the answers to those who submit, hold and release jobs. A job that finds no place now is queued with the
reason, and one that would find none in the empty cluster is refused. When there may be room, queued jobs are
tried by priority, then by their teams' use of their shares, then in the order of submission. Each that fits
and is within its team's quota is placed. Jobs without a team are one team of share 1.

A placed job overtakes a queued one that could use the same nodes if the queued one comes before it, or is the
first of another team with its priority and was submitted earlier. After `MAX_OVERTAKEN` times the queued job
comes first of its priority, and no job that could use the same nodes is placed before it. This does not hold
while the queued job would not fit even if no job ran, or waits for its team's quota. A queued job that takes
the places of running ones (preempt_calls.py) comes first as well, and no job behind it takes its room. Pure:
takes ``now``.
"""

import bisect
import functools
import heapq
import math
from collections import Counter
from collections.abc import Collection

from rose.config import parse_config
from rose.errors import ConfigError, JobRefused, PoolsFull
from rose.scheduler.cluster.preemption import Fits
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.certificate import Certificate, CertificateError
from rose.scheduler.group.model import Group, Phase
from rose.scheduler.runtime.channel.messages import HoldJob, ReleaseJob, Submit
from rose.scheduler.runtime.decide.job_calls import JobCalls
from rose.scheduler.runtime.decide.placing import Groups, JoinedGroup
from rose.scheduler.runtime.decide.preempt_calls import PreemptCalls
from rose.scheduler.runtime.decide.records import MAX_OVERTAKEN, JobRecord, JobState
from rose.scheduler.runtime.decide.state import State
from rose.scheduler.runtime.job.spec import RunSpec

NUM_ENDS = 64
"""The next ends of jobs that are looked at for when a queued job could start."""
RETRY_S = 60.0
"""A job that runs faster than its SLO demands may later have another beside it that it may not have now."""

_Found = tuple[JoinedGroup, Certificate]


class QueueCalls:
    """Answers Submit, HoldJob and ReleaseJob calls."""

    def __init__(self, state: State, jobs: JobCalls, preempts: PreemptCalls) -> None:
        self._state = state
        self._jobs = jobs
        self._preempts = preempts
        self._tried_s = float("-inf")
        self._used: dict[str, Counter[Phase]] = {}
        """The nodes that the running jobs of each team ask for."""
        self._trials: dict[tuple[str, ...], Groups] = {}
        """The groups as they will be without some jobs, while nothing changes."""

    def submit(self, client: str, call: Submit, now: float) -> None:
        """Places a new job and starts it, or queues it. A dry run only says which."""
        caller = f"{client}#{call.seq}"
        name = call.spec.get("name")
        earlier = self._state.jobs.get(name) if isinstance(name, str) else None
        if earlier is not None and earlier.submitted_by == caller:
            self._state.answer(client, call.seq, body={"job": name, "state": earlier.state})
            return
        try:
            spec = parse_config(call.spec, RunSpec, "job")
            if earlier is not None and not earlier.state.is_over:
                raise JobRefused(
                    f"{name}: a job of this name is {earlier.state}, with the file it was submitted with; "
                    f"choose another name, or end it first with: rose sched cancel {name}"
                )
            self._check_team(spec)
            self._jobs.check_devices(spec)
            self._jobs.check_router(spec)
            self.place_waiting(now)
            self._weigh()
            use = self._state.use_of_share.get(self._state.cluster.team_of(spec), 0.0)
            turn = -spec.priority, True, use
            ahead = [each for each in self._state.queue if self._state.turn(each)[:3] <= turn]
            self._trials.clear()
            found = self._find(spec, ahead, now)
            if isinstance(found, str):
                self._jobs.check_possible(spec, now)
        except (ConfigError, PoolsFull, CertificateError) as error:
            self._state.answer(client, call.seq, str(error))
            return
        body, fits = {"job": spec.name, **_answer(spec, found, len(ahead))}, self._fits(spec, ahead, now)
        if call.dry_run:
            more: dict[str, object] = {"state": "would run"}
            if isinstance(found, str):
                victims = self._preempts.victims(spec, fits)
                more = {"state": "would be queued", "takes_place_of": list(victims)}
            self._state.answer(client, call.seq, body={**body, **more})
            return
        record = self._add(call, spec, caller)
        if isinstance(found, str):
            record.why = found
            self._state.event("queued", spec.name, reason=found)
            self._preempts.take_over(spec.name, fits, now)
            body["takes_place_of"] = list(self._state.takeovers.get(spec.name, ()))
        else:
            self._place(spec, found, ahead, now)
        self._state.answer(client, call.seq, body={**body, "state": record.state})

    def hold(self, client: str, call: HoldJob) -> None:
        """Passes a queued job over until it is released."""
        self._change(client, call, JobState.HELD, "held")
        self._state.has_new_room = True  # it may have kept others from being placed

    def release(self, client: str, call: ReleaseJob) -> None:
        """Puts a held job back where it was in the queue."""
        self._change(client, call, JobState.QUEUED, "released_to_queue")
        self._state.has_new_room = True

    def earliest(self, name: str, now: float) -> dict[str, object] | None:
        """Returns when a queued job could start if none were ahead of it; None: not known.

        `in_s` seconds from now, when the job `after` ends, or ends an iteration and gives its place away
        (`is_preempted`). Until then all jobs run as fast as certified.
        """
        takeover = self._state.takeovers.get(name, ())
        if victims := [each for each in takeover if self._state.jobs[each].state.is_placed]:
            in_s, after = max((self._leaves_in_s(each, now), each) for each in victims)
            return {"in_s": in_s, "after": after, "is_preempted": True}
        running = [job for job in self._state.live if self._state.jobs[job].state.is_placed]
        ends = heapq.nsmallest(NUM_ENDS, ((self._left_s(job), job) for job in running))
        spec = self._state.specs[name]
        self._weigh()

        def fits(num: int) -> bool:
            ended = {job for _, job in ends[:num]}
            if self._over_quota(spec, ended) is not None:
                return False
            return self._jobs.has_place(self._state.groups.without_some(ended), spec, now)

        num = bisect.bisect_left(range(len(ends) + 1), True, key=fits)
        if self._state.jobs[name].state is not JobState.QUEUED or not 0 < num <= len(ends):
            return None
        return {"in_s": ends[num - 1][0], "after": ends[num - 1][1]}

    def _leaves_in_s(self, job: str, now: float) -> float:
        """Returns the time until the running job gives its place away, if its iterations are as certified."""
        record, iteration_s = (
            self._state.jobs[job],
            self._state.permits_of(job).certificate.bounds[job].longest_s,
        )
        if record.state is JobState.PREEMPTING:
            return 0.0
        left_s = iteration_s - (now - record.since_s if record.since_s is not None else 0.0)
        must_run_s = self._state.cluster.preemption.min_run_s - record.ran_s(now)
        num_more = max(0, math.ceil((must_run_s - left_s) / iteration_s))
        return min(self._left_s(job), max(0.0, left_s) + num_more * iteration_s)

    def _left_s(self, job: str) -> float:
        bound = self._state.permits_of(job).certificate.bounds[job]
        return bound.mean_s * (self._state.specs[job].iterations - self._state.jobs[job].num_done)

    def place_waiting(self, now: float) -> None:
        """Tries all queued jobs, if there may be new room, and places those that fit."""
        if not self._state.has_new_room and now - self._tried_s < RETRY_S:
            return
        self._state.has_new_room, self._tried_s = False, now
        ahead: list[str] = []
        refused: dict[tuple[object, ...], str] = {}
        without_takeover = set[tuple[object, ...]]()
        self._trials.clear()
        self._preempts.review()
        self._weigh()
        left = list(self._state.queue)
        while left:
            name = left.pop(0)
            spec, record = self._state.specs[name], self._state.jobs[name]
            alike = self._wants(spec)
            found = refused[alike] if alike in refused else self._find(spec, ahead, now)
            if isinstance(found, str):
                if name in self._state.takeovers or (alike, spec.priority) not in without_takeover:
                    if self._preempts.take_over(name, self._fits(spec, ahead, now), now):
                        self._trials.clear()
                    else:
                        without_takeover.add((alike, spec.priority))
                ahead.append(name)
                refused[alike] = found
                if record.why != found:
                    record.why = found
                    self._state.changed(name)
                continue
            self._place(spec, found, ahead, now)
            self._trials.clear()
            refused.clear()
            without_takeover.clear()
            self._weigh()
            left.sort(key=self._state.turn)
            self._state.has_new_room = True  # beside a job that came, another may fit

    def _fits(self, spec: RunSpec, ahead: list[str], now: float) -> Fits:
        before = list(ahead)
        return lambda victims: not isinstance(self._find(spec, before, now, victims), str)

    def _find(
        self, spec: RunSpec, ahead: list[str], now: float, without: Collection[str] = ()
    ) -> _Found | str:
        """Returns a place for the job, or why it must wait.

        without: running jobs that count as gone.
        """
        if (waits_for := self._state.runner_waits_for) is not None:
            return f"the scheduler waits for {waits_for}"
        if (over := self._over_quota(spec, without)) is not None:
            return over
        for name in ahead:
            is_next = self._state.jobs[name].is_next
            if is_next and self._are_rivals(spec, name) and self._is_possible(name, now):
                return f"behind {name}, which {MAX_OVERTAKEN} jobs have overtaken"
        found = self._try(spec, self._state.groups.without_some(without) if without else None, now)
        if isinstance(found, str):
            return found
        for name in ahead:
            if self._takes_room(spec, found[0], name, without, now):
                return f"behind {name}, which takes the place of {', '.join(self._state.takeovers[name])}"
        return found

    def _try(self, spec: RunSpec, groups: Groups | None, now: float) -> _Found | str:
        """Returns a place for the job in these groups, None: in those that there are; or why it has none."""
        try:
            return self._jobs.place(spec, now, groups=groups)
        except (ConfigError, PoolsFull, CertificateError) as error:
            return str(error).removeprefix(f"job {spec.name} ").removeprefix(f"{spec.name}: ")

    def _takes_room(
        self, spec: RunSpec, placed: JoinedGroup, other: str, without: Collection[str], now: float
    ) -> bool:
        """Whether a job that is placed so would leave no room for one that waits for its victims to leave."""
        victims = self._state.takeovers.get(other, ())
        if not victims:
            return False
        if self._over_quota(self._state.specs[other], {*victims, *without}, beside=spec) is not None:
            return True
        [job] = [each.job for each in placed.group.members if each.job.name == spec.name]
        newcomer = Resident(job=job, since_s=now, work_s=job.solo_s * job.num_iterations, stays=True)
        gone = tuple(sorted({*victims, *without}))
        if gone not in self._trials:
            self._trials[gone] = self._state.groups.without_some(gone)
        group = functools.reduce(Group.without, victims, placed.group)
        with self._trials[gone].with_newcomer(group, newcomer):
            return isinstance(self._try(self._state.specs[other], self._trials[gone], now), str)

    def _are_rivals(self, spec: RunSpec, queued: str) -> bool:
        """Whether the job and a queued one could use the same nodes."""
        groups = {spec.group, self._state.specs[queued].group}
        return None in groups or len(groups) == 1

    def _is_possible(self, name: str, now: float) -> bool:
        """Whether the queued job would have a place now if no job ran."""
        spec, known = self._state.specs[name], self._state.would_fit
        if spec.group is not None and spec.group not in self._state.groups.by_name:
            return False
        if self._over_quota(spec) is not None:
            return False
        if name not in known:
            known[name] = self._jobs.is_possible_now(spec, now)
        return known[name]

    def _wants(self, spec: RunSpec) -> tuple[object, ...]:
        """Returns what decides where a job fits: jobs that are alike fit in the same places."""
        phases = tuple(sorted((name, each.model_dump_json()) for name, each in spec.phases.items()))
        record = self._state.jobs[spec.name]
        ran = spec.name if record.is_resumed else None  # what is left of its SLO is its own
        return spec.team, spec.group, spec.rollout_nodes, spec.slo, spec.slo_kind, phases, ran

    # Teams --------------------------------------------------------------------------------------------------

    def _weigh(self) -> None:
        """Brings the teams' use of their shares, and with it the order of the queue, up to date."""
        teams = self._state.cluster.teams
        if not teams:
            return
        self._used = self._state.nodes_by_team()
        pools = self._state.cluster.to_pools()
        for team, nodes in self._used.items():
            dollars = pools.price(nodes[Phase.ROLLOUT], nodes[Phase.TRAIN])
            self._state.use_of_share[team] = dollars / (teams[team].share if team else 1.0)
        self._state.queue.sort(key=self._state.turn)

    def _team_of(self, name: str) -> str:
        return self._state.cluster.team_of(self._state.specs[name])

    def _over_quota(
        self, spec: RunSpec, without: Collection[str] = (), beside: RunSpec | None = None
    ) -> str | None:
        """Returns why the job's quota lets it wait, or None.

        without: running jobs that count as gone. beside: a job that counts as running.
        """
        team = self._state.cluster.teams.get(spec.team) if spec.team is not None else None
        if team is None or spec.team is None:
            return None
        used = self._used[spec.team].copy()
        for name in without:
            if self._team_of(name) == spec.team:
                used.subtract({phase: self._state.specs[name].phases[phase].nodes for phase in Phase})
        if beside is not None and beside.team == spec.team:
            used.update({phase: beside.phases[phase].nodes for phase in Phase})
        for phase in Phase:
            quota, wanted = team.quota(phase), spec.phases[phase].nodes
            if quota is not None and used[phase] + wanted > quota:
                return (
                    f"team {spec.team} uses {used[phase]} of its {quota} {phase} nodes, and the job needs "
                    f"{wanted}"
                )
        return None

    def _check_team(self, spec: RunSpec) -> None:
        """Raises: JobRefused for a team that the file lacks, or a job larger than its team's quota."""
        teams = self._state.cluster.teams
        if spec.team is None:
            return
        if spec.team not in teams:
            known = ", ".join(teams) or "none"
            raise JobRefused(
                f"{spec.name}: no team {spec.team!r}; the cluster's file has {known}: choose one, or leave "
                "`team` out"
            )
        for phase in Phase:
            quota, wanted = teams[spec.team].quota(phase), spec.phases[phase].nodes
            if quota is not None and wanted > quota:
                raise JobRefused(
                    f"{spec.name}: {phase} needs {wanted} nodes, but team {spec.team} may use {quota}; ask "
                    f"for fewer, or raise max_{phase}_nodes in the cluster's file"
                )

    def _add(self, call: Submit, spec: RunSpec, caller: str) -> JobRecord:
        record = JobRecord(
            spec=call.spec,
            submitted_by=caller,
            number=0,
            state=JobState.QUEUED,
            num_ranks=spec.num_ranks,
        )
        self._state.add(record, spec)
        self._state.event("submitted", spec.name)
        return record

    def _place(self, spec: RunSpec, found: _Found, ahead: list[str], now: float) -> None:
        for name in self._overtaken(spec, ahead, now):
            self._state.jobs[name].num_overtaken += 1
            self._state.changed(name)
        self._jobs.admit(spec.name, *found, now)
        self._preempts.review()  # whom it was to preempt is spared
        self._state.queue.sort(key=self._state.turn)

    def _overtaken(self, spec: RunSpec, ahead: list[str], now: float) -> list[str]:
        """Returns the queued jobs that the job overtakes when it is placed.

        If a team comes later because of its share, only its first job that could run counts as overtaken.
        Otherwise a long queue of one team would soon be before those of all others, whatever their shares.
        """
        found = [name for name in ahead if self._are_rivals(spec, name)]
        number, counted = self._state.jobs[spec.name].number, {spec.name, *ahead}
        teams = set[str]()
        for name in self._state.queue:
            is_earlier = self._state.jobs[name].number < number and name not in counted
            if not is_earlier or self._state.specs[name].priority != spec.priority:
                continue
            team = self._team_of(name)
            if team not in teams and self._are_rivals(spec, name) and self._is_possible(name, now):
                teams.add(team)
                found.append(name)
        return found

    def _change(self, client: str, call: HoldJob | ReleaseJob, state: JobState, event: str) -> None:
        record = self._state.jobs.get(call.job)
        if record is None:
            self._state.answer(client, call.seq, self._state.unknown(call.job))
            return
        if not record.state.is_waiting:
            error = f"{call.job} is {record.state}: only a job that is queued can be held or released"
            self._state.answer(client, call.seq, error)
            return
        if record.state is not state:
            self._state.become(call.job, state)
            self._state.event(event, call.job)
        self._state.answer(client, call.seq, body={"job": call.job, "state": state})


def _answer(spec: RunSpec, found: _Found | str, num_ahead: int) -> dict[str, object]:
    """What the submitter is told of the job's place."""
    if isinstance(found, str):
        return {"ahead": num_ahead, "why": found}
    placed, certificate = found
    [member] = [each for each in placed.group.members if each.job.name == spec.name]
    return {
        "group": placed.group.name,
        "rollout_nodes": list(member.rollout_nodes),
        "why": placed.why,
        "iteration_s": certificate.bounds[spec.name].longest_s,
        "limit_s": certificate.bounds[spec.name].limit_s,
    }
