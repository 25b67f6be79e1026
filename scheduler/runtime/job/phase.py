"""`@rose.phase` and `@rose.runtime_hook`: what a job's author writes on the functions of an RL loop.

Owns the wrapper of a phase (permit, warm start, run, offload, release) and the loop over iterations. Between
phases the process sleeps and keeps its sockets, process groups and all other state. Without a scheduler the
same program runs alone, without permits.

    @rose.phase("rollout", working_set=engine)
    def rollout(iteration): ...

    @rose.phase("train", working_set=trainer)
    def train(samples): ...

    @rose.runtime_hook
    def iteration(progress):
        train(rollout(progress.iteration))
        save_checkpoint(progress.iteration)

    iteration()

A phase of another name, such as a checkpoint, needs no nodes and no permit: other jobs use the nodes.
"""

import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from rose.errors import ConfigError
from rose.scheduler.cluster.spec import PHASE_NAME
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.job.cache import WorkingSet
from rose.scheduler.runtime.job.job import JobNode, RunningJob, running_job
from rose.scheduler.runtime.job.recording import IterationDone, PhaseBegan, PhaseRun, TimedSet

logger = logging.getLogger(__name__)

MoveTail = Callable[[tuple[int, ...]], None]
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Progress:
    """The state of the loop, which `runtime_hook` passes to the function that it wraps."""

    def __init__(self, iteration: int, num_iterations: int) -> None:
        self.iteration = iteration
        """Counts from 0. After a crash, the loop begins with the first iteration that was not completed."""
        self.num_iterations = num_iterations

    @property
    def forced_tokens(self) -> int | None:
        """The length that every response must have under `rose sched profile`; None in every other run.

        With vLLM, set ``ignore_eos``, and ``min_tokens`` and ``max_tokens`` to it. Where this is set, save
        checkpoints elsewhere: they are measured, and a profile's training is not meant to be kept.
        """
        job = running_job()
        return job.recorder.forced_tokens() if job is not None and job.recorder is not None else None

    @property
    def rollout_nodes(self) -> tuple[int, ...] | None:
        """The numbers of the job's rollout nodes in its group. They change only between iterations.

        None if no scheduler has started this process.
        """
        job = running_job()
        return job.rollout_nodes if job is not None else None

    @property
    def nodes(self) -> tuple[JobNode, ...]:
        """The job's nodes with their names, addresses and devices: rollout nodes, then training nodes.

        Empty if no scheduler has started this process.
        """
        job = running_job()
        return tuple(job.file.nodes) if job is not None else ()

    def step(self, num_tokens: int, num_running: int = 0) -> None:
        """Says that one forward step of a rollout, or one microbatch of training, is done.

        num_tokens: the tokens that the step computed. num_running: the responses that decode, in a rollout.
        Under `rose sched multiplex` this is where the job moves to other cores, or sleeps while the other
        pipeline has the device; elsewhere it returns at once. Call it inside a phase, in the thread that runs
        it. Raises: ValueError for numbers below 0.
        """
        if num_tokens < 0 or num_running < 0:
            raise ValueError(
                f"num_tokens and num_running must be 0 or more, got {num_tokens} and {num_running}"
            )
        job = running_job()
        if job is not None:
            job.step(num_tokens, num_running)

    @property
    def memory_share(self) -> float:
        """The share of the device's memory that the job has now: 1 unless another pipeline shares it.

        A trainer takes it by `microbatches`, and ROSE's engines by their slab budget (`OwnEngines`). It
        changes at a `step` alone.
        """
        job = running_job()
        return job.device.memory if job is not None and job.device is not None else 1.0

    def microbatches(self, num_rows: int, max_rows: int) -> Iterator[slice]:
        """Divides a batch into microbatches that fit the job's share of the device's memory.

        max_rows: the rows that fit all of it. A microbatch has `memory_share` of them, and at least one. It
        is divided off when it is asked for, because the share changes while the batch is trained on. Divide
        each loss by a number of the whole batch, such as all its tokens: then the accumulated gradients are
        the batch's up to rounding, whatever the shares were. Raises: ValueError.
        """
        if max_rows < 1:
            raise ValueError(f"max_rows {max_rows}: a microbatch has at least one row")
        begin = 0
        while begin < num_rows:
            end = min(num_rows, begin + max(1, int(max_rows * self.memory_share)))
            yield slice(begin, end)
            begin = end

    def report(
        self,
        phase: str,
        num_done: int,
        num_total: int,
        *,
        num_tokens: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Tells the scheduler how many of a phase's responses are done. If there are several ranks, only rank
        0's reports count.

        num_tokens: the length of the longest response that still runs. lengths: those of all responses, with
        the last report. If the rest should move, this calls the phase's `move_tail`; when that returns, other
        jobs may use the nodes that it left. Any thread may report, and one of them moves the rest.
        """
        job = running_job()
        if job is None or job.rank:
            return
        kind = _phase_named(phase)
        move, num_moved = _loop.moves.get(kind), _loop.num_moved
        keep = job.report(kind, num_done, num_total, num_tokens if move is not None else None, lengths)
        # A thread does not wait for another thread's move, because that move may wait for this thread.
        if keep is None or move is None or not _loop.moving.acquire(blocking=False):
            return
        try:
            if num_moved == _loop.num_moved:  # else the rest has moved since this was asked
                move(keep)
                job.moved(keep)
                _loop.num_moved += 1
        finally:
            _loop.moving.release()


class _Loop:
    """What moves this program's tails, and its iteration. A process has one, as it runs one job."""

    def __init__(self) -> None:
        self.moves: dict[Phase, MoveTail] = {}
        self.moving = threading.Lock()
        """Held while a tail moves."""
        self.num_moved = 0
        self.iteration = 0
        self.has_entered = False
        """Whether a phase that needs a permit has begun."""


_loop = _Loop()


def _phase_named(name: str) -> Phase:
    """Raises: ValueError."""
    try:
        return Phase(name)
    except ValueError:
        raise ValueError(f"phase {name!r}: expected one of {', '.join(Phase)}") from None


def phase(
    name: str, *, working_set: WorkingSet | None = None, move_tail: MoveTail | None = None
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Runs "rollout" and "train" under a permit for the nodes of their pools. Any other phase needs none.

    working_set: loaded from host memory before and offloaded after the function, under the same permit. One
    with `take_memory` is told the job's share of the device's memory, at first and whenever it changes.
    move_tail: `Progress.report` of a rollout calls it with the rollout nodes, by their numbers in the group,
    to which it must move the responses that still run. When it returns, the other nodes are unused. Raises:
    ValueError for an invalid name; in the function's calls PermitLost, CacheFull and ConfigError.
    """
    if re.fullmatch(PHASE_NAME, name) is None:
        raise ValueError(f"phase {name!r}: expected rollout, train, or a name like checkpoint ({PHASE_NAME})")
    kind = Phase(name) if name in set(Phase) else None

    def wrap(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        if move_tail is not None:
            _loop.moves[_phase_named(name)] = move_tail

        @functools.wraps(function)
        def shim(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            job = running_job()
            if job is None:
                return function(*args, **kwargs)
            if kind is None:
                return _run(job, lambda: function(*args, **kwargs))
            with job.permit(kind, _loop.iteration):
                _loop.has_entered = True
                return _run(job, lambda: function(*args, **kwargs))

        def _run(job: RunningJob, run: Callable[[], Result]) -> Result:
            if job.recorder is not None:
                job.recorder.note(PhaseBegan(phase=name))
            _refuse_unknown(job, name)
            timed = _begin_timing(job, working_set) if move_tail is not None else None
            began_s = time.monotonic()
            if working_set is not None:
                working_set.load(job.cache(name))
            loaded_s = time.monotonic()
            with job.sharing(working_set):
                result = run()
            ran_s = time.monotonic()
            if timed is not None and job.recorder is not None:
                job.recorder.end_timing(timed)
            if working_set is not None:
                working_set.offload(job.cache(name))
            if job.recorder is not None:
                times = (began_s, loaded_s, ran_s, time.monotonic())
                job.recorder.note(_phase_run(name, job.rank, times, job.cache(name).num_bytes))
            return result

        return shim

    return wrap


def _begin_timing(job: RunningJob, working_set: WorkingSet | None) -> TimedSet | None:
    """Returns the engines whose tail may move, if `rose sched profile` has them timed in this phase."""
    return job.recorder.begin_timing(working_set) if job.recorder is not None and not job.rank else None


def _refuse_unknown(job: RunningJob, phase: str) -> None:
    """Raises: ConfigError for a phase that the job's file lacks; `rose sched profile` says so itself."""
    known = job.file.limit_bytes
    if phase not in known and job.recorder is None:
        raise ConfigError(
            f"job {job.file.name}: no phase {phase!r} in its file, which has {', '.join(known)}; add it "
            "there with nodes: 0 and its seconds, or correct the name"
        )


def _refuse_idle(job: RunningJob, iteration: int) -> None:
    """Raises: ConfigError for a program of which no phase has begun; `rose sched profile` says so itself."""
    if not _loop.has_entered and job.recorder is None:
        raise ConfigError(
            f"job {job.file.name}: iteration {iteration} entered neither rollout nor train, and so held no "
            'node; mark these functions of the program with @rose.phase("rollout") and @rose.phase("train")'
        )


def _phase_run(
    phase: str, rank: int, times: tuple[float, float, float, float], cached_bytes: int
) -> PhaseRun:
    began_s, loaded_s, ran_s, offloaded_s = times
    return PhaseRun(
        phase=phase,
        rank=rank,
        iteration=_loop.iteration,
        begin_s=began_s,
        load_s=loaded_s - began_s,
        run_s=ran_s - loaded_s,
        offload_s=offloaded_s - ran_s,
        cached_bytes=cached_bytes,
    )


def runtime_hook(function: Callable[[Progress], object]) -> Callable[..., None]:
    """Turns the function into a loop over the job's iterations, and reports each one as completed.

    The loop takes ``num_iterations``, which it needs only where no scheduler has started the process.
    Raises: ConfigError, in the loop, if the first iteration enters no phase that needs a permit.
    """

    @functools.wraps(function)
    def loop(num_iterations: int | None = None) -> None:
        job = running_job()
        if job is not None:
            first, last = job.file.first_iteration, job.file.num_iterations
        elif num_iterations is not None:
            first, last = 0, num_iterations
            logger.info("running alone, without permits num_iterations=%d", last)
        else:
            raise ValueError("no scheduler has started this process: pass num_iterations to run alone")
        for iteration in range(first, last):
            _loop.iteration = iteration
            function(Progress(iteration, last))
            if job is not None:
                _refuse_idle(job, iteration)
                if job.recorder is not None:
                    job.recorder.note(IterationDone(iteration=iteration, at_s=time.monotonic()))
                job.complete(iteration)

    return loop
