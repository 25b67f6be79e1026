"""HTTP clients of workers and services; relays have one of their own (rose.transfer.relay_calls)."""

import httpx

KEEPALIVE_S = 2.0
"""An idle connection is closed after this: sooner than vLLM's server does (5 s), which may otherwise close it
just as a request is sent."""


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
