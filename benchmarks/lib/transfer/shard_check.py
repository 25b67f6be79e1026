"""Proof of a shard plan: what it copies is, bit for bit, what vLLM's loader loads.

Owns the comparison over random bits, of one rank at a time. Promises that every parameter is compared whole,
also where the plan writes nothing. Run it for an architecture that has not been checked: ``bench_plan.py``
and the tests check dense, tied and mixture-of-experts models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import set_default_torch_dtype

from rose.engine.weights.shard_recorder import detached_config
from rose.transfer.format.shard_plan import ShardPlan

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def wrong_parameters(vllm_config: Any, plan: ShardPlan, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters that the plan fills otherwise than the loader does; empty when it is exact.

    Under the same parallel groups as the plan was recorded. tensors: the whole checkpoint, any bits.
    """
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_default_torch_dtype(vllm_config.model_config.dtype):
        model = initialize_model(vllm_config=detached_config(vllm_config))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.zero_()
        model.load_weights(iter(tensors.items()))
    planned = {name: np.zeros_like(_bits(parameter)) for name, parameter in parameters.items()}
    plan.apply({name: _bits(tensor) for name, tensor in tensors.items()}, planned)
    return [
        name for name, parameter in parameters.items() if not np.array_equal(planned[name], _bits(parameter))
    ]


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()]).numpy()
