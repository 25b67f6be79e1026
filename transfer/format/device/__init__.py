"""Deltas of tensors that are on a CUDA device: found there, and applied there."""
