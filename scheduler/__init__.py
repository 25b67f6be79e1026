"""Scheduling of rollout turns (rollout/) and of whole RL jobs (all other folders)."""

if not __name__.startswith("rose."):
    raise ImportError(
        "import rose.scheduler, not scheduler: the top-level folder is linked into the rose package"
    )
