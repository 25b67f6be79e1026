"""ROSE: RL rollouts in the slack of GPUs that already serve traffic.

Importing this package loads neither torch nor vllm; heavy modules are imported where used.
"""

__version__ = "0.1.0"
