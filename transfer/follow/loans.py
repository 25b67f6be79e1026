"""The runs that loans of a host's GPUs name: each is followed on demand, into a mirror of its own.

Owns a thread for each worker, which asks the worker for the run that it has to follow. Owns a thread, a
mirror and a connection to the relay for each run besides the one that the subscriber was started for. A
worker gets the weights of one run at a time. Promises that mirrors take no more memory than the host has to
spare, that a mirror which no worker uses is removed, and that weights of another architecture are refused
before they are fetched. What can't be followed is reported to the worker, whose routers then lend its GPU to
another job.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from rose.errors import RelayError, RoseError, WorkerError
from rose.host_memory import available_bytes
from rose.messages import NOTHING_PUBLISHED
from rose.transfer.follow.delivery import FIRST_RETRY_S, STATUS_EVERY_S, WorkerClient, next_pause
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.following import Subscriber
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.transfer.format.architecture import Architecture
from rose.transfer.format.layout import Layout
from rose.transfer.format.manifest import LayoutBody, check_name
from rose.transfer.relay.protocol import Relay

logger = logging.getLogger(__name__)

KEPT_S = 600.0
"""A mirror that no worker uses is kept for this long, so that a worker that comes back to it gets what has
changed since, and not all of it over the link."""
KEPT_FREE = 1.1
"""A mirror is made only where the host has this many times its size to spare."""
PATIENCE_S = 3.0
"""Most failures pass within a moment, such as a delivery that a newer version has overtaken. What lasts for
longer is reported."""
_ASK_EVERY_S = 0.2
"""The time between questions while a worker waits for weights."""
_END_S = 10.0


class LentRun:
    """One run that a loan names, from the relay to the workers, followed by a thread of its own."""

    def __init__(
        self,
        run_id: str,
        folder: Path,
        relay: Callable[[], Relay],
        workers: Mapping[str, WorkerClient],
        base: Path | None,
        public_key: str | None,
        accept: Callable[["LentRun", LayoutBody], None],
    ) -> None:
        """Raises: RelayError, ValueError on a run id that is no name, OSError."""
        check_name(run_id, "run id")
        with ExitStack() as opened:
            link = opened.enter_context(closing(relay()))
            store = SharedMirror(folder)  # another one's files stay, if it has the folder
            opened.callback(shutil.rmtree, folder, ignore_errors=True)
            opened.enter_context(closing(store))
            self.mirror = WeightMirror(store=store)

            def accept_anew(body: LayoutBody) -> None:
                self.granted_bytes = 0
                store.drop_coming()  # its memory counts as free
                accept(self, body)

            follower = Follower(link, run_id, self.mirror, base, public_key, accept=accept_anew)
            self.subscriber = Subscriber(link, follower, store, list(workers.items()))
            self._store, self._follower = store, follower
            self._opened = opened.pop_all()
        for name in workers:
            self.subscriber.want(name, is_wanted=False)
        self.run_id = run_id
        self.used_at_s = time.monotonic()
        self.granted_bytes = 0
        """The memory that the last fetch may take."""
        self._is_ending = threading.Event()
        # A daemon: a relay that hangs does not keep the process from stopping.
        self.thread = threading.Thread(target=self._run, name=run_id, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self._opened:
            try:
                while not self._is_ending.is_set():
                    self.subscriber.step(time.monotonic())
                    self.subscriber.wait(time.monotonic())
            except Exception as error:  # whatever failed, other runs go on, and the workers are told
                logger.exception("following a run failed: run=%s", self.run_id)
                self.subscriber.error = RelayError(f"following it failed: {error!r}")

    @property
    def has_ended(self) -> bool:
        return not self.thread.is_alive()

    @property
    def awaited_bytes(self) -> int:
        """The memory that a fetch may take and has not taken yet."""
        return self.granted_bytes if self._follower.is_fetching and not self._store.has_coming else 0

    def end(self, *, waits: bool) -> None:
        """Has the thread end and remove the mirror. waits: until it has, for a while at most."""
        self._is_ending.set()
        if waits and self.thread is not threading.current_thread():
            self.thread.join(_END_S)


class FollowedLoans:
    """The workers' loans. `home`: the run that they follow while no loan names another one.

    open_run: opens another run; called with its id and what decides about its layout. architecture: that
    of the workers' model; None where it is not known.
    """

    def __init__(
        self,
        home: Subscriber,
        workers: Mapping[str, WorkerClient],
        open_run: Callable[[str, Callable[[LentRun, LayoutBody], None]], LentRun],
        architecture: Callable[[], Architecture | None],
    ) -> None:
        self._home = home
        self._workers = workers
        self._open_run = open_run
        self._architecture = architecture
        self._lent: dict[str, LentRun] = {}
        self._ending: dict[str, threading.Thread] = {}
        """The threads of those that are done with, which remove their mirrors."""
        self._failed: dict[str, tuple[str, float]] = {}
        """Why following a run ended by itself, and until when it is not tried again."""
        self._changing = threading.Lock()
        self._is_ending = threading.Event()
        for name in workers:
            home.want(name, is_wanted=False)  # until the worker has said which run it is to follow
            threading.Thread(target=self._watch, args=(name,), name=f"loan-{name}", daemon=True).start()

    def close(self) -> None:
        """Ends all runs, and removes their mirrors."""
        self._is_ending.set()
        with self._changing:
            lent = list(self._lent.values())
        for each in lent:
            each.end(waits=False)
        for each in lent:
            each.end(waits=True)

    def _watch(self, name: str) -> None:
        """Has one worker get the weights that its loan names, for ever."""
        run: str | None = None
        failed_at_s: float | None = None
        problem: str | None = None
        retry_s = FIRST_RETRY_S
        is_lost = False
        wait_s = 0.0  # what the worker is to follow is not known yet
        while not self._is_ending.is_set():
            try:
                said = self._workers[name].loaned_run(run, problem, wait_s)
                if is_lost and self._workers[name].weight_version() is None:
                    self._note_restart(name)
                is_lost = False
            except WorkerError as error:
                # The deliveries say so as well, and notice when the worker comes back.
                logger.debug("no answer: worker=%s error=%s", name, error)
                is_lost = True
                self._point(name, run)
                self._is_ending.wait(retry_s)
                retry_s = next_pause(retry_s)
                continue
            retry_s = FIRST_RETRY_S
            if said != run:
                logger.info("worker is lent: name=%s run=%s before=%s", name, said, run)
                run, failed_at_s = said, None
            found, now_s = self._point(name, run), time.monotonic()
            if found is None or failed_at_s is None:
                failed_at_s = now_s if found is not None else None
            is_lasting = failed_at_s is not None and now_s - failed_at_s >= PATIENCE_S
            problem = found if found == NOTHING_PUBLISHED or is_lasting else None
            is_waiting = run is not None and problem is None and not self._has(name, run)
            wait_s = _ASK_EVERY_S if is_waiting else STATUS_EVERY_S
            if not self._workers[name].takes_loans:
                self._is_ending.wait(STATUS_EVERY_S)

    def _has(self, name: str, run: str) -> bool:
        with self._changing:
            return self._of(run).has_delivered(name)

    def _note_restart(self, name: str) -> None:
        with self._changing:
            for each in self._every:
                each.restarted(name)

    @property
    def _every(self) -> list[Subscriber]:
        return [self._home, *(lent.subscriber for lent in self._lent.values())]

    def _of(self, run: str | None) -> Subscriber:
        """Returns what follows a run that was opened; for None, or the run of home, that is home."""
        return self._lent[run].subscriber if run in self._lent else self._home

    def _point(self, name: str, run: str | None) -> str | None:
        """Has a worker get the weights of one run alone. Returns why it can't get them; of home, only that
        its run has published nothing."""
        with self._changing:
            if self._is_ending.is_set():
                return None
            self._end_unused()
            try:
                if run is not None and run not in self._lent and run != self._home.run_id:
                    self._open(run)
            except (RoseError, ValueError, OSError) as error:
                return str(error)
            target = self._of(run)
            for each in self._every:
                if each is not target:
                    each.want(name, is_wanted=False)
            target.want(name, is_wanted=True)
        problem = target.problem(name)
        return problem if run is not None or problem == NOTHING_PUBLISHED else None

    def _open(self, run: str) -> None:
        """Raises: RoseError, ValueError, OSError where the run can't be followed now."""
        reason, until_s = self._failed.get(run, ("", 0.0))
        if time.monotonic() < until_s:
            raise RelayError(reason)
        if run in self._ending and self._ending[run].is_alive():
            raise RelayError(f"the mirror of run {run} is being removed")
        self._lent[run] = self._open_run(run, self._accept)

    def _end(self, run: str) -> LentRun:
        """Has a run end, and returns it."""
        lent = self._lent.pop(run)
        self._ending[run] = lent.thread
        lent.end(waits=False)
        return lent

    def _taken_layout(self) -> Layout | None:
        """Returns the layout of weights of a lent run that a worker has taken; None if there are none."""
        with self._changing:
            planes = [
                lent.mirror.planes
                for lent in self._lent.values()
                if any(map(lent.subscriber.has_delivered, self._workers))
            ]
        return next((each.layout for each in planes if each is not None), None)

    def _end_unused(self) -> None:
        now_s = time.monotonic()
        for run, lent in list(self._lent.items()):
            if lent.subscriber.is_wanted:
                lent.used_at_s = now_s
            if lent.has_ended:  # workers are told of it while it is not tried again
                self._failed[run] = (str(lent.subscriber.error), now_s + 2 * PATIENCE_S)
            if lent.has_ended or now_s - lent.used_at_s > KEPT_S:
                logger.info("mirror of a lent run goes: run=%s", run)
                self._end(run)

    def _held(self) -> set[Subscriber]:
        """Returns the one for each worker whose mirror it holds, because it took that last. Removing it frees
        no memory."""
        return {max(self._every, key=lambda each: each.taken_at_s(name)) for name in self._workers}

    def _accept(self, run: LentRun, body: LayoutBody) -> None:
        """Raises: RelayError for weights of another architecture, or for which the host has no memory."""
        architecture = self._architecture()
        if architecture is None:
            architecture = Architecture.known(self._taken_layout(), None)
        if architecture is not None:
            architecture.require(run.run_id, body)
        needed = round(KEPT_FREE * body.to_layout().num_bytes)
        while True:
            with self._changing:
                held = self._held()
                others = [each for each in self._lent.values() if each is not run]
                # What a fetch takes between the two questions counts twice, not never.
                awaited = sum(each.awaited_bytes for each in others)
                free = available_bytes() - awaited
                if free >= needed:
                    run.granted_bytes = needed
                    return
                unused = [
                    each for each in others if not each.subscriber.is_wanted and each.subscriber not in held
                ]
                if not unused:
                    raise RelayError(
                        f"run {run.run_id} needs {needed} bytes of this host's memory for its weights beside "
                        f"those that engines hold, {free} are free; stop something, or follow fewer runs on "
                        "this host"
                    )
                oldest = self._end(min(unused, key=lambda each: each.used_at_s).run_id)
            logger.info(
                "mirror of a lent run goes, for another one: run=%s for=%s", oldest.run_id, run.run_id
            )
            oldest.end(waits=True)
