"""A worker as operators see it.

Owns: the entries of GET /workers and /admin/status.
Promises: plain JSON.
Never does: change anything.
"""

from typing import Any

from rose.scheduler.rollout.workers.worker import Worker


def worker_json(worker: Worker, now: float) -> dict[str, Any]:
    """Returns the entry of a worker. ``now``: monotonic seconds."""
    view = worker.view()
    return {
        "id": worker.id,
        "url": worker.spec.url,
        "kind": worker.spec.kind.value,
        "models": list(worker.models) if worker.models is not None else None,
        "alive": worker.is_alive,
        "active": worker.is_active,
        "updating": worker.is_updating,
        "draining": worker.is_draining,
        "problem": worker.problem,
        "on_probation": worker.is_on_probation,
        "eligible": view.eligible,
        "owner": worker.owner,
        "lent_run": worker.lent_run,
        "switch_s": round(worker.switch_s, 3),
        "in_flight": worker.in_flight,
        "cap": worker.cap,
        "share": round(view.share, 4) if view.share is not None and now < view.share_until else None,
        "kv_usage": round(worker.kv_usage.mean(), 4),
        "cache_trust": round(worker.cache_trust, 4),
        "weight_version": str(worker.weight_version) if worker.weight_version is not None else None,
        "adapters": sorted(map(str, worker.adapters.values())),
        "seen_s_ago": round(now - worker.last_seen, 3) if worker.last_seen is not None else None,
        "turns": worker.num_turns,
        "tokens": worker.num_tokens,
        "status": worker.status.model_dump() if worker.status is not None else None,
    }
