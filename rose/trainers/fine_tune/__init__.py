"""Fine-tuning in the slack of a serving engine: a callback for any Hugging Face or TRL trainer, and the
trainer that `rose serve --fine-tune` starts."""

from rose.trainers.fine_tune.callback import SlackCallback

__all__ = ["SlackCallback"]
