"""The keys for ROSE that a client or a gateway may set in the OpenAI API's ``vllm_xargs``.

Two keys are the request's own latency objectives: milliseconds above 0, as a number or as text. The third
names its tenant for the reports of harm, as the header X-Rose-Tenant does. The API server refuses other
values (rose/engine/http/front_door.py). If a request with such a value reaches the engine in another way,
the value is ignored and a warning is logged.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

from rose.admission.harm import TENANT_BYTES
from rose.types import SLO

TTFT_KEY = "rose_ttft_ms"
TPOT_KEY = "rose_tpot_ms"
TENANT_KEY = "rose_tenant"
TENANT_HEADER = "X-Rose-Tenant"
KEYS = (TTFT_KEY, TPOT_KEY, TENANT_KEY)

logger = logging.getLogger(__name__)


def requested_slo(extra_args: Mapping[str, Any] | None, deployment: SLO) -> SLO | None:
    """Returns the request's own SLO, or None if it names none. A request that names only one of the two
    latencies has the deployment's for the other."""
    if not extra_args or not {TTFT_KEY, TPOT_KEY} & extra_args.keys():
        return None
    if (problem := key_problem(extra_args)) is not None:
        logger.warning("ignored: %s", problem)
    ttft_s = _seconds(extra_args.get(TTFT_KEY))
    tpot_s = _seconds(extra_args.get(TPOT_KEY))
    return SLO(
        ttft_s=ttft_s if ttft_s is not None else deployment.ttft_s,
        tpot_s=tpot_s if tpot_s is not None else deployment.tpot_s,
    )


def requested_tenant(extra_args: Mapping[str, Any] | None) -> str:
    """Returns the tenant that the request names; empty if it names none."""
    tenant = extra_args.get(TENANT_KEY, "") if extra_args else ""
    return tenant if _is_tenant(tenant) else ""


def key_problem(extra_args: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the keys' values and what is allowed, or None if all may be used."""
    if TENANT_KEY in extra_args:
        problem = tenant_problem(f"vllm_xargs.{TENANT_KEY}", extra_args[TENANT_KEY])
        if problem is not None:
            return problem
    for key in (TTFT_KEY, TPOT_KEY):
        if key in extra_args and _seconds(extra_args[key]) is None:
            return (
                f"vllm_xargs.{key} is {extra_args[key]!r:.100}: send milliseconds above 0 as a number, or "
                f"leave the key out for the engine's own SLO"
            )
    return None


def tenant_problem(place: str, tenant: Any) -> str | None:
    """Returns what is wrong with a tenant's name and what is allowed, or None; ``place``: where it stands."""
    if _is_tenant(tenant):
        return None
    allowed = f"a printable name of 1 to {TENANT_BYTES} bytes"
    return f"{place} is {tenant!r:.100}: send {allowed}, or leave it out"


def _is_tenant(name: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= TENANT_BYTES


def _seconds(milliseconds: Any) -> float | None:
    try:
        seconds = float(milliseconds) / 1000
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
