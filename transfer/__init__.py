"""Weights in motion: lossless sparse deltas from a trainer to rollout engines over a relay."""

if not __name__.startswith("rose."):
    raise ImportError("import rose.transfer, not transfer: the top-level folder is linked into rose")
