"""The argument parser of every `rose` command, and how a command fails.

Bad input is one line on stderr and exit status 2. Another failure that ROSE foresaw is one line and status 1.
Both hold for `rose NAME` and for `python -m`. --help ends with an example. Abbreviated flags are refused,
because a later flag would make them ambiguous.
"""

import argparse
import difflib
import math
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rose.errors import ConfigError, PoolError, RoseError

BAD_INPUT_STATUS = 2
INTERRUPTED_STATUS = 130
"""The status that a shell reports for a command that Ctrl-C ended."""
MOST_PORT = 65535


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description, and wraps the long ones; indented lines are examples, and stay."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        return "\n".join(
            indent + line if line[:1] in ("", " ") else textwrap.fill(line, width) for line in lines
        )


class CommandParser(argparse.ArgumentParser):
    """A parser for the command that the user types as ``prog``, such as "rose relay"."""

    def __init__(self, prog: str, description: str, example: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n  {example}",
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Prints one line instead of the usage text, and exits; --help shows the rest."""
        command = self.prog.removeprefix("rose").strip()
        where = f"{command}: " if command else ""
        self.exit(BAD_INPUT_STATUS, f"rose: error: {where}{message}; see {self.prog} --help\n")


def add_insecure_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag by which a user opens a command to other machines without keys."""
    parser.add_argument(
        "--insecure", action="store_true", help="listen beyond this machine even without keys"
    )


def name_among(names: Sequence[str], what: str) -> Callable[[str], str]:
    """Returns a type for argparse that takes one of ``names``, and suggests the closest for another one."""

    def known(name: str) -> str:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            raise argparse.ArgumentTypeError(f"no {what} {name!r}; {fix}")
        return name

    return known


def port_number(text: str) -> int:
    """Returns a TCP port for argparse; 0 lets the system choose. Raises: ArgumentTypeError."""
    return _whole_number(text, 0, MOST_PORT)


def positive_int(text: str) -> int:
    """Returns a whole number of at least 1 for argparse. Raises: ArgumentTypeError."""
    return _whole_number(text, 1, None)


def count(text: str) -> int:
    """Returns a whole number of at least 0 for argparse. Raises: ArgumentTypeError."""
    return _whole_number(text, 0, None)


def positive_seconds(text: str) -> float:
    """Returns a finite number above 0 for argparse. Raises: ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def model_name(text: str) -> str:
    """Returns a model's folder or hub id for argparse. Raises: ArgumentTypeError for a path where none is."""
    if text.startswith(("/", ".", "~")) and not Path(text).expanduser().is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: no such directory; check the path, or give a hub id")
    return text


def check_output(path: Path, *, may_exist: bool = False) -> None:
    """Raises: ConfigError if a file could not be written to ``path`` at the end of a command.

    Call it before the command measures what the file is for.
    """
    if path.is_dir() or (path.exists() and not may_exist):
        raise ConfigError(f"{path}: exists; remove it, or choose another with --output")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it, or choose another --output")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{path}: can't be written; choose another with --output")


def _whole_number(text: str, least: int, most: int | None) -> int:
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        allowed = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {allowed}")
    return number


def run_command(name: str, main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Runs a command's ``main`` and returns its exit status; prints an error of ROSE as one line on
    stderr."""
    try:
        return main(argv)
    except RoseError as error:
        return report(name, error)
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS


def report(name: str, error: RoseError) -> int:
    """Prints the error of a command as one line on stderr and returns the command's exit status."""
    print(f"rose: error: {name}: {error}", file=sys.stderr, flush=True)
    return BAD_INPUT_STATUS if isinstance(error, (ConfigError, PoolError)) else 1
