"""The rollout endpoint: one address for the trainer, turns spread over dedicated and serving GPUs (§4.3)."""
