"""A front's call with one answer under way, for tests that hand it a worker's parts."""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from rose.engine.front.calls import Outputs


def outputs(**params: Any) -> Outputs:
    return Outputs(
        EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=SamplingParams(**params),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )
