"""The vLLM plugin. Only this folder imports vllm."""
