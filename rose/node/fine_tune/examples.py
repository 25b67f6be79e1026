"""The training examples of a JSON Lines file: whole texts, or prompts with their completions.

Promises one clear line about a file that can't be trained on, with the number of its first bad line. Never
tokenizes, so a command can check its input before it starts anything.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from rose.errors import ConfigError

_SHAPES = '{"text": ...} or {"prompt": ..., "completion": ...}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One sequence to learn from. Only the completion counts for the loss."""

    prompt: str
    completion: str


def read_examples(path: Path) -> list[Example]:
    """Reads all examples. Raises: ConfigError if the file has none, or has a line that is not an example."""
    try:
        # str.splitlines would also split at the separators that JSON allows inside of a text, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"--fine-tune {path}: can't be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--fine-tune {path}: not a text file in UTF-8") from error
    examples = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not examples:
        raise ConfigError(f"--fine-tune {path}: there is no example in it; each line is one, {_SHAPES}")
    return examples


def _parse(path: Path, number: int, line: str) -> Example:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--fine-tune {path}: line {number} is not JSON ({error.msg})") from error
    keys = set(content) if isinstance(content, dict) else set()
    if not (keys == {"text"} or keys == {"prompt", "completion"}) or not all(
        isinstance(value, str) for value in content.values()
    ):
        raise ConfigError(f"--fine-tune {path}: line {number} is not of the form {_SHAPES}, with texts")
    completion = content["text"] if keys == {"text"} else content["completion"]
    if not completion.strip():
        raise ConfigError(f"--fine-tune {path}: line {number} has no text to learn; remove the line")
    return Example(prompt=content.get("prompt", ""), completion=completion)
