"""The router's settings.

Owns: RouterConfig, WorkerSpec, RouterJob, and the one-line errors of bad input.
Promises: settings are read-only once built. Every error names the file or flag, the key and the fix.
Never does: start anything.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rose.config import Settings
from rose.errors import ConfigError
from rose.http import checked_url
from rose.messages import ConcurrencyProfile
from rose.ports import check_exposure
from rose.scheduler.rollout.placing.versions import VersionMode
from rose.scheduler.rollout.placing.views import WorkerKind

MAX_WORKERS = 10_000
"""Each is then asked for its status every 4 s. An engine closes a connection that was idle for 5 s, and a new
one for each heartbeat would take the router's CPU."""


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkerSpec(_Settings):
    """One rollout engine: its address and the kind and number of its GPUs."""

    url: str = Field(description="address of the engine, http://HOST:PORT")
    kind: WorkerKind = Field(
        default=WorkerKind.DEDICATED, description="serving if the GPU serves traffic as well"
    )
    gpus: int = Field(default=1, ge=1, description="number of GPUs of the engine")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        return checked_url(url)

    @property
    def id(self) -> str:
        """Returns host:port, which names the worker everywhere."""
        return urlsplit(self.url).netloc


class RouterJob(_Settings):
    """One RL job: its key, the run and model that it samples, its limits."""

    key: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="key of this job's clients, which stands for the job, its run and its model",
    )
    run_id: str | None = Field(default=None, description="the training run whose weights its turns get")
    model: str | None = Field(default=None, description="the model of its turns")
    weight: float = Field(
        default=1.0,
        ge=1e-3,
        le=1e3,
        description="part of the generated tokens under contention, relative to other jobs",
    )
    priority: int = Field(
        default=0,
        ge=-(2**31),
        le=2**31 - 1,
        description="while its turns wait for a worker, those of jobs of lower priority wait longer",
    )
    max_in_flight: int | None = Field(default=None, ge=1, description="the most turns that it runs at a time")
    max_serving_gpus: int | None = Field(
        default=None, ge=0, description="the most serving GPUs that it may borrow: N_serving (ROSE §4)"
    )
    max_queued: int | None = Field(
        default=None, ge=1, description="the most turns that wait; by default max_queued_per_job"
    )


class FrontSpec(_Settings):
    """The fronts beside the router: vLLM's own API servers, whose turns the router places."""

    count: int = Field(
        default=0, ge=0, description="processes of rose front, started and ended with the router"
    )
    flags: tuple[str, ...] = Field(
        default=(), description="flags of rose front: --model DIR, and parsers as the workers have them"
    )


