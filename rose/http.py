"""What ROSE's HTTP has in common: clients of workers and services, and names of headers.

Relays have a client of their own (rose.transfer.relay.calls).
"""

import httpx

KEEPALIVE_S = 2.0
"""An idle connection is closed after this: sooner than vLLM's server does (5 s), which may otherwise close it
just as a request is sent."""
JOB_HEADER = "X-Rose-Job"
"""From a trainer to the router: the RL job that a turn belongs to."""
RUN_HEADER = "X-Rose-Run"
"""From a trainer to the router: the training run whose weights it wants."""
NO_PROMPT_IDS_HEADER = "X-Rose-No-Prompt-Ids"
"""From the router to a worker: leave the prompt's token ids out of the stream, they are known."""


def http_client(url: str = "", *, key: str | None, timeout: httpx.Timeout | float) -> httpx.Client:
    """A client for ``url``, with ``key`` as its bearer key; timeouts in seconds.

    It takes no proxy from the environment, which has no business on loopback.
    """
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key is not None else {},
        timeout=timeout,
        limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        trust_env=False,
    )
