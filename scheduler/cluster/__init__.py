"""Whole RL jobs on rollout and training pools: which job shares which nodes."""
