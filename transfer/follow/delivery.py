"""Delivering weights to one worker: the calls to it, and the thread that makes them.

Owns what the worker runs as far as is known, and when it is tried again. The worker decides how it takes an
update (rose/engine/http/control.py). Nothing here looks at weights or talks to the relay.
"""

import logging
import math
import threading
import time
from pathlib import Path

import httpx
from pydantic import BaseModel, ValidationError

from rose.errors import WorkerError
from rose.http import http_client
from rose.messages import AdapterUpdate, RunToFollow, WeightUpdate, WeightUpdated

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 2.0
FIRST_RETRY_S = 0.2
LAST_RETRY_S = 5.0
READS_FOR_S = 60.0
"""For so long a worker that takes an update keeps the mirror from moving on, and a hung one the others."""
LOAN_TIMEOUT_S = 10.0
_MOST_SAID = 500
WORKER_TIMEOUT_S = 600.0
"""A worker answers only when it runs the weights: it may first finish a step and load gigabytes."""


def next_pause(pause_s: float) -> float:
    """Returns the pause before the next try."""
    return min(2 * pause_s, LAST_RETRY_S)


class _WorkerWeights(BaseModel):
    """The part of GET /rose/v1/status that this process reads."""

    weight_version: str | None
    adapters: list[str] | None = None

    def version(self, adapter: str | None) -> str | None:
        """Returns the version of the whole weights, or of an adapter's run."""
        if adapter is None:
            return self.weight_version
        return next((each for each in self.adapters or () if each.rpartition("/")[0] == adapter), None)


class WorkerClient:
    """The calls to one worker, over HTTP."""

    def __init__(self, url: str, key: str | None, adapter: str | None = None, ca: Path | None = None) -> None:
        """adapter: the run of the LoRA adapter that it gets; None: it gets whole weights. ca: certificates of
        which it must show one; None: the system's."""
        self._adapter = adapter
        self.takes_loans = True
        """Whether the worker says which run it is to follow."""
        self._http = http_client(url, key=key, timeout=httpx.Timeout(WORKER_TIMEOUT_S, connect=5.0), ca=ca)
        # A client of its own: httpcore may close a connection under another thread's request.
        self._asking = http_client(url, key=key, timeout=LOAN_TIMEOUT_S, ca=ca)

    def load(self, update: WeightUpdate) -> None:
        """Returns when the worker runs the update. Raises: WorkerError."""
        try:
            response = self._post(update)
            response.raise_for_status()
            answer = WeightUpdated.model_validate_json(response.content)
        except httpx.HTTPStatusError as error:
            status, text = error.response.status_code, error.response.text[:500]
            raise WorkerError(f"worker refused weights {update.version}: {status} {text}") from error
        except (httpx.HTTPError, ValidationError) as error:
            raise WorkerError(f"worker did not take weights {update.version}: {error!r}") from error
        if (answer.version, answer.state_hash) != (update.version, update.state_hash):
            raise WorkerError(f"worker answered {answer} to {update}")

    def weight_version(self) -> str | None:
        """Returns the version that the worker says it runs. Raises: WorkerError."""
        try:
            response = self._http.get("/rose/v1/status")
            response.raise_for_status()
            return _WorkerWeights.model_validate_json(response.content).version(self._adapter)
        except (httpx.HTTPError, ValidationError) as error:
            raise WorkerError(f"worker has no status: {error!r}") from error

    def loaned_run(self, knows: str | None, problem: str | None, wait_s: float) -> str | None:
        """Returns the run that the worker has to follow, because its GPU is lent to a job of that run. Waits
        up to wait_s for a run other than the one it `knows`. problem: why the worker can't get the known
        run's weights. Raises: WorkerError.
        """
        problem = problem[:_MOST_SAID] if problem is not None else None
        asked = {"knows": knows, "problem": problem, "wait_s": wait_s}
        try:
            given = {name: value for name, value in asked.items() if value is not None}
            response = self._asking.get("/rose/v1/loan", params=given)
            self.takes_loans = response.status_code != httpx.codes.NOT_FOUND
            if not self.takes_loans:
                return None
            response.raise_for_status()
            return RunToFollow.model_validate_json(response.content).run
        except (httpx.HTTPError, ValidationError) as error:
            raise WorkerError(f"worker does not say which run it is to follow: {error!r}") from error

    def _post(self, update: WeightUpdate) -> httpx.Response:
        if self._adapter is None:
            return self._http.post("/rose/v1/weights", json=update.model_dump())
        body = AdapterUpdate(version=update.version, path=update.path, state_hash=update.state_hash)
        return self._http.post("/rose/v1/adapters", json=body.model_dump())

    def close(self) -> None:
        self._http.close()
        self._asking.close()


