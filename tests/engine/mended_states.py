"""Mamba2's kernels for CPUs, mended so that a model's answers do not change with its draft tokens.

vLLM 0.32 has two faults here: the convolution ignores how many drafts were accepted, and the kernel of the
states takes the table of blocks, which has a column for each draft, for a list of one block per request.
"""

from typing import Any

import torch
from torch.nn import functional


def mend_states() -> None:
    """Has this process's Mamba2 layers go on from the last accepted token."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    mamba_mixer2.causal_conv1d_update = _convolve
    mamba_mixer2.selective_state_update = _update_states


def _rows(count: int, accepted: torch.Tensor | None, starts: torch.Tensor | None) -> list[tuple[slice, int]]:
    """Returns each request's tokens and the number of its tokens that the step before kept."""
    begins = list(range(count + 1)) if starts is None else starts.tolist()
    kept = [1] * count if accepted is None else accepted.tolist()
    return [(slice(begins[row], begins[row + 1]), max(kept[row], 1)) for row in range(count)]


def _convolve(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    **_: Any,
) -> torch.Tensor:
    """A state has the inputs that the next step's first token needs if one token is kept, and behind them
    those of the step's further tokens."""
    assert activation == "silu"
    num_before = weight.shape[1] - 1
    slots = conv_state_indices.reshape(len(conv_state_indices), -1)[:, 0].tolist()
    out = torch.empty_like(x)
    for slot, (tokens, kept) in zip(
        slots, _rows(len(slots), num_accepted_tokens, query_start_loc), strict=True
    ):
        state = conv_state[slot]
        inputs = torch.cat([state[:, kept - 1 : kept - 1 + num_before], x[tokens].T], dim=1)
        convolved = functional.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))
        out[tokens] = functional.silu(convolved)[0].T
        state[:, : inputs.shape[1] - 1] = inputs[:, 1:]
    return out


def _update_states(
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    num_accepted_tokens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    **_: Any,
) -> None:
    """The state after each token of a step is kept in a block of its own."""
    slots = state_batch_indices.reshape(len(state_batch_indices), -1).tolist()
    per_group = x.shape[1] // b.shape[1]
    steps = functional.softplus(dt + dt_bias)
    b, c = (each.repeat_interleave(per_group, dim=1)[:, :, None] for each in (b, c))
    for blocks, (tokens, kept) in zip(slots, _rows(len(slots), num_accepted_tokens, cu_seqlens), strict=True):
        state = states[blocks[kept - 1]].clone()
        for block, token in zip(blocks, range(tokens.start, tokens.stop), strict=False):
            step = steps[token][..., None]
            state = state * torch.exp(decay * step) + step * x[token][..., None] * b[token]
            states[block] = state
            out[token] = ((state * c[token]).sum(-1) + skip * x[token]).view(out[token].shape)
