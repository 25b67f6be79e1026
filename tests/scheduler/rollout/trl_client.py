"""Run as a program: TRL's unmodified VLLMClient against each URL given; prints a list of what it returned.

A program of its own, because TRL decides at import whether vLLM is installed.
"""

import json
import sys
from typing import Any


def run(url: str) -> dict[str, object]:
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=url)
    sampling: dict[str, Any] = {"n": 2, "top_k": 1, "max_tokens": 8, "logprobs": 2}
    generated = client.generate([[5, 6, 7], [8, 9, 10, 11]], **sampling)
    chatted = client.chat([[{"role": "user", "content": "w9 w10"}]], temperature=0.0, max_tokens=4)
    return {"generate": generated, "chat": chatted}


if __name__ == "__main__":
    print(json.dumps([run(url) for url in sys.argv[1:]]))