class Delivery:
    """What one worker has and gets. ended: notified whenever a call to it has ended."""

    def __init__(self, name: str, worker: WorkerClient, ended: threading.Condition) -> None:
        self.name = name
        self.delivered: WeightUpdate | None = None
        """The update that the worker runs."""
        self.taken_at_s = -math.inf
        """When the worker last took an update. It holds that mirror until it takes another one's."""
        self.is_wanted = True
        """Whether the worker is to run this run's weights. It may be lent to a job of another run."""
        self.problem: str | None = None
        """Why the last call to the worker failed."""
        self._coming: WeightUpdate | None = None
        self.is_busy = False
        self.retry_at_s = 0.0
        self._worker = worker
        self._ended = ended
        self._retry_s = FIRST_RETRY_S
        self._status_at_s = 0.0
        self._reads_until_s = 0.0

    def reads_mirror(self, now_s: float) -> bool:
        """Returns whether the worker is taking weights from the mirror, which then has to stay at one
        version. From it an engine loads layers that take no single elements, and all weights if writing
        fails.
        """
        return self.is_busy and now_s < self._reads_until_s

    @property
    def version(self) -> str | None:
        return self.delivered.version if self.delivered is not None else None

    @property
    def versions(self) -> set[str]:
        """The version that the worker runs, and the one that it is taking."""
        return {update.version for update in (self.delivered, self._coming) if update is not None}

    def want(self, is_wanted: bool) -> None:
        """Notes whether the worker is to run this run's weights. It has lost them once it was not."""
        if is_wanted and not self.is_wanted:
            self.delivered, self.problem = None, None
            self._retry_s, self.retry_at_s = FIRST_RETRY_S, 0.0
        self.is_wanted = is_wanted

    def begin(self, update: WeightUpdate, now_s: float) -> None:
        """Begins to deliver the update, or to ask the worker whether it still runs it, if that is due."""
        is_new = self.delivered is None or self.delivered.state_hash != update.state_hash
        is_new = is_new or self.version != update.version
        if now_s < self.retry_at_s or not (is_new or now_s >= self._status_at_s):
            return
        self.is_busy, self._status_at_s = True, now_s + STATUS_EVERY_S
        self._coming, self._reads_until_s = update, 0.0
        if is_new and (update.changes or update.whole_because is not None):
            self._reads_until_s = now_s + READS_FOR_S
        # A daemon: a worker that hangs does not keep the process from stopping.
        threading.Thread(target=self._run, args=(update, is_new), name=self.name, daemon=True).start()

    def _run(self, update: WeightUpdate, is_new: bool) -> None:
        try:
            if is_new:
                self._worker.load(update)
                self.delivered, self.taken_at_s = update, time.monotonic()
                logger.info("worker moved: name=%s version=%s", self.name, update.version)
            else:
                self._check(update)
            self.problem = None
            self._retry_s, self.retry_at_s = FIRST_RETRY_S, 0.0
        except WorkerError as error:
            self.problem = str(error)
            logger.warning("weights not delivered, next try in %.1f s: %s", self._retry_s, error)
            self.retry_at_s = time.monotonic() + self._retry_s
            self._retry_s = next_pause(self._retry_s)
        finally:
            with self._ended:
                self.is_busy, self._coming = False, None
                self._ended.notify_all()

    def _check(self, update: WeightUpdate) -> None:
        """Notices that a worker was restarted and lost its weights: they are delivered again."""
        version = self._worker.weight_version()
        if version != update.version:
            logger.warning("worker runs %s instead of %s: delivering again", version, update.version)
            self.delivered = None
