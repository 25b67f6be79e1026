"""A reward function of TRL, for ``--fine-tune-reward tests.trainers.fine_tune.toy_reward:wanted_words``."""

from statistics import fmean
from typing import Any


def wanted_words(completions: list[Any], wanted: list[str], **_: Any) -> list[float]:
    """The share of an answer's words that are among the first ``wanted`` ones, w0 to w9 for "10".

    An answer to a chat is a list with one message.
    """
    answers = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [
        fmean(word in {f"w{n}" for n in range(int(count))} for word in answer.split())
        if answer.strip()
        else 0.0
        for answer, count in zip(answers, wanted, strict=True)
    ]
