"""The training examples of a JSON Lines file: whole texts, prompts with their completions, preferences, or
prompts whose answers a reward judges.

Promises one clear line about a file that can't be trained on, with the number of its first bad line. Never
tokenizes, so a command can check its input before it starts anything.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import ConfigError

_SHAPES = (
    '{"text": ...}, {"prompt": ..., "completion": ...} or {"prompt": ..., "chosen": ..., "rejected": ...}'
)
_KEYS = ({"text"}, {"prompt", "completion"}, {"prompt", "chosen", "rejected"})
Messages = list[dict[str, str]]
"""A chat: each message has a role and a content."""
_MESSAGE = '{"role": ..., "content": ...}'
_TAKEN = {
    *("prompts", "completion", "completions", "completion_ids"),
    *("trainer_state", "log_extra", "log_metric", "environments", "image", "images"),
}
"""Names under which TRL hands something of its own to a reward, drops a column, or expects pictures."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that the served model answers."""

    prompt: str | Messages
    """A text, or a chat whose next message is the answer."""
    columns: dict[str, Any]
    """What else the line has, such as the right answer. The reward gets it by these names."""


def read_prompts(path: Path) -> list[Prompt]:
    """Reads all prompts. Raises: ConfigError if the file has none, or has a line without one."""
    found: list[Prompt] = []
    for number, content in _lines(path):
        columns = dict(content) if isinstance(content, dict) else {}
        prompt = _checked(path, number, columns.pop("prompt" if "prompt" in columns else "messages", None))
        if taken := sorted({*columns} & _TAKEN):
            raise ConfigError(
                f"--fine-tune {path}: line {number} has {', '.join(taken)}, a name that TRL uses itself for "
                "rewards; use another one"
            )
        found.append(Prompt(prompt=prompt, columns=columns))
        if columns.keys() != found[0].columns.keys():
            raise ConfigError(
                f"--fine-tune {path}: line {number} has other names than the first line, but a reward gets a "
                "value of each name for every prompt; give all lines the same names"
            )
        if type(prompt) is not type(found[0].prompt):
            raise ConfigError(
                f"--fine-tune {path}: line {number} is of another kind than the first: a reward gets either "
                "texts or chats; put them into two files"
            )
    if not found:
        raise ConfigError(
            f'--fine-tune {path}: there is no prompt in it; each line is one, {{"prompt": ...}}'
        )
    return found


def _checked(path: Path, number: int, prompt: Any) -> str | Messages:
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"--fine-tune {path}: line {number} has no prompt to answer; with --fine-tune-reward each line "
            f'is {{"prompt": ...}} or {{"messages": [{_MESSAGE}, ...]}}, with the other fields of the reward'
        )
    for each in prompt:
        is_message = isinstance(each, dict) and each.keys() == {"role", "content"}
        if not is_message or not all(isinstance(value, str) for value in each.values()):
            raise ConfigError(
                f"--fine-tune {path}: line {number} has a message that is not of the form {_MESSAGE}, with "
                "texts"
            )
    if prompt[-1]["role"] == "assistant":
        raise ConfigError(
            f"--fine-tune {path}: line {number} ends with a message of the assistant, but the served model "
            "gives that answer itself; remove the message"
        )
    return prompt


def read_examples(path: Path) -> list[Example] | list[Preference]:
    """Reads all examples. Raises: ConfigError if the file has none, has a line that is not an example, or has
    both preferences and texts."""
    numbered = [(number, _parse(path, number, content)) for number, content in _lines(path)]
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


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Returns what the lines that are not empty hold, with their numbers. Raises: ConfigError."""
    try:
        # str.splitlines would also split at the separators that JSON allows inside of a text, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"--fine-tune {path}: can't be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--fine-tune {path}: not a text file in UTF-8") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            json.dumps(content, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--fine-tune {path}: line {number} {_defect(error)}") from error
        yield number, content


def _defect(error: ValueError | RecursionError) -> str:
    """Returns what is wrong with a line that can't be read."""
    match error:
        case json.JSONDecodeError():
            return f"is not JSON ({error.msg})"
        case UnicodeEncodeError():
            return f"has {error.object[error.start]!a} alone, half of a character, which no tokenizer takes"
        case RecursionError():
            return "has lists or objects too deep inside each other"
    return f"can't be read ({error})"


def _parse(path: Path, number: int, content: Any) -> Example | Preference:
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
