"""Serving and fine-tuning on the same nodes (LeMix): plans, allocation and memory rules, all pure."""
