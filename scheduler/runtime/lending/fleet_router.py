"""Tells the router of the serving fleet which jobs may borrow its GPUs, and tells it again whenever needed.

Owns a thread and its HTTP calls: the scheduler never waits for the router. The thread compares what the
router knows with what it should know, so a router that was away, or has lost its state, is told again. If a
router can't be told, jobs run all the same. Never: decides who borrows what (loans.py).
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import quote

import httpx

from rose.config import Settings
from rose.errors import ConfigError, WorkerError
from rose.http import http_client, urls_of
from rose.messages import key_proof
from rose.scheduler.runtime.job.spec import RouterSpec
from rose.scheduler.runtime.lending.loans import Loan, RouterNews, Use

logger = logging.getLogger(__name__)

CHECK_S = 5.0
"""The time after which a router that knows everything is asked again: it may have been restarted."""
RETRY_S = 0.5
"""The time until the next try, for a router that does not answer or that refuses something."""
TIMEOUT_S = 10.0
USED_TIMEOUT_S = 2.0
"""The time in which other routers than the one that is told must say how jobs have used serving GPUs."""
_SAID = ("run_id", "model", "weight", "priority", "max_serving_gpus")
"""The fields of a loan that the router shows. It shows no keys."""

_Jobs = Mapping[str, Mapping[str, Any]]
"""A router's jobs, as its /admin/jobs shows them."""


def admin_key(router: RouterSpec | None, settings: Settings) -> str:
    """Returns the router's admin key; empty if there is no router. Raises: ConfigError if it is missing."""
    if router is None:
        return ""
    if settings.admin_key is None:
        raise ConfigError(
            f"router {router.url}: each job gets a key of its own there, which needs the router's admin key: "
            "set ROSE_ROUTER_ADMIN_KEY here and at the router"
        )
    return settings.admin_key


