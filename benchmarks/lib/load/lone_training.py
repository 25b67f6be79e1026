"""The trainer of `rose serve --fine-tune` with a machine to itself: no guest, no relay, the same batches.

`python lone_training.py --evaluate TEXTS ...` takes that trainer's flags too. Prints one JSON line: steps per
second after the first ones, and the loss of the texts before and after.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from rose.node.fine_tune.examples import Example, read_examples
from rose.trainers.fine_tune.callback import SlackCallback
from rose.trainers.fine_tune.command import load, make_trainer, parse
from rose.trainers.fine_tune.sequences import Sequences

WARM_UP_STEPS = 5


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Notes when each optimizer step ended."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes the time."""
        self.ends_s.append(time.monotonic())

    @property
    def steps_per_s(self) -> float:
        """Returns the steps per second, without the first steps."""
        ends_s = self.ends_s[WARM_UP_STEPS:]
        return (len(ends_s) - 1) / (ends_s[-1] - ends_s[0])


def main(argv: Sequence[str]) -> int:
    """Trains on all of the data."""
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--evaluate", required=True, type=Path)
    own, rest = flags.parse_known_args(list(argv))
    place, options = parse([*rest, "--pool", "none", "--relay", "none", "--run", "none"])
    torch.set_num_threads(1)
    loaded, times = load(place.model, options), StepClock()
    from transformers import AutoTokenizer

    examples = [each for each in read_examples(own.evaluate) if isinstance(each, Example)]
    texts = Sequences(examples, AutoTokenizer.from_pretrained(place.model), options.tokens)
    before = mean_loss(loaded.model, texts)
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(options, loaded, SlackCallback("none"), folder, [times]).train()
    after = mean_loss(loaded.model, texts)
    print(json.dumps({"steps_per_s": times.steps_per_s, "before": before, "after": after}), flush=True)
    return 0


def mean_loss(model: Any, texts: Sequences) -> float:
    """Returns the mean loss of all predicted tokens."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for number in range(len(texts)):
            ids = torch.tensor([texts[number]["input_ids"]])
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
    model.train()
    return total / count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