class RouterConfig(_Settings):
    """All settings. Times are in seconds."""

    host: str = Field(default="127.0.0.1", description="the address to listen on")
    port: int = Field(
        default=8100, ge=0, le=65535, description="the port to listen on; 0 takes any free port"
    )
    workers: tuple[WorkerSpec, ...] = Field(default=(), description="the rollout engines behind the router")

    policy: str = Field(
        default="cost",
        pattern="^(cost|paper|turnwise|pinned)$",
        description="how turns are placed: cost, paper, turnwise or pinned",
    )
    run_id: str | None = Field(
        default=None, description="the only training run; workers with weights of others are refused"
    )
    weights_s: float = Field(
        default=300.0,
        gt=0,
        description="a turn whose weights no worker has for this long is answered 503",
    )
    version_mode: VersionMode = Field(
        default=VersionMode.LATEST, description="the weight versions that a turn may use"
    )
    max_lag: int = Field(
        default=1, ge=0, description="the most versions behind the newest, under version_mode max-lag"
    )
    turns_per_gpu: int = Field(
        default=16, ge=1, description="the most turns on one GPU at a time (ROSE §4.3)"
    )
    concurrency_profile: Path | None = Field(
        default=None,
        description="file of rose profile --concurrency that sets turns_per_gpu (ROSE Appendix A)",
    )
    max_sessions: int = Field(
        default=131072, ge=1, description="the most trajectories whose worker is remembered"
    )
    max_fingerprints: int = Field(
        default=8192,
        ge=1,
        description="the most finished turns by which trajectories without a key are recognized",
    )

    fronts: FrontSpec = Field(
        default=FrontSpec(),
        description="processes for chats with tools, reasoning, stop strings or grammars",
    )

    jobs: dict[str, RouterJob] = Field(default_factory=dict, description="the RL jobs by name")
    job_idle_s: float = Field(
        default=60.0, gt=0, description="a job without work is forgotten after this time"
    )
    max_body_bytes: int = Field(default=256 * 2**20, ge=1024, description="larger bodies are answered 413")
    body_s: float = Field(
        default=60.0, gt=0, description="time for a client's body to arrive; a later one is answered 408"
    )
    idle_s: float = Field(
        default=75.0, gt=0, description="a connection without a whole request head is closed after this time"
    )
    max_connections: int = Field(
        default=65536,
        ge=1,
        description="the most connections of clients: at most half of the open files, or a quarter with"
        " fronts; others are answered 503",
    )
    max_handshakes: int | None = Field(
        default=None,
        ge=1,
        description="most TLS handshakes that one address (IPv6: a /64) may have under way; its further"
        " connections are closed; by default an eighth of max_connections, and at least 64",
    )
    max_jobs: int = Field(
        default=1024,
        ge=1,
        description="the most jobs that have turns at a time; a turn of another one is answered 429, unless"
        " the job is declared",
    )
    max_queued_per_job: int = Field(
        default=4096, ge=1, description="the most waiting turns of a job; further turns are answered 429"
    )
    deadline_s: float = Field(
        default=3600.0,
        gt=0,
        description="the longest time for a turn, queueing included; then it is answered 504",
    )
    stall_s: float = Field(
        default=2.0, gt=0, description="a turn without a token for this long is rerouted (ROSE §4.3)"
    )
    first_token_s: float = Field(
        default=60.0,
        gt=0,
        description="the same for a first token, and for requests that go to one worker whole",
    )
    stream_interval: int = Field(
        default=14,
        ge=1,
        description="the most tokens per chunk from a worker; up to this many are lost when it is killed",
    )
    max_failures: int = Field(
        default=5, ge=1, description="worker errors of a turn after which it is answered 502"
    )
    avoid_s: float = Field(
        default=1.0, ge=0, description="a worker that failed gets no new turn for this long"
    )

    heartbeat_s: float = Field(
        default=0.5, gt=0, description="time between two requests for a worker's status"
    )
    lost_after_s: float = Field(
        default=2.5, gt=0, description="a worker without a sign of life for this long is dead"
    )
    telemetry_max_age_s: float = Field(
        default=2.0, gt=0, description="if a share is older than this, policy cost places as paper does"
    )
    kv_window_s: float = Field(default=3600.0, gt=0, description="window of serving's KV usage (ROSE §4)")
    lease_s: float = Field(
        default=10.0, ge=0, description="serving GPUs keep prefix KV for this long (ROSE §4.1)"
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="time that turns in flight have to end after SIGTERM"
    )

    peers: tuple[str, ...] = Field(
        default=(), description="addresses of the other routers before the same workers"
    )
    state: Path | None = Field(
        default=None,
        description="file that keeps what an admin sets; without the key, one in ROSE_STATE_DIR",
    )

    otlp_endpoint: str | None = Field(
        default=None, description="collector of traces, e.g. http://127.0.0.1:4318/v1/traces (extra: otel)"
    )

    tls_certificate: Path | None = Field(
        default=None, description="certificate in PEM with which the router serves HTTPS alone; needs tls_key"
    )
    tls_key: Path | None = Field(default=None, description="the certificate's key, in PEM")
    tls_ca: Path | None = Field(
        default=None,
        description="certificates in PEM that workers and peers may show; by default the system's",
    )

    api_key: str | None = Field(default=None, min_length=1, description="key that clients must send")
    admin_key: str | None = Field(
        default=None,
        min_length=1,
        description="key that /admin and /workers require; needed to change anything there if any key is set",
    )
    member_key: str | None = Field(
        default=None,
        min_length=1,
        description="key that allows /workers alone, beside the admin key: for what adds and removes workers",
    )
    worker_api_key: str | None = Field(
        default=None, min_length=1, description="key sent to workers on /v1 (their --api-key)"
    )
    rose_key: str | None = Field(default=None, min_length=1, description="key sent to workers on /rose/v1")
    public_key: str | None = Field(
        default=None,
        min_length=1,
        description="trainers' public key; if it is set, only announced versions that they have signed count",
    )

    @field_validator("peers")
    @classmethod
    def _check_peers(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(checked_url(url) for url in urls)

    @property
    def has_keys(self) -> bool:
        """Whether any key but the admin's is set here."""
        of_jobs = any(job.key is not None for job in self.jobs.values())
        return of_jobs or any((self.api_key, self.member_key, self.worker_api_key, self.rose_key))

    def check_exposure(self, given: str, host: str, *, is_insecure: bool) -> None:
        """Raises: ConfigError if others than this machine would reach the router without keys."""
        of_jobs = (job.key for job in self.jobs.values() if job.key is not None)
        clients = self.api_key if self.api_key is not None else next(of_jobs, None)
        keys = {"ROSE_ROUTER_API_KEY": clients, "ROSE_ROUTER_ADMIN_KEY": self.admin_key}
        check_exposure(given, host, keys, is_insecure=is_insecure)


def parse_worker(text: str) -> WorkerSpec:
    """Parses URL[,dedicated|serving][,gpus=N].

    Raises:
        ConfigError: a part is wrong; the message names it.
    """
    url, *rest = text.split(",")
    fields: dict[str, Any] = {"url": url}
    for part in rest:
        name, _, value = part.partition("=")
        fields |= {name: value} if value else {"kind": name}
    try:
        return WorkerSpec(**fields)
    except ValidationError as error:
        raise ConfigError(f"--worker {text}: {_first_problem(error)}") from error


def build_config(fields: Mapping[str, Any], source: str, settings: Settings) -> RouterConfig:
    """Checks settings and adds the environment's keys, over which explicit ones win.

    Raises:
        ConfigError: a setting is wrong; the message names `source` and the key.
    """
    found = {
        "api_key": settings.router_api_key,
        "admin_key": settings.admin_key,
        "member_key": settings.member_key,
        "worker_api_key": settings.worker_api_key,
        "rose_key": settings.key,
        "public_key": settings.public_key,
        "tls_ca": settings.tls_ca,
    }
    try:
        keys: dict[str, Any] = {name: key for name, key in found.items() if key is not None}
        config = RouterConfig.model_validate({**keys, **fields})
        if config.concurrency_profile is not None:
            if "turns_per_gpu" in fields:
                raise ConfigError(f"{source}: give turns_per_gpu or concurrency_profile, not both")
            turns_per_gpu = _profiled_cap(config.concurrency_profile, source)
            config = config.model_copy(update={"turns_per_gpu": turns_per_gpu})
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first_problem(error)}") from error
    if config.fronts.count and not any(flag.startswith("--model") for flag in config.fronts.flags):
        raise ConfigError(f"{source}: fronts: flags lack --model DIR, the workers' model")
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise ConfigError(f"{source}: tls_certificate and tls_key go together: give both")
    if config.peers and config.has_keys and config.admin_key is None:
        raise ConfigError(
            f"{source}: peers: routers with keys take changes by the admin key alone; set admin_key"
            " (ROSE_ROUTER_ADMIN_KEY), the same at all of them"
        )
    ids = [worker.id for worker in config.workers]
    if twice := sorted(worker_id for worker_id, count in Counter(ids).items() if count > 1):
        raise ConfigError(f"{source}: workers: {twice[0]} is given twice")
    if len(ids) > MAX_WORKERS:
        raise ConfigError(f"{source}: workers: {len(ids)} are given, and a router takes {MAX_WORKERS}")
    if (problem := contradiction(config.jobs, config.run_id)) is not None:
        raise ConfigError(f"{source}: {problem}")
    return config


