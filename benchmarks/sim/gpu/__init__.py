"""Pipelines on shared GPUs: what the shipped policy is compared with."""
