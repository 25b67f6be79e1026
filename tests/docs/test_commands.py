"""The `rose` command lines on pages, in examples and in --help are accepted by their commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.arguments import CommandParser
from rose.cli import COMMANDS
from rose.scheduler.runtime.command.sched import SUBCOMMANDS
from tests.commands import rose

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(each for each in (ROOT / "examples").rglob("*") if each.is_file()),
]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
"""A block of a page, with its language. Commands have none; what they print is text."""
TAKERS_OF_VLLM_FLAGS = ("rose serve", "rose profile", "rose front")
NAMES = [
    *((each.name,) for each in COMMANDS),
    *(("sched", each.name) for each in SUBCOMMANDS),
    *(("ray", action) for action in ("up", "status", "down")),
    *(
        ("sched", command, "--level", level)
        for command in ("simulate", "explain")
        for level in ("group", "node", "gpu")
    ),
]


class Accepted(Exception):
    """A command has parsed its arguments; the exception ends it here."""


@pytest.fixture
def only_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No command goes on once its own parser has accepted the arguments. The named models are there."""
    for folder in ("model", "models/chat", "models/policy"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    parse_args, parse_known_args = CommandParser.parse_args, CommandParser.parse_known_args

    def parse_all(self: CommandParser, *args: Any) -> Any:
        found = parse_args(self, *args)
        if self.prog in ("rose", "rose sched"):  # which hand their other arguments on
            return found
        raise Accepted

    def parse_known(self: CommandParser, *args: Any) -> Any:
        found, others = parse_known_args(self, *args)
        if self.prog in TAKERS_OF_VLLM_FLAGS:
            raise Accepted
        return found, others

    monkeypatch.setattr(CommandParser, "parse_args", parse_all)
    monkeypatch.setattr(CommandParser, "parse_known_args", parse_known)


def commands_in(text: str) -> Iterator[str]:
    """Yields each `rose` command of a shell text without its comment."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in line.removeprefix("exec ").split("&&"):
            if command.strip().startswith("rose "):
                yield command.strip()


def shown_commands() -> list[tuple[str, str]]:
    return [
        (path.name, command)
        for path in FILES
        for language, text in (
            BLOCK.findall(path.read_text()) if path.suffix == ".md" else [("", path.read_text())]
        )
        if language == ""
        for command in commands_in(text)
    ]


def assert_accepted(command: str) -> None:
    with pytest.raises(Accepted):
        result = rose(*shlex.split(command, comments=True)[1:])
        pytest.fail(f"{command}: {result.stderr or result.stdout}")


@pytest.mark.usefixtures("only_parsed")
@pytest.mark.parametrize(("file", "command"), shown_commands())
def test_a_command_line_of_a_page_or_an_example_is_accepted(file: str, command: str) -> None:
    assert_accepted(command)


@pytest.mark.parametrize("name", NAMES, ids=" ".join)
def test_the_example_of_a_help_text_is_accepted(
    name: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    example = rose(*name, "--help").stdout.rpartition("example:\n")[2]
    request.getfixturevalue("only_parsed")
    for command in commands_in(example):
        assert_accepted(command)
