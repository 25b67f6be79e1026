"""An environment of SkyRL's, of one turn, whose reward is the share of even words."""

from statistics import fmean
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv


class EvenWords(BaseTextEnv):
    """SkyRL's workers find it by this module's name."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def step(self, action: str) -> dict[str, Any]:
        words = [int(word[1:]) for word in action.split() if word[1:].isdigit()]
        reward = fmean(word % 2 == 0 for word in words) if words else 0.0
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}