def contradiction(jobs: Mapping[str, RouterJob], run_id: str | None) -> str | None:
    """Returns what is wrong between jobs, or between a job and the router's only run; None if nothing is."""
    holders: dict[str, str] = {}
    for name, job in jobs.items():
        if run_id is not None and job.run_id not in (None, run_id):
            return f"jobs.{name}.run_id: {job.run_id}, but the router's only run_id is {run_id}; drop one"
        if job.key is not None and (other := holders.setdefault(job.key, name)) != name:
            return f"jobs.{name}.key: job {other} has the same key; give each job a key of its own"
    return None


def _profiled_cap(path: Path, source: str) -> int:
    where = f"{source}: concurrency_profile {path}"
    try:
        return ConcurrencyProfile.model_validate_json(path.read_bytes()).turns_per_gpu
    except OSError as error:
        raise ConfigError(f"{where}: can't be read ({error.strerror}); check the path") from error
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ConfigError(f"{where}: not made by rose profile --concurrency ({problem})") from error


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        is_worker = error.title == WorkerSpec.__name__ or first["loc"][0] == "workers"
        kinds: dict[str, type[_Settings]] = {"jobs": RouterJob, "fronts": FrontSpec}
        kind = WorkerSpec if is_worker else kinds.get(str(first["loc"][0]), RouterConfig)
        known = RouterConfig.model_fields if len(first["loc"]) == 1 and not is_worker else kind.model_fields
        return f"{key}: unknown key; known: {', '.join(known)}"
    message, value = first["msg"].removeprefix("Value error, "), repr(first["input"])
    if not key or value in message:
        return f"{key}: {message}" if key else message
    return f"{key}: {message} (got {value})"
