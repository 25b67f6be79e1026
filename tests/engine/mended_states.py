"""Kernels of states for CPUs, mended so that rejected and missing draft tokens leave no trace.

vLLM 0.32 has two faults in Mamba2: the convolution ignores how many drafts were accepted, and the kernel of
the states takes the table of blocks, which has a column for each draft, for a list of one block per request.
It has one in gated delta nets: after a step with fewer drafts than it is configured for, the inputs that the
convolution keeps have old ones of the block between them (line 554 of its module gdn_attention).
"""

from typing import Any

import torch
from torch.nn import functional


def mend_states() -> None:
    """Has this process's layers with states go on from the last accepted token."""
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    mamba_mixer2.causal_conv1d_update = _convolve
    mamba_mixer2.selective_state_update = _update_states
    gdn_attention._spec_forward = _step_of_delta_nets


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


def _step_of_delta_nets(
    layer: Any,
    step: Any,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv_state: torch.Tensor,
    states: torch.Tensor,
    *_: int,
) -> torch.Tensor:
    """vLLM's own step of requests with draft tokens, but for the convolution."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _unpacked_conv_weight

    count = step.num_spec_decodes
    slots, accepted = step.spec_state_indices_tensor[:count], step.num_accepted_tokens[:count]
    starts = step.spec_query_start_loc[: count + 1]
    convolved = _convolve(
        mixed_qkv,
        conv_state,
        _unpacked_conv_weight(layer),
        layer.conv1d.bias,
        layer.activation,
        conv_state_indices=slots,
        num_accepted_tokens=accepted,
        query_start_loc=starts,
    )
    query, key, value = (each.squeeze(0) for each in layer.rearrange_mixed_qkv(convolved))
    out: torch.Tensor = ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query,
        k=key,
        v=value,
        a=a,
        b=b,
        initial_state_source=states,
        spec_state_indices=slots.to(torch.int32).contiguous(),
        num_accepted_tokens=accepted.to(torch.int32).contiguous(),
        cu_seqlens=starts.to(torch.int32).contiguous(),
        use_qk_l2norm_in_kernel=True,
    )
    return out
