"""Scheduling of rollout turns (rollout/) and, later, of whole RL jobs."""

if not __name__.startswith("rose."):
    raise ImportError(
        "import rose.scheduler, not scheduler: the top-level folder is linked into the rose package"
    )
