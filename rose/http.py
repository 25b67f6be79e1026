"""HTTP clients of workers and services, and the names of headers. rose.transfer.relay.calls has the
relays'."""

import httpx

KEEPALIVE_S = 2.0
"""When an idle connection is closed: sooner than vLLM's server does (5 s), which could otherwise close it
just as a request is sent."""
JOB_HEADER = "X-Rose-Job"
"""Tells the router which RL job a turn belongs to."""
RUN_HEADER = "X-Rose-Run"
"""Tells the router which training run's weights a trainer wants."""
TIMEOUT_HEADER = "X-Rose-Timeout-S"
"""Tells the router how long a turn may take, queueing included."""
SESSION_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
"""Name a turn's trajectory."""
API_KEY_HEADER = "X-Api-Key"
"""Where clients of /v1/messages send their key."""
FRONT_HEADERS = (
    *("Authorization", API_KEY_HEADER, JOB_HEADER, RUN_HEADER),
    *(*SESSION_HEADERS, TIMEOUT_HEADER, "traceparent"),
)
"""What a front takes along from a chat to its turns."""
FRONT_SECRET_HEADER = "X-Rose-Front"
"""Tells a router that a turn comes from one of its own fronts, by the secret that it started them with."""
NO_PROMPT_IDS_HEADER = "X-Rose-No-Prompt-Ids"
"""Tells a worker to leave the prompt's token ids, which the router knows, out of the stream."""


def http_client(url: str = "", *, key: str | None, timeout: httpx.Timeout | float) -> httpx.Client:
    """Makes a client for ``url`` with ``key`` as its bearer key; timeouts are in seconds.

    It uses no proxy of the environment: workers and services are reached directly.
    """
    return httpx.Client(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"} if key is not None else {},
        timeout=timeout,
        limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        trust_env=False,
    )
