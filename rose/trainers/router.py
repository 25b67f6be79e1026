"""What every trainer tells its routers: that an RL step begins. Turns go through the trainer's own client."""

from collections.abc import Callable

import httpx

from rose.config import Settings
from rose.errors import ConfigError, WorkerError
from rose.http import http_client, urls_of
from rose.signature import ANNOUNCED, Signer
from rose.types import WeightVersion

_TIMEOUT_S = 30.0

Announce = Callable[[int], None]
"""A function that tells the router that an RL step begins."""


def routers_of(router_url: str | None, settings: Settings) -> tuple[str, ...]:
    """Returns the addresses in ``router_url``; None: those of ROSE_ROUTER_URL. Raises: ConfigError."""
    url = router_url if router_url is not None else settings.router_url
    if url is None:
        raise ConfigError("router_url: missing; give the router's address, or set ROSE_ROUTER_URL")
    return urls_of(url)


def router_announcer(
    router_url: str,
    admin_key: str | None,
    published: Callable[[], WeightVersion | None] = lambda: None,
    signing_key: str | None = None,
) -> Announce:
    """Returns a function to call at the start of each RL step, so that frozen budgets grow back (ROSE §4.1).

    ``router_url`` may be several addresses of routers before the same workers, separated by commas: one that
    answers hands the step on to the others. ``published`` returns the newest weights that were published,
    such as ``lambda: publisher.version``: a worker that reports newer ones then makes no other worker's
    weights too old. ``admin_key``: the router's ROSE_ROUTER_ADMIN_KEY, which a router with any key asks for.
    ``signing_key``: instead of the environment's ROSE_SIGNING_KEY. With one of them the version is signed,
    which a router that has ROSE_PUBLIC_KEY asks for. The function raises a WorkerError, with the router's
    reason, if a router refuses or none answers.
    """
    urls = [f"{url}/admin/rl_step" for url in urls_of(router_url)]
    settings = Settings.from_environment()
    ca, key = settings.tls_ca, signing_key if signing_key is not None else settings.signing_key
    signer = Signer(key) if key is not None else None

    def announce(step: int) -> None:
        version = published()
        body: dict[str, object] = {"step": step}
        if version is not None:
            body["version"] = str(version)
            if signer is not None:
                body["signed"] = signer.seal(ANNOUNCED, str(version).encode()).decode()
        problem = ""
        for url in urls:
            problem = f"{url}: RL step {step} could not be announced"
            try:
                with http_client(key=admin_key, timeout=_TIMEOUT_S, ca=ca) as client:
                    answer = client.post(url, json=body)
            except httpx.HTTPError as error:
                problem = f"{problem}: {error}"
                continue
            if answer.is_success:
                return
            problem = f"{problem}: {answer.status_code} {answer.text[:500]}"
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:  # else it is full, or about to end
                break
        raise WorkerError(problem)

    return announce
