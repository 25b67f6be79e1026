"""The training examples of a JSON Lines file: whole texts, prompts with their completions, or preferences.

Promises one clear line about a file that can't be trained on, with the number of its first bad line. Never
tokenizes, so a command can check its input before it starts anything.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ConfigError

_SHAPES = (
    '{"text": ...}, {"prompt": ..., "completion": ...} or {"prompt": ..., "chosen": ..., "rejected": ...}'
)
_KEYS = ({"text"}, {"prompt", "completion"}, {"prompt", "chosen", "rejected"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One sequence to learn from. Only the completion counts for the loss."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to a prompt, of which the chosen one is to become likelier."""

    prompt: str
    chosen: str
    rejected: str


def read_examples(path: Path) -> list[Example] | list[Preference]:
    """Reads all examples. Raises: ConfigError if the file has none, has a line that is not an example, or has
    both preferences and texts."""
    try:
        # str.splitlines would also split at the separators that JSON allows inside of a text, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"--fine-tune {path}: can't be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--fine-tune {path}: not a text file in UTF-8") from error
    numbered = [(number, _parse(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--fine-tune {path}: there is no example in it; each line is one, {_SHAPES}")
    texts = [each for _, each in numbered if isinstance(each, Example)]
    preferences = [each for _, each in numbered if isinstance(each, Preference)]
    if texts and preferences:
        first = type(numbered[0][1])
        number = next(number for number, each in numbered if not isinstance(each, first))
        raise ConfigError(
            f"--fine-tune {path}: line {number} is of another kind than the first: preferences and texts are "
            "learned in different ways; put them into two files"
        )
    return texts or preferences


def _parse(path: Path, number: int, line: str) -> Example | Preference:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--fine-tune {path}: line {number} is not JSON ({error.msg})") from error
    keys = set(content) if isinstance(content, dict) else set()
    if keys not in _KEYS or not all(isinstance(value, str) for value in content.values()):
        raise ConfigError(f"--fine-tune {path}: line {number} is not of the form {_SHAPES}, with texts")
    if "chosen" in keys:
        if content["chosen"] == content["rejected"]:
            raise ConfigError(
                f"--fine-tune {path}: line {number} has the same text as chosen and rejected; remove the line"
            )
        return Preference(**content)
    completion = content["text"] if keys == {"text"} else content["completion"]
    if not completion.strip():
        raise ConfigError(f"--fine-tune {path}: line {number} has no text to learn; remove the line")
    return Example(prompt=content.get("prompt", ""), completion=completion)