class FleetRouter:
    """The router, or several before the same workers, of which one that answers tells the others."""

    def __init__(self, router: RouterSpec, settings: Settings) -> None:
        """Starts the thread, which ends with the process. Raises: ConfigError."""
        self._urls = urls_of(router.url)
        self._key, self._ca = admin_key(router, settings), settings.tls_ca
        self._lock = threading.Lock()
        self._has_changed = threading.Event()
        self._wanted: tuple[Loan, ...] | None = None
        """None: the scheduler has said nothing yet."""
        self._problem: str | None = None
        self._forgotten: list[Loan] = []
        self._used: dict[str, Use] = {}
        """What the router has reported since the last call of news(), by meter."""
        self._told: dict[str, Loan] = {}
        """What the router has taken from this process, by job. Only the thread uses it."""
        threading.Thread(target=self._run, name="rose-fleet-router", daemon=True).start()

    @classmethod
    def of(cls, router: RouterSpec | None, settings: Settings) -> Self | None:
        """Returns the cluster's router; None if it has none. Raises: ConfigError."""
        return cls(router, settings) if router is not None else None

    def want(self, loans: tuple[Loan, ...]) -> None:
        """Has the thread tell the router these loans, and end those that are over. Does not wait."""
        if loans is not self._wanted:
            self._wanted = loans
            self._has_changed.set()

    def news(self) -> RouterNews:
        """Returns the router's state, and what it has forgotten and measured since the last call."""
        with self._lock:
            forgotten, self._forgotten = tuple(self._forgotten), []
            used, self._used = tuple(self._used.values()), {}
            return RouterNews(problem=self._problem, forgotten=forgotten, used=used)

    def _run(self) -> None:
        while True:
            self._has_changed.clear()
            wanted = self._wanted
            is_done = wanted is None or self._tell(wanted)
            self._has_changed.wait(CHECK_S if is_done else RETRY_S)

    def _tell(self, wanted: tuple[Loan, ...]) -> bool:
        """Tells the first router that answers what it lacks. Returns whether it knows everything now."""
        problem: str | None = None
        is_done = False
        for url in self._urls:
            try:
                with http_client(url, key=self._key, timeout=TIMEOUT_S, ca=self._ca) as client:
                    known = self._known(client, wanted)
                    self._ask_others(url, wanted)  # before any router forgets a job
                    is_done, problem = self._told_all(client, known, wanted), None
                break
            except httpx.HTTPError as error:  # it is away: perhaps another one is not
                problem = f"router {url} does not answer ({error or type(error).__name__})"
            except WorkerError as error:
                problem = f"router {url}: {error}"
                break
            except Exception as error:  # a thread that ended would tell nobody
                problem = f"router {url}: {error!r}"
                if problem != self._problem:
                    logger.exception("router url=%s", url)
                break
        if problem != self._problem:
            logger.info("router url=%s problem=%s", ",".join(self._urls), problem)
        with self._lock:
            self._problem = problem
        return is_done

    def _known(self, client: httpx.Client, wanted: tuple[Loan, ...]) -> _Jobs:
        """Returns the jobs as a router shows them, and notes how long they have used serving GPUs.

        Raises: HTTPError; WorkerError.
        """
        try:
            known: _Jobs = _answer(client.get("/admin/jobs")).json()["jobs"]
            for loan in wanted:
                # The router may not know yet that the name is another job's, or the same job's with another
                # key.
                for each in (loan, self._told.get(loan.job, loan)):
                    if (use := _use(each, known.get(loan.job, {}))) is not None:
                        with self._lock:
                            self._used[use.meter] = use
                        break
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise WorkerError(
                "its /admin/jobs is not that of a rose router of this scheduler's version; check the address "
                "and the version"
            ) from error
        return known

    def _ask_others(self, told_url: str, wanted: tuple[Loan, ...]) -> None:
        """Asks the other routers for their jobs' use of serving GPUs, which each counts for itself."""
        for url in self._urls:
            if url == told_url:
                continue
            try:
                with http_client(url, key=self._key, timeout=USED_TIMEOUT_S, ca=self._ca) as client:
                    self._known(client, wanted)
            except (httpx.HTTPError, WorkerError) as error:  # the next look finds it
                logger.debug("router url=%s says no use of GPUs: %s", url, error)

    def _told_all(self, client: httpx.Client, known: _Jobs, wanted: tuple[Loan, ...]) -> bool:
        """Raises: HTTPError; WorkerError with the first refusal, after everything else was told."""
        refusal: WorkerError | None = None
        is_done = True
        for loan in wanted:
            try:
                if loan.is_over:
                    is_done &= self._forget(client, loan)
                elif self._told.get(loan.job) != loan or not _shows(known.get(loan.job), loan):
                    _answer(client.put(_path(loan), json={"key": loan.key, **_said(loan)}))
                    self._told[loan.job] = loan
            except WorkerError as error:
                refusal = refusal if refusal is not None else error
        if refusal is not None:
            raise refusal
        return is_done

    def _forget(self, client: httpx.Client, loan: Loan) -> bool:
        """Returns whether the router has forgotten the job. It first ends the turns that the job has left."""
        answer = client.delete(_path(loan))
        if answer.status_code == httpx.codes.CONFLICT:
            _answer(client.post("/admin/abort", json={"job": loan.job}))
            return False
        if answer.status_code != httpx.codes.NOT_FOUND:
            _answer(answer)
        self._told.pop(loan.job, None)
        with self._lock:
            self._forgotten.append(loan)
        return True


def _use(loan: Loan, shown: Mapping[str, Any]) -> Use | None:
    """Returns what a router has counted for the loan's key; None if it is nothing, or of another key."""
    meter, gpu_s = shown.get("serving_meter", {}), shown.get("serving_gpu_s", 0.0)
    if not gpu_s or meter.get("proof") != key_proof(loan.key, meter.get("id", "")):
        return None
    return Use(job=loan.job, submission=loan.submission, meter=meter["id"], gpu_s=gpu_s)


def _said(loan: Loan) -> dict[str, Any]:
    """Returns what the router is told. What the job's file leaves open is as the router's file says."""
    said = {name: getattr(loan, name) for name in _SAID}
    return {name: value for name, value in said.items() if value is not None}


def _shows(known: Mapping[str, Any] | None, loan: Loan) -> bool:
    if known is None or not known.get("has_key"):
        return False
    return all(known.get(name) == value for name, value in _said(loan).items())


def _path(loan: Loan) -> str:
    return f"/admin/jobs/{quote(loan.job, safe='')}"


def _answer(answer: httpx.Response) -> httpx.Response:
    """Returns the answer. Raises: WorkerError with the router's reason if it refuses."""
    if not answer.is_success:
        request = f"{answer.request.method} {answer.request.url.path}"
        raise WorkerError(f"{request} was answered {answer.status_code}: {_reason(answer)}")
    return answer


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
