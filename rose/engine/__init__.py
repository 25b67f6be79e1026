"""The vLLM plugin: the only folder that imports vllm."""
